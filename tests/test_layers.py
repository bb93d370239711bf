"""The imports of the project, held to the rules of its design by reading the sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = SOURCE / "trellium"

# What a room may import of the project, besides itself. Data flows to the right: data, forest, ops, models, trainers, cli.
LEFT = {"errors", "capabilities"}
MAY_IMPORT: dict[str, set[str]] = {
    "__init__": set(),  # names are loaded when first used
    "__main__": {"cli"},
    "errors": set(),
    "capabilities": {"errors"},
    "neuron": set(),
    "data": {"errors"},
    "forest": {"errors", "data"},
    "ops": {"errors"},
    "models": LEFT | {"data", "forest", "ops"},
    "monitor": LEFT,
    "rollout": LEFT | {"data", "forest", "ops", "models", "monitor"},
    "trainers": LEFT | {"data", "forest", "ops", "models", "monitor", "rollout"},
    "planning": LEFT | {"data", "forest", "ops", "models", "monitor", "neuron"},
    "cli": LEFT
    | {"__init__", "data", "forest", "ops", "models", "monitor", "rollout", "trainers", "planning", "neuron"},
}
# Where a package may be seen only through one of its modules.
ONLY_THROUGH = {("forest", "data"): {"trellium.data.sequence", "trellium.data.samples"}}
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def exists(module: str) -> bool:
    path = SOURCE.joinpath(*module.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(source: str, module: str, *, is_package: bool) -> set[str]:
    """The modules of the project that a source imports anywhere: at its top, inside functions, by name with importlib; not for type checkers."""
    found: set[str] = set()
    package = module.split(".") if is_package else module.split(".")[:-1]

    class Visitor(ast.NodeVisitor):
        def visit_If(self, node: ast.If) -> None:
            test = ast.unparse(node.test)
            for child in (
                node.orelse if test in ("TYPE_CHECKING", "typing.TYPE_CHECKING") else [*node.body, *node.orelse]
            ):
                self.visit(child)

        def visit_Import(self, node: ast.Import) -> None:
            found.update(alias.name for alias in node.names)

        def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                found.add(submodule if submodule.startswith("trellium.") and exists(submodule) else base)

        def visit_Call(self, node: ast.Call) -> None:
            if ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__"):
                found.update(a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))
            self.generic_visit(node)

    Visitor().visit(ast.parse(source))
    return {name for name in found if name.split(".")[0] == "trellium"}


def breaches(source: str, module: str, *, is_package: bool = False) -> list[str]:
    room = room_of(module)
    if room not in MAY_IMPORT:
        return [f"{module}: the design knows no room called {room!r}"]
    found = []
    for imported in sorted(imports_of(source, module, is_package=is_package)):
        other = room_of(imported)
        through = ONLY_THROUGH.get((room, other))
        if other != room and (other not in MAY_IMPORT[room] or (through is not None and imported not in through)):
            found.append(f"{module} imports {imported}")
    return found


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_nothing_to_its_right(path):
    assert breaches(path.read_text(), name_of(path), is_package=path.name == "__init__.py") == []


def test_no_module_is_a_drawer_for_odds_and_ends():
    assert [name_of(path) for path in PACKAGE.rglob("*") if path.stem in FORBIDDEN_NAMES] == []


def test_the_device_s_import_graph_touches_nothing_else():
    """`import torch` loads it in every process, so it reaches the package's own `__init__` and nothing more."""
    pending, seen = ["trellium.neuron"], set()
    while pending:
        module = pending.pop()
        if module in seen or not exists(module):
            continue
        seen.add(module)
        path = SOURCE.joinpath(*module.split("."))
        is_package = path.is_dir()
        source = (path / "__init__.py" if is_package else path.with_suffix(".py")).read_text()
        pending += imports_of(source, module, is_package=is_package)
        pending += [module.rsplit(".", 1)[0]] if "." in module else []  # importing a module imports its packages
    assert {module for module in seen if room_of(module) != "neuron"} <= {"trellium"}


@pytest.mark.parametrize(
    ("module", "source", "breach"),
    [
        ("trellium.ops.head", "from trellium.models.loading import load_model", "trellium.models.loading"),
        ("trellium.forest.trie", "from trellium.data import prepare", "trellium.data"),
        ("trellium.forest.trie", "import trellium.data.sequence", None),
        ("trellium.data.rows", "def f():\n    import trellium.models.loading", "trellium.models.loading"),
        ("trellium.trainers.sft", "import importlib\nimportlib.import_module('trellium.neuron')", "trellium.neuron"),
        ("trellium.neuron.memory", "from ..errors import ConfigError", "trellium.errors"),
        ("trellium.neuron.memory", "from . import csrc", None),
        ("trellium.models.tiny", "from trellium.ops.head import token_scores", None),
        ("trellium.ops.head", "if TYPE_CHECKING:\n    from trellium.models import scoring", None),
        ("trellium.shed.x", "", "no room called 'shed'"),
    ],
)
def test_the_rules_see_what_they_should(module, source, breach):
    found = breaches(source, module)
    assert bool(found) == (breach is not None)
    assert breach is None or breach in found[0]


def test_every_room_has_a_rule():
    rooms = {room_of(name_of(path)) for path in MODULES}
    assert rooms <= MAY_IMPORT.keys()
    assert {"data", "forest", "ops", "models", "trainers", "cli"} <= rooms
