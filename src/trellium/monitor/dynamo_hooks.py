"""The one place that reaches into Dynamo: what torch did for each frame and each backward graph, as plain data.

Four functions of torch 2.13 are wrapped, because its public callbacks say only *that* something compiled:

- `convert_frame._compile`: one attempt to compile one Python frame, with its arguments, backend and outcome (a graph, nothing to
  compile, an error, or the recompile limit, after which Dynamo runs the frame eagerly and says nothing more);
- `OutputGraph.call_user_compiler`: the backend is called, with the graph's inputs and where each comes from;
- `_AOTDispatchAutogradFunctionFactory.build`: the graph is for training, and whether its backward came along;
- `_AutogradBackwardCompiler.get_or_compile`: a backward graph is compiled when it first runs.

How often caches were hit is read from Dynamo's own `MetricsContext`, which is per thread, not from the global counters.

Costs: nothing until Dynamo is imported, then four attribute writes; tens of microseconds a compilation; one `if` a backward pass.
`install` refuses a torch whose functions take other arguments than those known here, and a test fails first.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.abc
import importlib.util
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from trellium.monitor.frame_inputs import Input, Subject, inputs_of_arguments, subject_of, with_graph_inputs

#: What `install` relies on, parameter by parameter. A torch that differs is refused.
KNOWN_PARAMETERS: dict[str, tuple[str, ...]] = {
    "torch._dynamo.convert_frame:_compile": (
        "code", "globals", "locals", "builtins", "closure", "compiler_fn", "one_graph", "export", "export_constraints",
        "hooks", "cache_entry", "cache_entries", "cache_entries_for_reasons", "cache_size", "frame", "frame_state",
        "compile_id", "skip", "package", "convert_frame_box",
    ),
    "torch._dynamo.output_graph:OutputGraph.call_user_compiler": ("self", "gm", "example_inputs"),
    "torch._functorch._aot_autograd.runtime_wrappers:_AOTDispatchAutogradFunctionFactory.build": ("self",),
    "torch._functorch._aot_autograd.runtime_wrappers:_AutogradBackwardCompiler.get_or_compile": (
        "self", "saved_tensors_use_once",
    ),
}  # fmt: skip

_METRIC_OF = {
    "aot_hits": ("aotautograd_local_cache_hit_count", "aotautograd_remote_cache_hit_count"),
    "aot_misses": ("aotautograd_local_cache_miss_count", "aotautograd_remote_cache_miss_count"),
    "fx_hits": ("inductor_fx_local_cache_hit_count", "inductor_fx_remote_cache_hit_count"),
    "fx_misses": ("inductor_fx_local_cache_miss_count", "inductor_fx_remote_cache_miss_count"),
}
_HERE = os.path.abspath(__file__)


@dataclasses.dataclass(frozen=True)
class CacheCounts:
    """Look-ups in torch's two compile caches during one compilation: AOTAutograd's, and Inductor's FX graph cache."""

    aot_hits: int = 0
    aot_misses: int = 0
    fx_hits: int = 0
    fx_misses: int = 0


_NOBODY = Subject("", "")


@dataclasses.dataclass
class Attempt:
    """What torch did for one frame, or for one backward graph; filled while it happens, given to the observer when it is over."""

    what: str  # "frame" or "backward"
    wall_time: float
    started: float
    compile_id: str
    subject: Subject = _NOBODY
    caller: str | None = None
    backend: str = ""
    inputs: tuple[Input, ...] = ()
    inputs_complete: bool = False  # False: only what stands in the frame's arguments, the graph was never seen
    seconds: float = 0.0
    backend_seconds: float = 0.0
    compiled: bool = False
    grad_enabled: bool = False
    trains: bool = False
    has_its_backward: bool = False  # compiled or loaded in the same go
    in_compiled_autograd: bool = False
    cache: CacheCounts = CacheCounts()
    graph_breaks: tuple[str, ...] = ()
    recompile_reason: str | None = None
    limit: tuple[str, int] | None = None
    failure: str | None = None
    unsupported: bool = False  # the failure is Dynamo's "I cannot trace this", not an error of the backend or of ours
    runs_eagerly: bool = False
    context: Any = None  # torch's CompileContext, the thread from a backward to its forward


class Observer(Protocol):
    """Told of every attempt, in the thread that makes it."""

    def begin(self, attempt: Attempt) -> None: ...

    def end(self, attempt: Attempt) -> None: ...


