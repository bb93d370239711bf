"""Which graphs were compiled for what, so that it can be told before tracing whether they are in the cache.

A graph's key is known once it is traced, which is most of a warm start. A label is what its user knows before: the model and the shape it asks for, say. It
is a file beside the entries with the names of those that were written or loaded under it, and holds while all of them are there. So one that was
removed to stay within the cache's bounds, or that could not be kept, is not told to be there. A label says nothing of the code: where that has changed,
its graphs are compiled all the same, and what was planned with them takes as long as it would have without.

Costs: a file of a hundred bytes a label; to look is to read it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trellium.neuron.graph_store import LABEL_SUFFIX, CacheError, is_disabled, read, store_folder, write


@dataclass
class _Noted:
    """The entries of a block, and whether all of its graphs have one."""

    names: set[str] = field(default_factory=set)
    complete: bool = True


class _Current(threading.local):
    noted: _Noted | None = None


_current = _Current()


@contextlib.contextmanager
def graphs_labelled(label: str) -> Iterator[None]:
    """The graphs that are compiled or loaded inside, in this thread, are those of `label`; known from when the block ends without an error."""
    outer, own = _current.noted, _Noted()
    _current.noted = own
    try:
        yield
    finally:
        _current.noted = outer
    if not (own.names and own.complete) or is_disabled():
        return
    path = _path(label)
    if has_graphs(label):
        own.names |= _names(path)  # Dynamo held them, so they were not asked for again
    with contextlib.suppress(OSError):  # a read-only cache learns nothing, as with its counts
        write(path, "\n".join(sorted(own.names)).encode())


def has_graphs(label: str) -> bool:
    """Whether all graphs that `label` had when it was last met are in the cache."""
    if is_disabled():
        return False
    names = _names(_path(label))
    return bool(names) and all((store_folder() / name).exists() for name in names)


def note(entry: Path | None) -> None:
    """A graph was made ready: its entry, or None if it has none."""
    noted = _current.noted
    if noted is not None:
        if entry is None or not entry.exists():
            noted.complete = False
        else:
            noted.names.add(entry.name)


def _names(path: Path) -> set[str]:
    try:
        content = read(path)
    except CacheError:
        return set()  # damaged: nothing is known
    return set((content or b"").decode().split())


def _path(label: str) -> Path:
    import torch

    flags = (os.environ.get(name, "") for name in ("NEURON_CC_FLAGS", "NEURON_COMPILER_OPT_LEVEL"))
    parts = (label, torch.__version__, torch.version.git_version, torch.get_num_threads(), *flags)
    return store_folder() / (hashlib.sha256(repr(parts).encode()).hexdigest()[:40] + LABEL_SUFFIX)
