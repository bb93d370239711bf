"""Compiled graphs on disk, so that a second process starts warm.

An entry is one file: AOTAutograd's whole result for one Dynamo graph, forward and backward, with the shared objects their code was compiled
to, behind a checksum. Nothing else is needed to run it, so the folder can be shared or carried away. Its name holds torch's hash of the
graph, its inputs and torch's and Inductor's settings, and a hash of what torch's leaves out for this device (`fingerprint`). Entries are
written beside their place and renamed into it; one that is damaged, or half-written by a process that died, is removed, said in a warning
and compiled again. Processes of one host that meet at a graph that is not there take turns by a file lock: the first compiles, the others load.

Inductor's scratch files, which it does not write atomically, lie in a folder of this process alone, which dies with it.

Folders and limits, by the vendor's variables:

- TORCH_NEURONX_NEFF_CACHE_DIR: the entries. Default: `neuron_graphs` under $TRELLIUM_HOME or ~/.cache/trellium.
- TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR: locks and scratch, on this host. Default: `neuron_local` beside it.
- TORCH_NEURONX_DISABLE_NEFF_CACHE=1: neither read nor write entries.
- NEURON_COMPILATION_CACHE_MAX_SIZE_MB (default 10240; 0 for no bound), NEURON_COMPILATION_CACHE_MAX_ENTRIES (default 0): past either, the
  entries longest unused are removed, down to four fifths.

Entries are pickles: use folders and archives of people you trust. Costs: reading and checking an entry of a small model takes milliseconds
(0.5 GB/s); what remains of a warm start is Dynamo's tracing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trellium.neuron import graph_labels
from trellium.neuron.graph_scratch import (  # noqa: F401
    Instructions,
    compiler,
    inductor_folder,
    instructions,
    nothing_left_to_compile,
    scratch_folder,
    shared_objects_of,
    unpack,
)
from trellium.neuron.graph_store import (  # noqa: F401
    ENTRY_BOUND,
    MARK,
    SIZE_BOUND,
    SUFFIX,
    CacheError,
    Entry,
    bound,
    clear,
    entries,
    export_entries,
    import_entries,
    is_disabled,
    keep_within_bounds,
    local_folder,
    note_hit,
    read,
    remove,
    remove_half_written,
    store_folder,
    write,
)

logger = logging.getLogger(__name__)

FORMAT = 1
"""Of an entry; another is another name, so that versions of Trellium do not meet in one file."""


def fingerprint(code: str = "") -> str:
    """A hash of what decides the code of a graph and is not in torch's own hash, which knows the CPU's code generator only by CPU tensors.

    Args:
        code: a hash of the sources behind the graph's custom operators, of which torch's hash knows the names alone.
    """
    import platform

    import torch

    parts = (
        FORMAT,
        code,
        Path(__file__).with_name("graphs.py").read_bytes(),
        torch.__version__,
        torch.version.git_version,
        sys.implementation.cache_tag,
        platform.machine(),
        instructions().name,
        compiler(),
        torch.get_num_threads(),
        os.environ.get("NEURON_CC_FLAGS", ""),
        os.environ.get("NEURON_COMPILER_OPT_LEVEL", ""),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


# ---- one compilation


class _Compilation:
    """The look-up, the lock and the outcome of one graph."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.path: Path | None = None
        self.outcome = "bypass"  # until the graph has a key
        self.torch_folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        self._lock: Any = None

    def lock(self, name: str) -> None:
        """Wait for the turn to compile a graph; a process that dies gives up its turn."""
        folder = local_folder() / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = open(folder / name, "ab")  # noqa: SIM115  (held until the compilation ends)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process compiles the same graph; waiting for it")
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


class _Current(threading.local):
    compilation: _Compilation | None = None


_current = _Current()


@contextlib.contextmanager
def compiling(code: str = "") -> Iterator[_Compilation]:
    """The settings under which a graph is compiled: forward and backward at once, looked for and kept here.

    Args:
        code: as in `fingerprint`.
    """
    import torch._functorch.config
    import torch._inductor.config

    _install()
    outer, own = _current.compilation, _Compilation(code)
    enabled = not is_disabled()
    proven = {"cpp.vec_isa_ok": True} if instructions().proven else {}
    _current.compilation = own if enabled else None
    try:
        with (
            inductor_folder(),
            torch._functorch.config.patch(
                enable_autograd_cache=enabled,
                bundled_autograd_cache=enabled,
                autograd_cache_allow_custom_autograd_functions=True,  # traced into the graph, and so into its hash
                force_non_lazy_backward_lowering=True,
            ),
            torch._inductor.config.patch({"fx_graph_cache": enabled, **proven}),
        ):
            yield own
    finally:
        own.unlock()
        _current.compilation = outer
        graph_labels.note(None if own.outcome == "bypass" else own.path)


