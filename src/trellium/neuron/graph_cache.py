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

import atexit
import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import pickle
import re
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

FORMAT = 1
"""Of an entry; another is another name, so that versions of Trellium do not meet in one file."""

SIZE_BOUND = ("NEURON_COMPILATION_CACHE_MAX_SIZE_MB", 10240)
ENTRY_BOUND = ("NEURON_COMPILATION_CACHE_MAX_ENTRIES", 0)
"""The limits' variables and their defaults."""

_MARK = b"trellium neuron graph\n"
_SUFFIX = ".graph"
_HITS = ".hits"
_PART = ".part-"


class CacheError(ValueError):
    """A cache setting or archive that cannot be used."""


# ---- where


def _home() -> Path:
    named = os.environ.get("TRELLIUM_HOME")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "trellium"


def store_folder() -> Path:
    """Where entries are kept; maybe shared by hosts."""
    return Path(os.environ.get("TORCH_NEURONX_NEFF_CACHE_DIR") or _home() / "neuron_graphs").expanduser()


def local_folder() -> Path:
    """Where this host keeps locks and scratch."""
    return Path(os.environ.get("TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR") or _home() / "neuron_local").expanduser()


def is_disabled() -> bool:
    """Whether entries are neither read nor written."""
    return os.environ.get("TORCH_NEURONX_DISABLE_NEFF_CACHE", "0").strip() == "1"


def bound(variable: str, default: int) -> int:
    """A limit from the environment; 0 is none.

    Raises:
        CacheError: not a whole number.
    """
    text = os.environ.get(variable, "").strip() or str(default)
    if not text.isdecimal():
        raise CacheError(f"{variable}={text!r}: a whole number, or 0 for no bound.")
    return int(text)


# ---- entries


@dataclass(frozen=True)
class Entry:
    """A graph on disk."""

    path: Path
    nbytes: int
    hits: int
    """How often it was loaded, by any process."""
    used: float
    """When it was last written or loaded, seconds since the epoch."""

    @property
    def name(self) -> str:
        return self.path.name.removesuffix(_SUFFIX)


def entries(folder: Path | None = None) -> list[Entry]:
    """All entries of a folder, the longest unused first."""
    found = []
    for path in (folder or store_folder()).glob("*" + _SUFFIX):
        with contextlib.suppress(FileNotFoundError):  # another process may remove it meanwhile
            state = path.stat()
            hits = path.with_suffix(_HITS)
            found.append(Entry(path, state.st_size, hits.stat().st_size if hits.exists() else 0, state.st_mtime))
    return sorted(found, key=lambda entry: entry.used)


def read(path: Path) -> bytes | None:
    """An entry's content, None if there is none.

    Raises:
        CacheError: it is damaged; says how.
    """
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    head = len(_MARK) + 32
    if not data.startswith(_MARK) or len(data) < head:
        raise CacheError("it does not begin as an entry does")
    content = data[head:]
    if hashlib.sha256(content).digest() != data[len(_MARK) : head]:
        raise CacheError("its checksum does not match")
    return content


