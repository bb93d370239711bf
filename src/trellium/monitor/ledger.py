"""Every `torch.compile` compilation of the process, for any backend, as records.

    from trellium.monitor import ledger        # armed from here on; imports no torch

    with ledger.watch() as new:
        train()
    for compilation in new:
        print(compilation)      # Qwen3ForCausalLM.forward[input_ids 1x384]: forward, cold, 21.3 s; input_ids: dimension 1 was 256, is 384
    print(ledger.report())

One record a graph: Dynamo's graph of one frame for one set of guards (`forward` if its backward can run, else `inference`), and the
`backward` AOTAutograd makes of it, which is compiled when it first runs, or comes along with its forward and then costs no seconds of
its own. Attempts that failed are records too. What Dynamo runs eagerly instead (the recompile limit, a frame it cannot compile) is in
`eager_frames()`: Dynamo says nothing of the calls that follow, so an eager frame is *the* thing to look for when few graphs were compiled.

A record compares its inputs with the graphs that Dynamo has of its frame (none after `torch._dynamo.reset()`) and names what is new against the nearest: the one
with the fewest differing (argument, dimension) pairs, then the smallest change of sizes, then the latest.

Cold or warm, by what torch's two compile caches answered while the graph was compiled:

- `warm`: everything behind Dynamo's tracing was loaded. For a forward: AOTAutograd's cache hit, nothing missed. For a backward compiled on
  its own: Inductor's FX graph cache hit, nothing missed (AOTAutograd has traced it before). A backward that comes with its forward is as
  warm as that.
- `partly`: something was loaded and something made: an FX graph cache hit without AOTAutograd's, or hits and misses.
- `cold`: nothing was loaded; so are all graphs of backends without such a cache (`eager`, `aot_eager`).

Importing this module arms the ledger: `torch._dynamo` is not imported for it, and is observed from the moment somebody does. Compilations
made before are not known. Not seen: `torch.export`, Triton's autotuning and CUDA graph recording at run time.

Costs: `dynamo_hooks`, where torch's private functions are wrapped. A record is about a kilobyte and lives as long as the process.
"""

from __future__ import annotations

import collections.abc
import contextlib
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from trellium.monitor.dynamo_hooks import Attempt, CacheCounts, install, install_when_dynamo_is_imported
from trellium.monitor.frame_inputs import Input, Subject
from trellium.monitor.records import Change, Compilation, EagerFrame, Mark, Summary, described, named

__all__ = [
    "CacheCounts",
    "Change",
    "Compilation",
    "EagerFrame",
    "Input",
    "Mark",
    "Summary",
    "Watch",
    "compiled_between",
    "eager_frames",
    "mark",
    "metrics",
    "records",
    "report",
    "since",
    "start",
    "summary",
    "watch",
]

logger = logging.getLogger(__name__)

_BEGINNING = Mark(0, 0)


