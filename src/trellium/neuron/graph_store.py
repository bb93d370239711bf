"""The files of the compiled graphs' cache: where they are, how one is read and written, how many may stay, archives of them.

An entry is one file behind a checksum, with a file of one byte a load beside it. It is written beside its place and renamed into it, so
whoever looks finds the whole of it or nothing, and reading a damaged one is an error that says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

SIZE_BOUND = ("NEURON_COMPILATION_CACHE_MAX_SIZE_MB", 10240)
ENTRY_BOUND = ("NEURON_COMPILATION_CACHE_MAX_ENTRIES", 0)
"""The limits' variables and their defaults."""

MARK = b"trellium neuron graph\n"
SUFFIX = ".graph"
LABEL_SUFFIX = ".label"
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
        return self.path.name.removesuffix(SUFFIX)


def entries(folder: Path | None = None) -> list[Entry]:
    """All entries of a folder, the longest unused first."""
    found = []
    for path in (folder or store_folder()).glob("*" + SUFFIX):
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
    head = len(MARK) + 32
    if not data.startswith(MARK) or len(data) < head:
        raise CacheError("it does not begin as an entry does")
    content = data[head:]
    if hashlib.sha256(content).digest() != data[len(MARK) : head]:
        raise CacheError("its checksum does not match")
    return content


def write(path: Path, content: bytes) -> None:
    """Put an entry in its place at once: whoever looks finds the whole of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}{_PART}{socket.gethostname()}-{os.getpid()}")
    with open(part, "wb") as file:
        file.write(MARK + hashlib.sha256(content).digest())
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
    """Remove all entries, half-written ones and labels too; returns how many there were."""
    known = entries()
    for entry in known:
        remove(entry.path)
    for pattern in (f"*{SUFFIX}{_PART}*", f"*{LABEL_SUFFIX}*"):
        for left in store_folder().glob(pattern):
            left.unlink(missing_ok=True)
    return len(known)


def remove_half_written(path: Path) -> bool:
    """Remove what a process of this host that died left of an entry; the caller holds the entry's lock. Whether there was anything."""
    left = list(path.parent.glob(f"{path.name}{_PART}{socket.gethostname()}-*"))
    for part in left:
        part.unlink(missing_ok=True)
    return bool(left)


# ---- archives


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
        write(store_folder() / (artifact.key + SUFFIX), artifact.content)
    return len(ours)