def write(path: Path, content: bytes) -> None:
    """Put an entry in its place at once: whoever looks finds the whole of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}{_PART}{socket.gethostname()}-{os.getpid()}")
    with open(part, "wb") as file:
        file.write(_MARK + hashlib.sha256(content).digest())
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def remove(path: Path) -> None:
    """Remove an entry and its count."""
    path.unlink(missing_ok=True)
    path.with_suffix(_HITS).unlink(missing_ok=True)


def note_hit(path: Path) -> None:
    """Count a load (one byte appended, which needs no lock) and mark the entry as used now. A read-only folder counts nothing."""
    with contextlib.suppress(OSError):
        os.utime(path)
        with open(path.with_suffix(_HITS), "ab") as file:
            file.write(b"+")


def keep_within_bounds(keep: Path) -> int:
    """Remove the entries longest unused while there are too many bytes or entries; returns how many were."""
    most_bytes = bound(*SIZE_BOUND) * 2**20
    most_entries = bound(*ENTRY_BOUND)
    known = entries(keep.parent)
    nbytes = sum(entry.nbytes for entry in known)
    if not (most_bytes and nbytes > most_bytes) and not (most_entries and len(known) > most_entries):
        return 0
    count, removed = len(known), 0
    for entry in known:
        over_bytes = most_bytes and nbytes > most_bytes * 4 // 5
        over_entries = most_entries and count > max(most_entries * 4 // 5, 1)
        if not over_bytes and not over_entries:
            break
        if entry.path != keep:
            remove(entry.path)
            nbytes, count, removed = nbytes - entry.nbytes, count - 1, removed + 1
    logger.info("%d cached graphs were removed to stay within the cache's bounds", removed)
    return removed


def clear() -> int:
    """Remove all entries, half-written ones too; returns how many there were."""
    known = entries()
    for entry in known:
        remove(entry.path)
    for part in store_folder().glob(f"*{_SUFFIX}{_PART}*"):
        part.unlink(missing_ok=True)
    return len(known)


def export_entries(archive: Path) -> int:
    """Write all sound entries into one file, which `import_entries` and `torch.compiler.load_cache_artifacts` read; returns how many."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheArtifact
    from torch.compiler._cache import CacheArtifactManager

    artifacts = []
    for entry in entries():
        try:
            content = read(entry.path)
        except CacheError as error:
            logger.warning("the cached graph %s is damaged (%s) and left out", entry.path, error)
            continue
        if content is not None:
            artifacts.append(AOTAutogradCacheArtifact(entry.name, content))
    with CacheArtifactManager.with_fresh_cache():
        for artifact in artifacts:
            CacheArtifactManager.record_artifact(artifact.type(), artifact.key, artifact.content)
        serialized = CacheArtifactManager.serialize()
    archive.parent.mkdir(parents=True, exist_ok=True)
    archive.write_bytes(serialized[0] if serialized is not None else b"")
    return len(artifacts)


def import_entries(archive: Path) -> int:
    """Take the graphs of an archive into the store; returns how many. Only from people you trust: entries are pickles.

    Raises:
        CacheError: not an archive of `export_entries` or `torch.compiler.save_cache_artifacts`.
    """
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheArtifact
    from torch.compiler._cache import _deserialize_single_cache
    from torch.utils._appending_byte_serializer import AppendingByteSerializer

    data = archive.read_bytes()
    try:
        artifacts = dict(AppendingByteSerializer.to_list(data, deserialize_fn=_deserialize_single_cache))
    except Exception as error:  # whatever the serializer meets
        raise CacheError(
            f"{archive} is not an archive of compiled graphs. `trellium cache export` and torch.compiler.save_cache_artifacts write one."
        ) from error
    ours = [
        artifact
        for artifact in artifacts.get(AOTAutogradCacheArtifact.type(), [])
        if re.fullmatch(r"[0-9a-f]{12}-\w+", artifact.key)  # torch's own, of other devices, have no fingerprint
    ]
    for artifact in ours:
        write(store_folder() / (artifact.key + _SUFFIX), artifact.content)
    return len(ours)


def remove_half_written(path: Path) -> bool:
    """Remove what a process of this host that died left of an entry; the caller holds the entry's lock. Whether there was anything."""
    left = list(path.parent.glob(f"{path.name}{_PART}{socket.gethostname()}-*"))
    for part in left:
        part.unlink(missing_ok=True)
    return bool(left)


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
        _compiler(),
        torch.get_num_threads(),
        os.environ.get("NEURON_CC_FLAGS", ""),
        os.environ.get("NEURON_COMPILER_OPT_LEVEL", ""),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _compiler() -> str:
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    return get_compiler_version_info(get_cpp_compiler())