class Watch(collections.abc.Sequence[Compilation]):
    """The records of a `with ledger.watch()` block: those so far inside it, all of them after."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.began = ledger.mark()
        self._ended: Mark | None = None

    def close(self) -> None:
        self._ended = self._ledger.mark()

    def __getitem__(self, index: Any) -> Any:
        return self._ledger.records()[self.began.records : self._ended and self._ended.records][index]

    def __len__(self) -> int:
        return len(self[:])

    def __repr__(self) -> str:
        return f"<{len(self)} compilations>"

    @property
    def eager_frames(self) -> tuple[EagerFrame, ...]:
        """The frames given up inside the block."""
        return self._ledger.eager_frames()[self.began.eager_frames : self._ended and self._ended.eager_frames]


class Ledger:
    """The records of one process. The module's functions are those of the only one; there is no reason for another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: list[Compilation] = []
        self._eager: list[EagerFrame] = []
        self._spans: list[tuple[float, float]] = []  # of every attempt, in the order they ended
        self._running: dict[int, Attempt] = {}
        self._forward_of: weakref.WeakKeyDictionary[Any, Compilation] = weakref.WeakKeyDictionary()

    def start(self) -> None:
        """Observe now: imports `torch._dynamo` (about a second, once). Needed only to have that second now; importing is enough.

        Raises:
            RuntimeError: a torch that this ledger does not know.
        """
        install(self)

    # What dynamo_hooks tells

    def begin(self, attempt: Attempt) -> None:
        with self._lock:
            self._running[id(attempt)] = attempt

    def end(self, attempt: Attempt) -> None:
        with self._lock:
            del self._running[id(attempt)]
            self._spans.append((attempt.started, attempt.started + attempt.seconds))
            if attempt.what == "backward":
                self._append_backward(attempt)
                return
            given_up = self._given_up(attempt) if attempt.runs_eagerly else None
            if attempt.compiled or (attempt.failure and (given_up is None or given_up.cause == "failure")):
                self._append_graph(attempt)
            if given_up is not None:
                self._eager.append(given_up)
        if given_up is not None and given_up.cause != "graph break":
            logger.warning("%s", given_up)

    def _append_graph(self, attempt: Attempt) -> None:
        nearest, changes = _nearest(attempt, self._records)
        kind: Any = "backward" if attempt.in_compiled_autograd else "forward" if attempt.trains else "inference"
        warmth = _warmth(attempt.cache, with_aot=True)
        compilation = self._append(attempt, kind=kind, nearest=nearest, changes=changes, warmth=warmth)
        if attempt.context is not None and attempt.compiled:
            self._forward_of[attempt.context] = compilation
        if attempt.has_its_backward and attempt.compiled:
            along = Attempt(
                "backward",
                attempt.wall_time + attempt.seconds,
                attempt.started + attempt.seconds,
                attempt.compile_id,
                caller=attempt.caller,
                context=attempt.context,
                compiled=True,
            )
            self._append_backward(along, warmth=warmth)

    def _append_backward(self, attempt: Attempt, warmth: Any = None) -> None:
        forward = self._forward_of.get(attempt.context) if attempt.context is not None else None
        if forward is None:  # its forward was compiled before the ledger was armed
            unknown = f"unknown frame {attempt.compile_id}".strip()
            attempt.subject = Subject(unknown, unknown)
        else:
            attempt.subject, attempt.backend = Subject(forward.name, forward.frame), forward.backend
            attempt.inputs, attempt.recompile_reason = forward.inputs, forward.recompile_reason
        self._append(
            attempt,
            kind="backward",
            nearest=forward.nearest if forward else None,
            changes=forward.changes if forward else (),
            warmth=warmth or _warmth(attempt.cache, with_aot=False),
            forward=forward.number if forward else None,
        )

    def _append(self, attempt: Attempt, *, kind: Any, nearest: int | None, changes: Any, warmth: Any, forward=None):
        compilation = Compilation(
            number=len(self._records),
            wall_time=attempt.wall_time,
            started=attempt.started,
            seconds=attempt.seconds,
            backend_seconds=attempt.backend_seconds,
            kind=kind,
            name=attempt.subject.name if forward is not None else named(attempt.subject.name, attempt.inputs),
            frame=attempt.subject.location,
            caller=attempt.caller,
            inputs=attempt.inputs,
            changes=changes,
            nearest=nearest,
            recompile_reason=attempt.recompile_reason,
            warmth=warmth,
            cache=attempt.cache,
            compile_id=attempt.compile_id,
            backend=attempt.backend,
            graph_breaks=attempt.graph_breaks,
            failure=attempt.failure,
            forward=forward,
        )
        self._records.append(compilation)
        return compilation

    def _given_up(self, attempt: Attempt) -> EagerFrame:
        cause: Any
        if attempt.limit is not None:
            cause, limit = attempt.limit
        else:
            cause, limit = ("graph break" if attempt.unsupported else "failure"), None
        return EagerFrame(
            wall_time=attempt.wall_time,
            started=attempt.started,
            name=named(attempt.subject.name, attempt.inputs),
            frame=attempt.subject.location,
            caller=attempt.caller,
            inputs=attempt.inputs,
            changes=_nearest(attempt, self._records)[1],
            cause=cause,
            limit=limit,
            reason=(attempt.recompile_reason if limit is not None else None) or attempt.failure or "",
        )

    # What is asked of it

    def records(self) -> tuple[Compilation, ...]:
        """All records, in the order in which their compilations ended."""
        with self._lock:
            return tuple(self._records)

    def eager_frames(self) -> tuple[EagerFrame, ...]:
        """The frames that Dynamo has given up, in order."""
        with self._lock:
            return tuple(self._eager)

    def mark(self) -> Mark:
        """This point in the ledger, for `since`, `summary`, `metrics` and `report`."""
        with self._lock:
            return Mark(len(self._records), len(self._eager))

    def since(self, mark: Mark) -> tuple[Compilation, ...]:
        """The records made after `mark`."""
        return self.records()[mark.records :]

    @contextlib.contextmanager
    def watch(self) -> Iterator[Watch]:
        """The compilations of a block, in every thread: a sequence that grows inside it and stands after it."""
        new = Watch(self)
        try:
            yield new
        finally:
            new.close()

    def compiled_between(self, begin: float, end: float) -> bool:
        """Whether anything compiled, in any thread, at some time from `begin` to `end` (`time.perf_counter`).

        Attempts that failed, frames that Dynamo traced for nothing, and compilations still going on count: they stall a step as well.
        """
        with self._lock:
            if any(attempt.started < end for attempt in self._running.values()):
                return True
            for started, ended in reversed(self._spans):
                if ended <= begin:  # in the order they ended: all before it ended earlier
                    return False
                if started < end:
                    return True
            return False

    def summary(self, mark: Mark = _BEGINNING) -> Summary:
        """Counts and seconds of what happened since `mark`."""
        new = self.since(mark)
        graphs = [compilation for compilation in new if compilation.failure is None]
        warmth = [compilation.warmth for compilation in graphs]
        return Summary(
            graphs=len(graphs),
            seconds=sum(compilation.seconds for compilation in new),
            cold=warmth.count("cold"),
            partly=warmth.count("partly"),
            warm=warmth.count("warm"),
            failures=len(new) - len(graphs),
            eager_frames=len(self.eager_frames()[mark.eager_frames :]),
        )

    def metrics(self, mark: Mark = _BEGINNING) -> dict[str, float]:
        """For a trainer's logs: graphs, seconds, cold and warm since `mark`. Graphs that were warm in part are in neither of the last two."""
        counts = self.summary(mark)
        return {
            "compile/graphs": counts.graphs,
            "compile/seconds": round(counts.seconds, 3),
            "compile/cold": counts.cold,
            "compile/warm": counts.warm,
        }

    def report(self, mark: Mark = _BEGINNING) -> str:
        """A table to read: one line a graph, then what runs eagerly, then the sums."""
        lines = [f"{'#':>4} {'seconds':>8} {'':8} {'':9} graph"]
        for compilation in self.since(mark):
            outcome = "failed" if compilation.failure else compilation.warmth
            lines.append(
                f"{compilation.number:>4} {compilation.seconds:>8.2f} {outcome:8} {compilation.kind:9} {compilation.name}"
            )
            why = compilation.failure
            if why is None and compilation.forward is None:
                why = described(compilation.changes) or compilation.recompile_reason
            if why:
                lines.append(f"{'':32} {why}")
        lines += map(str, self.eager_frames()[mark.eager_frames :])
        total = self.summary(mark)
        lines.append(
            f"{total.graphs} graphs in {total.seconds:.1f} s: {total.cold} cold, {total.partly} partly warm, {total.warm} warm; "
            f"{total.failures} failures, {total.eager_frames} frames run eagerly"
        )
        return "\n".join(lines)