class _Current(threading.local):
    def __init__(self) -> None:
        self.attempts: list[Attempt] = []


_current = _Current()
_install_lock = threading.Lock()
_installed: Observer | None = None


def install_when_dynamo_is_imported(observer: Observer) -> None:
    """Install now if `torch._dynamo` is loaded, else at the moment it is first imported."""
    if "torch._dynamo" in sys.modules:
        install(observer)
    elif not any(isinstance(finder, _AfterDynamo) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterDynamo(observer))


class _AfterDynamo(importlib.abc.MetaPathFinder):
    """Runs `install` at the end of the first `import torch._dynamo`, and is then gone."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != "torch._dynamo":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_install(module: Any) -> None:
                execute(module)
                install(self.observer)

            spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


def install(observer: Observer) -> None:
    """Wrap torch's four functions, once a process; imports `torch._dynamo`.

    Raises:
        RuntimeError: this torch's functions are not those known here; names the function and both parameter lists.
    """
    global _installed
    with _install_lock:
        if _installed is not None:
            return
        wrappers: dict[str, Callable[[Any, Observer], Any]] = {
            "_compile": _observed_frame,
            "call_user_compiler": _observed_backend_call,
            "build": _observed_autograd_function,
            "get_or_compile": _observed_backward,
        }
        for owner, attribute, function in known_functions():
            setattr(owner, attribute, functools.wraps(function)(wrappers[attribute](function, observer)))
        _installed = observer


def known_functions() -> list[tuple[Any, str, Any]]:
    """Each of torch's functions that are wrapped, as (owner, name, function), after checking its parameters.

    Raises:
        RuntimeError: as `install`.
    """
    functions = []
    for path, known in KNOWN_PARAMETERS.items():
        module, _, qualified = path.partition(":")
        owner: Any = importlib.import_module(module)
        *holders, attribute = qualified.split(".")
        for holder in holders:
            owner = getattr(owner, holder)
        function = getattr(owner, attribute)
        found = tuple(inspect.signature(function).parameters)
        if found != known:
            raise RuntimeError(
                f"{path} of this torch takes {found}, the compile ledger knows {known}. "
                "Install torch 2.13, or a Trellium made for the torch you have."
            )
        functions.append((owner, attribute, function))
    return functions


# The four wrappers


def _observed_frame(compile_frame: Any, observer: Observer) -> Any:
    import torch
    from torch._dynamo import config
    from torch._dynamo.cache_size import exceeds_recompile_limit
    from torch._dynamo.exc import Unsupported, UserError
    from torch._dynamo.utils import counters

    signature = inspect.signature(compile_frame)

    def _compile(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if given["export"]:
            return compile_frame(*args, **kwargs)
        kwargs["skip"] = given.get("skip", 0) + 1  # this frame is not one of the user's
        code, values = given["code"], given["locals"]
        attempt = Attempt("frame", time.time(), time.perf_counter(), str(given["compile_id"]))
        attempt.subject = subject_of(code, values)
        attempt.caller = _caller()
        attempt.backend = _backend_name(given["compiler_fn"])
        attempt.inputs = inputs_of_arguments(attempt.subject, code, values)
        attempt.grad_enabled = torch.is_grad_enabled()
        compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
        attempt.in_compiled_autograd = bool(getattr(compiled_autograd, "in_compiled_autograd_region", False))
        exceeded, limit = exceeds_recompile_limit(given["cache_size"], given["compile_id"])
        if exceeded:
            attempt.limit = (limit, getattr(config, limit))
        breaks_before = dict(counters["graph_break"])
        caches_before = _cache_counts_at_start()
        _current.attempts.append(attempt)
        observer.begin(attempt)
        try:
            result = compile_frame(*args, **kwargs)
            if result.guarded_code is None:
                attempt.compiled = False
            return result
        except BaseException as error:  # an interrupted compilation is on record as well
            attempt.compiled = False
            box = given.get("convert_frame_box")
            may_continue = not given["one_graph"] and not (box is not None and box.error_on_graph_break)
            attempt.unsupported = isinstance(error, (Unsupported, UserError))
            attempt.runs_eagerly = may_continue and (attempt.unsupported or config.suppress_errors)
            attempt.failure = _first_lines(error)
            raise
        finally:
            attempt.seconds = time.perf_counter() - attempt.started
            attempt.cache = _cache_counts(since=caches_before)
            attempt.recompile_reason = _metrics().get("recompile_reason")
            attempt.graph_breaks = tuple(
                _one_line(reason)
                for reason, count in counters["graph_break"].items()
                if count > breaks_before.get(reason, 0)
            )
            _current.attempts.pop()
            observer.end(attempt)

    return _compile


def _observed_backend_call(call_user_compiler: Any, observer: Observer) -> Any:
    from torch._dynamo.utils import counters
    from torch._guards import CompileContext

    def observed_call_user_compiler(self: Any, gm: Any, example_inputs: Any) -> Any:
        attempt = _current.attempts[-1] if _current.attempts else None
        if attempt is None or attempt.what != "frame":  # an export
            return call_user_compiler(self, gm, example_inputs)
        attempt.context = CompileContext.try_get()
        attempt.inputs = with_graph_inputs(attempt.inputs, attempt.subject, gm)
        attempt.inputs_complete = True
        wants_gradient = attempt.grad_enabled and any(
            getattr(value, "requires_grad", False) for value in example_inputs
        )
        graphs_before = counters["aot_autograd"]["total"]
        started = time.perf_counter()
        try:
            compiled = call_user_compiler(self, gm, example_inputs)
        finally:
            attempt.backend_seconds += time.perf_counter() - started
        attempt.compiled = True
        if counters["aot_autograd"]["total"] == graphs_before and not attempt.trains:
            attempt.trains = wants_gradient  # a backend without AOTAutograd: autograd records the graph's own operators
        return compiled

    return observed_call_user_compiler


def _observed_autograd_function(build: Any, observer: Observer) -> Any:
    def observed_build(self: Any) -> Any:
        if _current.attempts:
            attempt = _current.attempts[-1]
            attempt.trains = True
            attempt.has_its_backward = self.spec.compiled_bw_func is not None
        return build(self)

    return observed_build


def _observed_backward(get_or_compile: Any, observer: Observer) -> Any:
    def observed_get_or_compile(self: Any, *, saved_tensors_use_once: bool) -> Any:
        if self.compiled_bw is not None:
            return self.compiled_bw
        context = getattr(self.lazy_backward_info, "saved_compile_context", None)
        compile_id = str(context.compile_id) if context is not None else ""
        attempt = Attempt("backward", time.time(), time.perf_counter(), compile_id, context=context, trains=True)
        attempt.caller = _caller()
        caches_before = _cache_counts_at_start()
        _current.attempts.append(attempt)
        observer.begin(attempt)
        try:
            compiled = get_or_compile(self, saved_tensors_use_once=saved_tensors_use_once)
            attempt.compiled = True
            return compiled
        except BaseException as error:  # an interrupted compilation is on record as well
            attempt.failure = _first_lines(error)
            raise
        finally:
            attempt.seconds = attempt.backend_seconds = time.perf_counter() - attempt.started
            attempt.cache = _cache_counts(since=caches_before)
            _current.attempts.pop()
            observer.end(attempt)

    return observed_get_or_compile


# What torch counted


def _metrics() -> Mapping[str, Any]:
    """The numbers of this thread's compilation; they stand until the thread's next one begins."""
    from torch._dynamo.utils import get_metrics_context

    return get_metrics_context()._metrics


def _cache_counts_at_start() -> CacheCounts:
    """Zero, unless this compilation happens inside another of this thread: torch counts both on the outer one's account."""
    from torch._dynamo.utils import get_metrics_context

    return _cache_counts() if get_metrics_context().in_progress() else CacheCounts()


def _cache_counts(since: CacheCounts = CacheCounts()) -> CacheCounts:
    metrics = _metrics()
    return CacheCounts(
        **{
            field: sum(metrics.get(key) or 0 for key in keys) - getattr(since, field)
            for field, keys in _METRIC_OF.items()
        }
    )


# Naming things


def _backend_name(compiler: Any) -> str:
    from torch._dynamo.eval_frame import innermost_backend

    inner = innermost_backend(compiler)
    return getattr(inner, "compiler_name", None) or getattr(inner, "__name__", None) or type(inner).__name__


def _caller() -> str | None:
    """The nearest line of the stack that is neither torch's nor this file's."""
    import torch

    inside = os.path.dirname(torch.__file__) + os.sep
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != _HERE and not file.startswith((inside, "<")) and not file.endswith(os.sep + "contextlib.py"):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _first_lines(error: BaseException) -> str:
    return f"{type(error).__name__}: {_one_line(str(error))}".removesuffix(": ")


def _one_line(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())[:300]