class Instructions(NamedTuple):
    """The vector instructions that code is generated for."""

    name: str
    proven: bool
    """The compiler is known to take them, so that Inductor need not try in each process (a second; seven where it compiles the trial)."""


@functools.cache
def instructions() -> Instructions:
    """Those of this CPU; tried with the compiler once on this host."""
    import torch
    from torch._inductor.cpu_vec_isa import pick_vec_isa, valid_vec_isa_list

    with torch._inductor.config.patch("cpp.vec_isa_ok", True):
        promised = str(next(iter(valid_vec_isa_list.__wrapped__()), "none"))
    told = hashlib.sha256(repr((promised, _compiler(), torch.version.git_version)).encode()).hexdigest()[:16]
    proof = local_folder() / f"instructions-{told}"
    if proof.exists():
        return Instructions(promised, True)
    with inductor_folder():
        picked = str(pick_vec_isa())
    if picked == promised:
        proof.touch()
    return Instructions(picked, picked == promised)


# ---- scratch


class _Scratch:
    """A folder of this process alone, removed when it ends; a later process removes what a killed one left."""

    def __init__(self) -> None:
        parent = local_folder() / "scratch"
        parent.mkdir(parents=True, exist_ok=True)
        self.pid = os.getpid()
        self.path = Path(tempfile.mkdtemp(prefix=f"{self.pid}-", dir=parent))
        self._lock = open(self.path / "owner", "wb")  # noqa: SIM115  (held for the life of the process)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        for other in parent.iterdir():
            self._remove_if_left(other)
        atexit.register(self._remove)

    def _remove_if_left(self, other: Path) -> None:
        try:
            with open(other / "owner", "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(other, ignore_errors=True)
        except (OSError, BlockingIOError):
            return  # its owner lives, or it is being made or removed

    def _remove(self) -> None:
        if os.getpid() == self.pid:  # not in a child that was forked
            shutil.rmtree(self.path, ignore_errors=True)


_scratch: _Scratch | None = None


def scratch_folder() -> Path:
    """Inductor's folder for this process."""
    global _scratch
    if _scratch is None or _scratch.pid != os.getpid():
        _scratch = _Scratch()
    return _scratch.path


@contextlib.contextmanager
def inductor_folder() -> Iterator[None]:
    """Make Inductor write into this process's scratch."""
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(scratch_folder())
    try:
        yield
    finally:
        if before is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def shared_objects_of(graph: Any) -> dict[str, bytes]:
    """The shared objects that a compiled graph's module holds kernels of, by their path in Inductor's folder."""
    from torch._inductor.codecache import PyCodeCache

    module = next((module for module in reversed(PyCodeCache.modules) if module.key == graph.cache_key), None)
    if module is None:
        raise CacheError(f"no module of the compiled graph {graph.cache_key} is loaded")
    files = (getattr(getattr(value, "__self__", None), "__file__", None) for value in vars(module).values())
    paths = {Path(file) for file in files if file and file.endswith(".so")}
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in paths}


def unpack(binaries: dict[str, bytes]) -> None:
    """Put shared objects where Inductor looks for them, unless it has them."""
    for relative, content in binaries.items():
        path = scratch_folder() / relative
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)


@contextlib.contextmanager
def nothing_left_to_compile() -> Iterator[None]:
    """Load a graph whose shared objects are all there without preparing headers for the compiler first (seconds)."""
    from unittest import mock

    from torch._inductor import codecache

    with mock.patch.object(codecache, "_precompile_header", return_value=os.devnull):
        yield


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
    compilation.path = path = store_folder() / (name + _SUFFIX)
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
    folder = Path(compilation.torch_folder or default_cache_dir()) / "aotautograd" / path.name.removesuffix(_SUFFIX)
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
        CacheArtifactRecorder(AOTAutogradCacheArtifact.type(), path.name.removesuffix(_SUFFIX)).record(content)
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
