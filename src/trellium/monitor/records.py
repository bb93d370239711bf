"""What the ledger keeps: a compilation, a frame that was given up, what was new about an input; their counts, and a place among them.

Plain data, without torch; `ledger` makes them of what `dynamo_hooks` tells.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from trellium.monitor.dynamo_hooks import CacheCounts
from trellium.monitor.frame_inputs import Input

_NAMED_AT_MOST = 4


@dataclass(frozen=True)
class Change:
    """One thing about an input that no earlier graph of the frame had.

    `old` and `new` are sizes when `dimension` is a number. Otherwise they are shapes (another rank; None: no such input), or dtypes.
    """

    argument: str
    dimension: int | None
    old: int | str | tuple[int, ...] | None
    new: int | str | tuple[int, ...] | None

    def __str__(self) -> str:
        if self.dimension is not None:
            return f"{self.argument}: dimension {self.dimension} was {self.old}, is {self.new}"
        if self.old is None:
            return f"{self.argument}: was not there, is {self.new}"
        if self.new is None:
            return f"{self.argument}: was {self.old}, is not there"
        return f"{self.argument}: was {self.old}, is {self.new}"


def described(changes: tuple[Change, ...]) -> str:
    """Changes in a line, the first few of many."""
    more = len(changes) - _NAMED_AT_MOST
    return "; ".join([*map(str, changes[:_NAMED_AT_MOST]), *([f"and {more} more"] if more > 0 else [])])


def named(frame: str, inputs: Iterable[Input]) -> str:
    """A graph's name: its frame's, and what the frame was called with, the first few of many."""
    shown = [*map(str, inputs)]
    more = len(shown) - _NAMED_AT_MOST
    return frame + (
        "[" + ", ".join(shown[:_NAMED_AT_MOST]) + (f", +{more} more" if more > 0 else "") + "]" if shown else ""
    )


@dataclass(frozen=True)
class Compilation:
    """One graph that was compiled, or that failed to be."""

    number: int
    """Its place in the ledger, from 0."""
    wall_time: float
    """When it began, seconds since the epoch."""
    started: float
    """When it began, on `time.perf_counter`'s clock."""
    seconds: float
    """All of it: Dynamo's tracing, AOTAutograd, the backend, guards."""
    backend_seconds: float
    """The part spent in the backend (with AOTAutograd's tracing where the backend does that)."""
    kind: Literal["forward", "backward", "inference"]
    name: str
    """`Class.forward[argument 2x128, …]`; a backward has its forward's name."""
    frame: str
    """`file:line` of the compiled function, or of where it goes on after a graph break."""
    caller: str | None
    """`file:line` of the nearest caller outside torch."""
    inputs: tuple[Input, ...]
    """Tensors by argument name; weights and buffers are left out. A backward has its forward's."""
    changes: tuple[Change, ...]
    """What is new against the nearest graph this frame had. Empty for its first, and where something other than an input is new."""
    nearest: int | None
    """The number of that graph; None for the first of its frame."""
    recompile_reason: str | None
    """Why earlier graphs did not fit, in Dynamo's words; None for the first of its frame."""
    warmth: Literal["cold", "partly", "warm"]
    cache: CacheCounts
    compile_id: str
    """Dynamo's: `frame/recompilation`. Starts again from 0/0 after `torch._dynamo.reset()`."""
    backend: str
    graph_breaks: tuple[str, ...]
    """Why the graph ends before its function does."""
    failure: str | None
    """The error, in a line; None when there is a graph."""
    forward: int | None
    """For a backward: its forward's number."""

    def __str__(self) -> str:
        outcome = f"failed ({self.failure})" if self.failure else self.warmth
        reason = described(self.changes) or self.recompile_reason
        return f"{self.name}: {self.kind}, {outcome}, {self.seconds:.1f} s" + (f"; {reason}" if reason else "")


@dataclass(frozen=True)
class EagerFrame:
    """A frame that Dynamo has given up, at least for what was not compiled before: it runs eagerly from then on, with no other sign."""

    wall_time: float
    started: float
    """When, on `time.perf_counter`'s clock."""
    name: str
    frame: str
    caller: str | None
    inputs: tuple[Input, ...]
    """What it was called with when it was given up."""
    changes: tuple[Change, ...]
    """What of that is new against the nearest graph the frame has."""
    cause: Literal["recompile_limit", "accumulated_recompile_limit", "graph break", "failure"]
    limit: int | None
    """The limit's value, if a limit is the cause."""
    reason: str
    """The recompile reason or the error."""

    def __str__(self) -> str:
        cause = f"{self.cause} ({self.limit})" if self.limit is not None else self.cause
        reason = described(self.changes) or self.reason
        return f"{self.name} ({self.frame}) runs eagerly: {cause}; {reason}"


class Summary(NamedTuple):
    """Counts of graphs (a backward is one), all seconds spent (failures' too), failures, and frames given up."""

    graphs: int
    seconds: float
    cold: int
    partly: int
    warm: int
    failures: int
    eager_frames: int


class Mark(NamedTuple):
    """A point in the ledger: how many records and eager frames it had."""

    records: int
    eager_frames: int
