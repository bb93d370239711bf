"""`torch.compile(backend="neuron")`: graphs compiled ahead of time, one for each set of shapes.

AOTAutograd traces and differentiates the graph on `neuron` tensors, so that what depends on the device (autocast's lists, decompositions)
is the device's; forward and backward are then rewritten for the host and compiled by Inductor's C++ code generation, both before the first
step runs. A compiled graph runs on aliases of its arguments, without a copy: about 3 us and 0.3 us a tensor more than the host's code.

What the real compiler refuses is refused: a symbolic dimension (`dynamic=True`, or Dynamo's own guess after a second shape) is an error
that says what to set, and so is a graph that does not compile. Nothing goes on operator by operator unless that was asked for. Every new
shape is a compilation, which takes tens of seconds here and about a minute on the device.

Compiled graphs, with the whole of AOTAutograd's result, are kept on disk (`graph_cache`); a second process with the same program starts warm.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import inspect
import logging
import os
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.codecache import FxGraphCache
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants, OutputCode
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from trellium.neuron import _C, compile_metrics, compile_settings, graph_cache, graph_dump

logger = logging.getLogger(__name__)

OPTIONS = ("dynamic", "fallback_execution", "model_name")
"""What `options=` may hold: the vendor's names."""

_HOST = torch.device("cpu")


class NeuronCompileError(RuntimeError):
    """A graph that the neuron compiler does not take, with the rule and the fix."""