def note_compiling() -> None:
    """The graph is being compiled after all: an entry that was found could not be used."""
    compilation = _current.compilation
    if compilation is not None and compilation.outcome == "hit":
        condemn(CacheError("torch could not use it"))


def condemn(error: BaseException) -> None:
    """The entry that is being loaded cannot be used: remove it and say so. The graph is then compiled again."""
    compilation = _current.compilation
    if compilation is not None and compilation.path is not None:
        compilation.outcome = "corrupt"
        _say_and_remove(compilation.path, f"{type(error).__name__}: {error}")


def _say_and_remove(path: Path, why: str) -> None:
    from trellium.neuron import compile_metrics

    logger.warning("the cached graph %s is damaged (%s); it is removed and the graph compiled again", path, why)
    compile_metrics.count(corrupt_entries=1)
    remove(path)


def _look_up(key: str) -> tuple[Any, bytes] | None:
    """AOTAutograd's result for a key, and its pickle; None if it has to be compiled, and then the turn to do it is ours."""
    compilation = _current.compilation
    assert compilation is not None
    name = f"{fingerprint(compilation.code)}-{key}"
    compilation.path = path = store_folder() / (name + SUFFIX)
    found = _load(path) or _adopt(path)
    if found is None:
        compilation.lock(name)
        found = _load(path)  # another process may have compiled it while we waited
    if found is None:
        compilation.outcome = "miss"
        if remove_half_written(path):
            logger.warning("a process died while it wrote the cached graph %s; the graph is compiled again", path)
        return None
    compilation.unlock()
    compilation.outcome = "hit"
    note_hit(path)
    return found


def _load(path: Path) -> tuple[Any, bytes] | None:
    from torch._functorch._aot_autograd.aot_autograd_result import BundledAOTAutogradResult

    try:
        content = read(path)
        if content is None:
            return None
        entry = pickle.loads(content)
        if not isinstance(entry, BundledAOTAutogradResult):
            raise CacheError(f"it holds a {type(entry).__name__}")
        return entry, content
    except Exception as error:  # whatever a damaged pickle raises
        _say_and_remove(path, str(error) if isinstance(error, CacheError) else f"{type(error).__name__}: {error}")
        return None


def _adopt(path: Path) -> tuple[Any, bytes] | None:
    """An entry that `torch.compiler.load_cache_artifacts` has put into torch's own folder, taken over."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    compilation = _current.compilation
    assert compilation is not None
    folder = Path(compilation.torch_folder or default_cache_dir()) / "aotautograd" / path.name.removesuffix(SUFFIX)
    for file in sorted(folder.glob("[0-9a-z]*")) if folder.is_dir() else ():
        write(path, file.read_bytes())
        return _load(path)
    return None


def _save(key: str, entry: Any) -> None:
    """Keep AOTAutograd's result."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheArtifact
    from torch.compiler._cache import CacheArtifactRecorder
    from torch.utils._python_dispatch import _disable_current_modes

    compilation = _current.compilation
    assert compilation is not None
    assert compilation.path is not None
    path = compilation.path
    try:
        entry.pre_save()
        with _disable_current_modes():
            content = pickle.dumps(entry)
        CacheArtifactRecorder(AOTAutogradCacheArtifact.type(), path.name.removesuffix(SUFFIX)).record(content)
        write(path, content)
        keep_within_bounds(path)
    except (OSError, CacheError, pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
        # The graph is compiled and runs; only the next process has to compile it again.
        logger.warning("a compiled graph could not be kept in the cache (%s: %s)", type(error).__name__, error)


_installed = False


def _install() -> None:
    """Lead AOTAutograd's look-ups and saves here while a graph for `neuron` is compiled; others go where they went."""
    global _installed
    if _installed:
        return
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

    torch_look_up, torch_save = AOTAutogradCache._lookup, AOTAutogradCache.save

    def look_up(key: str, local: bool, remote: bool, args: Any, cache_info: Any, aot_config: Any) -> Any:
        if _current.compilation is None:
            return torch_look_up(key, local, remote, args, cache_info, aot_config)
        found = _look_up(key)
        AOTAutogradCache._record_result(
            key, local_hit=found is not None, local_miss=found is None, remote_hit=False, remote_miss=False
        )
        return found

    def save(key: str, entry: Any, remote: bool) -> None:
        if _current.compilation is None:
            torch_save(key, entry, remote)
        else:
            _save(key, entry)

    AOTAutogradCache._lookup = staticmethod(look_up)  # type: ignore[method-assign]
    AOTAutogradCache.save = staticmethod(save)  # type: ignore[method-assign]
    _installed = True
