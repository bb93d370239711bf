"""A YAML file of options, read before anything heavy is imported, so that its `env:` block is there when torch is.

Read by YAML 1.2's rules where 1.1's surprise: only `true` and `false` are booleans, so `eval_strategy: no` is the word it looks like, and `1e-3` is a
number. A key that stands twice is refused, because the one that is read is not the one that was looked at.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from trellium.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """PyYAML's, with the two rules of YAML 1.2 and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None or key == "<<":
                continue
            if key in first:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key!r} stands here and in line {first[key] + 1}. Leave one of them.",
                    problem_mark=key_node.start_mark,
                )
            first[key] = key_node.start_mark.line
        return super().construct_mapping(node, deep)


_BOOLEAN = "tag:yaml.org,2002:bool"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOLEAN]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOLEAN, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def yaml_value(text: str) -> Any:
    """A value as a config file would read it."""
    return yaml.load(text, _Loader)


def read_config_file(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any], str]:
    """Take `--config file.yaml` out of the arguments, read it, and export its `env:` block.

    Returns:
        The other arguments; the file's other keys, with `_` for `-`; the file's name, empty if none was given.

    Raises:
        ConfigError: no such file, not YAML, not a mapping, a key twice, or an `env:` that is not one of names to values.
    """
    rest: list[str] = []
    path = ""
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        if argument == "--config":
            if not queue or queue[0].startswith("--"):
                raise ConfigError("--config needs a YAML file after it")
            path = queue.pop(0)
        elif argument.startswith("--config="):
            path = argument.removeprefix("--config=")
        else:
            rest.append(argument)
    if not path:
        return rest, {}, ""
    options = _read_yaml(Path(path).expanduser())
    _export(options.pop("env", None) or {}, path)
    named: dict[str, Any] = {}
    for key, value in options.items():
        name = str(key).replace("-", "_")
        if name in named:
            raise ConfigError(
                f"{path}: {name} is given twice, as {name!r} and {name.replace('_', '-')!r}. Leave one of them."
            )
        named[name] = value
    return rest, named, path


def _export(variables: Any, path: str) -> None:
    if not isinstance(variables, dict):
        raise ConfigError(
            f"{path}: env must map names of environment variables to values, got {type(variables).__name__}"
        )
    for name, value in variables.items():
        text = str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)
        os.environ[str(name)] = text


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml_value(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ConfigError(f"there is no config file {path} (looked for {path.absolute()})") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        what = getattr(error, "problem", None) or str(error)
        syntax = "" if isinstance(error, yaml.constructor.ConstructorError) else "not YAML: "
        raise ConfigError(f"{where}: {syntax}{what}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: a config file is a mapping of options to values, like 'max_steps: 100'; got {type(content).__name__}"
        )
    return content
