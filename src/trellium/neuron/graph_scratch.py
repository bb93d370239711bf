"""Inductor's files while it compiles for this host: a folder of this process alone, the compiler's vector instructions, shared objects.

Inductor does not write its scratch atomically, so no two processes may share it. What a graph needs of it, its shared objects, is taken along
when the graph is kept (`shared_objects_of`), and put back when it is loaded (`unpack`).
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trellium.neuron.graph_store import CacheError, local_folder


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


# ---- what the compiler can


def compiler() -> str:
    """The C++ compiler and its version."""
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
    told = hashlib.sha256(repr((promised, compiler(), torch.version.git_version)).encode()).hexdigest()[:16]
    proof = local_folder() / f"instructions-{told}"
    if proof.exists():
        return Instructions(promised, True)
    with inductor_folder():
        picked = str(pick_vec_isa())
    if picked == promised:
        proof.touch()
    return Instructions(picked, picked == promised)