def _warmth(cache: CacheCounts, *, with_aot: bool) -> Literal["cold", "partly", "warm"]:
    """The rule of the module's docstring."""
    hits, misses = cache.aot_hits + cache.fx_hits, cache.aot_misses + cache.fx_misses
    if hits == 0:
        return "cold"
    if misses == 0 and (cache.aot_hits > 0 or not with_aot):
        return "warm"
    return "partly"


def _nearest(attempt: Attempt, records: Sequence[Compilation]) -> tuple[int | None, tuple[Change, ...]]:
    """The graph that Dynamo holds of the same frame with the most alike inputs, and how this one's differ."""
    best: tuple[tuple[int, float, int], Compilation, tuple[Change, ...]] | None = None
    dynamo_frame, _, newer = attempt.compile_id.rpartition("/")
    for known in reversed(records):
        if (
            known.frame != attempt.subject.location
            or known.forward is not None
            or known.name.partition("[")[0] != attempt.subject.name
        ):
            continue
        known_frame, _, recompilation = known.compile_id.rpartition("/")
        if known_frame != dynamo_frame:
            continue
        if int(recompilation) >= int(newer):  # Dynamo counts up: that one was before `torch._dynamo.reset()`
            break
        newer = recompilation
        if known.failure is not None:
            continue
        found = _differences(known.inputs, attempt.inputs, ignore_missing=not attempt.inputs_complete)
        changes = tuple(sorted(found, key=lambda change: change.dimension is None))  # new sizes first
        distance = (len(changes), sum(map(_size_of, changes)), -known.number)
        if best is None or distance < best[0]:
            best = (distance, known, changes)
    return (best[1].number, best[2]) if best else (None, ())


def _differences(old: tuple[Input, ...], new: tuple[Input, ...], *, ignore_missing: bool) -> Iterator[Change]:
    before = {known.argument: known for known in old}
    for now in new:
        known = before.pop(now.argument, None)
        if known is None:
            yield Change(now.argument, None, None, now.shape)
        elif len(known.shape) != len(now.shape):
            yield Change(now.argument, None, known.shape, now.shape)
        else:
            if known.dtype != now.dtype:
                yield Change(now.argument, None, known.dtype, now.dtype)
            for dimension, (was, size) in enumerate(zip(known.shape, now.shape, strict=True)):
                if was != size and dimension not in known.dynamic:
                    yield Change(now.argument, dimension, was, size)
    if not ignore_missing:
        for argument, known in before.items():
            yield Change(argument, None, known.shape, None)


def _size_of(change: Change) -> float:
    if isinstance(change.old, int) and isinstance(change.new, int):
        return abs(change.new - change.old)
    return 0.0


_process = Ledger()
start = _process.start
records = _process.records
eager_frames = _process.eager_frames
mark = _process.mark
since = _process.since
watch = _process.watch
compiled_between = _process.compiled_between
summary = _process.summary
metrics = _process.metrics
report = _process.report

install_when_dynamo_is_imported(_process)