def neuron_backend(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph; called by `torch.compile`.

    Args:
        graph: Dynamo's, on fake or real `neuron` tensors.
        example_inputs: its inputs.
        mode: of `torch.compile`; only the default exists, another is ignored with a warning.
        options: `model_name` names what is dumped (`graph_dump`); `fallback_execution`: run a graph that fails to compile
            operator by operator, with a warning, instead of raising (default: TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION=0).

    Raises:
        NeuronCompileError: a symbolic dimension, an unknown option, or a graph that does not compile.
    """
    options = options or {}
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise NeuronCompileError(
            f"unknown options for the neuron backend: {', '.join(unknown)}. Known: {', '.join(OPTIONS)}."
        )
    if mode not in (None, "default"):
        warnings.warn(
            f"mode={mode!r} means nothing to the neuron backend and is ignored; it always compiles ahead of time.",
            stacklevel=2,
        )
    if " " in torch.__file__:
        raise NeuronCompileError(
            f"torch is installed in {Path(torch.__file__).parent}, a path with a space, which its C++ builder does not take. "
            "Make the environment in a path without one."
        )
    refuse_symbols(graph, example_inputs, dynamic=bool(options.get("dynamic")))
    compile_settings.settle()
    refuse_host_inputs(example_inputs)
    graph_dump.dump(graph, "dynamo", options.get("model_name"))
    # AOTAutograd may change the graph it is given.
    eager = fx.GraphModule(graph, copy.deepcopy(graph.graph)) if falls_back(options) else None
    started = time.perf_counter()
    try:
        with graph_cache.compiling(sources_of_custom_operators(graph)) as compilation:
            compiled = compile_fx(
                graph, example_inputs, inner_compile=compile_for_host, decompositions=decompositions()
            )
    except NeuronCompileError:
        raise
    except Exception as error:
        told = f"{described(graph, example_inputs)} does not compile: {type(error).__name__}: {error}"
        compile_metrics.count(failures=1)
        if eager is None:
            raise NeuronCompileError(
                f"{told}\nOn neuron a graph that fails to compile is an error. options={{'fallback_execution': True}} or "
                "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION=0 run such a graph operator by operator instead."
            ) from error
        logger.warning("%s\nIt runs operator by operator (fallback_execution).", told)
        compile_metrics.count(fallbacks=1)
        return eager.forward
    compile_metrics.count_graph(compilation.outcome, time.perf_counter() - started)
    return compiled


def falls_back(options: dict[str, Any]) -> bool:
    """Whether a graph that fails to compile runs operator by operator: the option, else the vendor's variable, else not."""
    if "fallback_execution" in options:
        return bool(options["fallback_execution"])
    return os.environ.get("TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION", "1").strip() == "0"


def refuse_symbols(graph: fx.GraphModule, example_inputs: Sequence[Any], *, dynamic: bool) -> None:
    """Raise if a shape in the graph is not a number."""
    if dynamic:
        raise NeuronCompileError(f"options={{'dynamic': True}}: {_STATIC_RULE}")
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    values = [(node.name, value) for node, value in zip(placeholders, example_inputs, strict=False)]
    values += [
        (node.name, node.meta.get("example_value"))
        for node in graph.graph.nodes
        if node.op not in ("placeholder", "output")
    ]
    for name, value in values:
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
                raise NeuronCompileError(f"{name} is the symbol {leaf}, not a number. {_STATIC_RULE}")
            if isinstance(leaf, Tensor) and any(isinstance(size, torch.SymInt) for size in leaf.shape):
                shape = ", ".join(map(str, leaf.shape))
                raise NeuronCompileError(f"{name} has the dynamic shape [{shape}]. {_STATIC_RULE}")


_STATIC_RULE = (
    "The neuron device compiles static shapes only: each shape is a graph of its own. Compile with dynamic=False, without mark_dynamic, and "
    "leave torch._dynamo.config.automatic_dynamic_shapes False; pad to few shapes (pad_to_multiple_of=128) to compile few graphs. "
    "A shape that depends on data (nonzero, boolean masks, unique) has no static form: keep it out of the compiled function."
)


def described(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> str:
    """The graph by where it comes from and the shapes it was called with, for messages."""
    trace = next((trace for node in graph.graph.nodes if (trace := node.meta.get("stack_trace"))), "")
    frames = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    place = frames[0] if frames else "unknown code"
    shapes = []
    placeholders = (node for node in graph.graph.nodes if node.op == "placeholder")
    for node, value in zip(placeholders, example_inputs, strict=False):
        if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter):
            shapes.append(f"{node.name.strip('_')} {'x'.join(map(str, value.shape)) or 'scalar'}")
    shown = ", ".join(shapes[:4]) + (f", and {len(shapes) - 4} more" if len(shapes) > 4 else "")
    return f"the graph of {place} with inputs [{shown}]"


def refuse_host_inputs(example_inputs: Sequence[Any]) -> None:
    """Hold the vendor's rule on CPU tensors beside neuron ones: copied silently (here: read where they are), unless the environment forbids it."""
    if os.environ.get("TORCH_NEURONX_DYNAMO_DISABLE_CPU_AUTOCOPY", "0").strip() != "1":
        return
    devices = [value.device.type if isinstance(value, Tensor) else None for value in example_inputs]
    if "neuron" in devices and "cpu" in devices:
        raise NeuronCompileError(
            f"Input tensor at index {devices.index('cpu')} is on cpu device, and TORCH_NEURONX_DYNAMO_DISABLE_CPU_AUTOCOPY=1 forbids the "
            "copy. Move it to neuron before the compiled function, or unset the variable."
        )


def sources_of_custom_operators(graph: fx.GraphModule) -> str:
    """A hash of the files in which the graph's custom operators have their backward and shape functions; empty if it has none.

    Those are traced into the compiled graph, so an entry of the cache must not outlive them.
    """
    files: set[str] = set()
    for module in graph_modules(graph):
        for node in module.graph.nodes:
            name = str(getattr(node.target, "_qualified_op_name", "") or getattr(node.target, "_name", ""))
            definition = OPDEFS.get(name.partition(".")[0])
            for function in vars(definition).values() if definition is not None else ():
                code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
                if code is not None and os.path.isfile(code.co_filename):
                    files.add(code.co_filename)
    contents = [Path(file).read_bytes() for file in sorted(files)]
    return hashlib.sha256(b"".join(contents)).hexdigest() if contents else ""


# ---- from a graph on neuron to host code


def compile_for_host(graph: fx.GraphModule, example_inputs: Sequence[Any], **settings: Any) -> OutputCode:
    """Inductor's inner compiler, for a graph on `neuron`: rewrite it for the host, compile, put a gate around it."""
    graph_cache.note_compiling()
    graph_dump.dump(graph, "backward" if settings.get("is_backward") else "forward")
    results = next(iter(reversed(graph.graph.nodes))).args[0]
    cores = tuple(core_of(node.meta.get("val") if isinstance(node, fx.Node) else None) for node in results)
    random_core = core_of_random_numbers(graph)
    host_inputs = rewrite_for_host(graph, example_inputs)
    settings["get_decomp_fn"] = decompositions  # the compiled graph keeps it, and a table does not pickle
    compiled = compile_fx_inner(graph, host_inputs, **settings)
    if not isinstance(compiled, CompiledFxGraph):
        raise NeuronCompileError(f"Inductor returned {type(compiled).__name__}, where a compiled graph was expected")
    return NeuronGraph(compiled, cores, random_core)


def core_of(value: Any) -> int:
    """The core that holds a graph's result; -1 for the host."""
    return value.device.index or 0 if isinstance(value, Tensor) and value.device.type == "neuron" else -1


def core_of_random_numbers(graph: fx.GraphModule) -> int:
    """The core whose generator the graph draws from; -1 if it draws nothing."""
    for module in graph_modules(graph):
        for node in module.graph.nodes:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                for leaf in pytree.tree_leaves(node.meta.get("val")):
                    if (core := core_of(leaf)) >= 0:
                        return core
    return -1


def graph_modules(graph: fx.GraphModule) -> list[fx.GraphModule]:
    """The graph and those inside it (branches, checkpointed regions)."""
    return [module for module in graph.modules() if isinstance(module, fx.GraphModule)]


def rewrite_for_host(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Put the CPU in place of `neuron` in a graph's arguments, constants and metadata, in place; returns its inputs so changed.

    A copy from one device to another becomes a copy on the host: without it, both sides would share memory.
    """
    for module in graph_modules(graph):
        for node in list(module.graph.nodes):
            crosses = node.op == "call_function" and crosses_devices(node)
            node.args = fx.node.map_aggregate(node.args, on_host)
            node.kwargs = fx.node.map_aggregate(node.kwargs, on_host)
            if "val" in node.meta:
                node.meta["val"] = pytree.tree_map(on_host, node.meta["val"])
            if node.op == "get_attr":
                move_constant(module, node.target)
            if crosses:
                with module.graph.inserting_after(node):
                    clone = module.graph.call_function(torch.ops.aten.clone.default, (node,))
                clone.meta = {**node.meta, "val": node.meta["val"].clone()}
                node.replace_all_uses_with(clone, delete_user_cb=lambda user, clone=clone: user is not clone)
        module.recompile()
    return [on_host(value) for value in example_inputs]


_COPIES = frozenset({torch.ops.aten._to_copy.default, torch.ops.prims.device_put.default})


def crosses_devices(node: fx.Node) -> bool:
    """Whether a node is a copy whose two sides are on different devices."""
    if node.target not in _COPIES or not isinstance(node.args[0], fx.Node):
        return False
    source, result = node.args[0].meta.get("val"), node.meta.get("val")
    return isinstance(source, Tensor) and isinstance(result, Tensor) and source.device != result.device


def on_host(value: Any) -> Any:
    """A device or a fake tensor on `neuron` as one on the CPU, with the same storage; anything else as it is."""
    if isinstance(value, torch.device):
        return _HOST if value.type == "neuron" else value
    if not isinstance(value, Tensor) or value.device.type != "neuron":
        return value
    if not isinstance(value, FakeTensor):
        raise NeuronCompileError(f"a real tensor of shape {list(value.shape)} in the metadata of a graph")
    with no_dispatch():
        # Views of one storage stay so: Inductor looks at it to keep results apart from arguments.
        meta = torch.empty(0, dtype=value.dtype, device="meta")
        meta.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
    return FakeTensor(value.fake_mode, meta, _HOST)


def move_constant(module: fx.GraphModule, target: str) -> None:
    """Put a tensor that a graph holds by name on the host."""
    owner_name, _, name = target.rpartition(".")
    owner = module.get_submodule(owner_name)
    value = getattr(owner, name)
    if isinstance(value, FakeTensor):
        setattr(owner, name, on_host(value))
    elif isinstance(value, Tensor) and value.device.type == "neuron":
        with unset_fake_temporarily():
            setattr(owner, name, value.cpu())


@dataclasses.dataclass
class NeuronGraph(OutputCode):
    """A compiled graph with a gate around it: neuron tensors in, neuron tensors out, the host's code between, no copy.

    It is what the cache keeps: the host graph, and the shared objects its code was compiled to.
    """

    host: CompiledFxGraph
    cores: tuple[int, ...]
    """The core of each result; -1 for the host."""
    random_core: int = -1
    """The core whose generator the code draws from; -1 for none."""
    binaries: dict[str, bytes] = dataclasses.field(default_factory=dict)
    """Shared objects by their path in Inductor's folder; only while it is stored."""
    _boxed_call: bool = True

    def __call__(self, inputs: list[Any]) -> Any:
        passage = _C.Passage()
        hosts = passage.enter(inputs)
        if self.random_core < 0:
            return passage.leave(self.host(hosts), self.cores)
        _C.swap_generators(self.random_core)
        try:
            results = self.host(hosts)
        finally:
            _C.swap_generators(self.random_core)
        return passage.leave(results, self.cores)

    def prepare_for_serialization(self) -> None:
        """Drop what cannot be written (this is a copy of the graph in use), and take the shared objects along."""
        self.binaries = graph_cache.shared_objects_of(self.host)
        self.host = copy.copy(self.host)
        self.host.prepare_for_serialization()

    def post_compile(self, example_inputs: Sequence[Any], constants: CompiledFxGraphConstants, settings: Any) -> None:
        """Make a graph that came from the cache callable."""
        graph_cache.unpack(self.binaries)
        self.binaries = {}
        try:
            with graph_cache.nothing_left_to_compile():
                loaded, _ = FxGraphCache.cache_hit_post_compile(self.host, {}, constants)
            if loaded is None:
                raise NeuronCompileError("its code could not be written to disk")
            self.host.post_compile(example_inputs, constants, settings)
        except Exception as error:
            graph_cache.condemn(error)
            raise

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """There is no Triton here."""


# ---- decompositions


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's, and what the host's shape inference would refuse: `histc` on integers, with which transformers counts tokens per expert."""
    return {**select_decomp_table(), torch.ops.aten.histc.default: integer_histogram}


def integer_histogram(self: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """`torch.histc` on integers by scatter; `NotImplemented` on floating-point numbers, which the host counts itself."""
    if self.is_floating_point() or min == max:
        return NotImplemented
    low, high = int(min), int(max)
    values = self.reshape(-1).to(torch.int64)
    inside = (values >= low) & (values <= high)
    place = ((values - low) * bins).div(high - low, rounding_mode="floor").clamp(0, bins - 1)
    counts = torch.zeros(bins, dtype=torch.int64, device=self.device).scatter_add(0, place, inside.to(torch.int64))
    return counts.to(self.dtype)
