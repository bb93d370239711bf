"""Where data that Trellium made once is kept: `$TRELLIUM_HOME`, or `~/.cache/trellium`.

A folder is built beside its final place and renamed into it, so that a run which was stopped, or two that start together, never leave or
see half of one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def trellium_home() -> Path:
    """`$TRELLIUM_HOME` where it is set and not empty, else `~/.cache/trellium`; not created."""
    named = os.environ.get("TRELLIUM_HOME")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "trellium"


def cached_folder(relative: str, build: Callable[[Path], None]) -> Path:
    """The folder `relative` of Trellium's home; if it is missing, `build(folder)` fills an empty one that then takes its place."""
    final = trellium_home() / relative
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        build(building)
        try:
            os.rename(building, final)
        except OSError:
            if not final.is_dir():  # otherwise another process was first with the same content
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return final
