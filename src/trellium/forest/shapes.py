"""Choose the few shapes a run may use.

Every shape costs a compilation; every token of padding costs its share of a step. Given the histogram of rounded lengths a run will feed, the cheapest set
of at most `max_graphs` lengths is found exactly: each planned length serves a run of neighbouring ones, so the best for the lengths up to `j` with `k`
graphs is the best up to some `i < j` with `k - 1`, and everything between padded to `j`. O(max_graphs · n²) for `n` distinct lengths: some 10 ms for
256 of them. Lengths that no row has are worth a graph only where it is in a cache, from an earlier run; those are considered too.

Batches of several rows are as long as their longest: how often that is which length follows exactly from the histogram, for shuffled rows. The other
sizes follow from the length: `E` is the most edges that any `R` rows of that length or less can have, so no batch ever needs more. A partial last
batch is filled up to `R`, so it needs no shape of its own. Training and evaluation are different graphs; `max_graphs` is shared between them in the best way.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trellium.errors import ConfigError, DatasetError
from trellium.forest.batch import Shape
from trellium.forest.step_cost import StepCost

Shapes = Literal["auto", "multiple", "exact"] | Ordered[int]

_ASKED = 1024
"""How many lengths that no row has are looked for in a cache, at most."""


@dataclass(frozen=True)
class Feed:
    """What a run feeds to one kind of graph.

    Attributes:
        lengths: `[n]`, tokens of every row (packed rows, where rows are packed; whole batches, where each is one row).
        rows: how many of them are drawn for a batch on one device.
        batches: how many batches the run will feed on one device, micro-batches counted singly: steps · accumulation, or evaluations · batches of one.
        cost: seconds of its shapes.
        trained: `[n]`, trained tokens of every row; None for all but its first.
        terms: `[n]`, terms of every row; None for batches without terms.
        shape_rows: `R` of its shapes, where that is not how many are drawn: what is drawn may lie in several rows of a batch.
    """

    lengths: Ordered[int] | np.ndarray
    rows: int
    batches: float
    cost: StepCost
    trained: Ordered[int] | np.ndarray | None = None
    terms: Ordered[int] | np.ndarray | None = None
    shape_rows: int | None = None


@dataclass(frozen=True)
class PlannedShape:
    """One graph of a plan, and what is expected of it.

    Attributes:
        shape: its sizes.
        evaluation: whether it is one of evaluation, which has no backward.
        batches: how many batches take it.
        real_tokens: their tokens that are not padding.
        compile_seconds: to compile it.
        run_seconds: of all its batches.
        cached: whether it was compiled before, and `compile_seconds` are those of loading it.
    """

    shape: Shape
    evaluation: bool
    batches: float
    real_tokens: float
    compile_seconds: float
    run_seconds: float
    cached: bool = False

    @property
    def tokens(self) -> float:
        """Tokens of its batches, padding among them."""
        return self.batches * self.shape.rows * self.shape.length

    @property
    def padding(self) -> float:
        """The share of its tokens that is padding."""
        return 1 - self.real_tokens / self.tokens if self.tokens else 0.0


@dataclass(frozen=True)
class ShapePlan:
    """The shapes a run may use: those of training by length, then those of evaluation."""

    planned: tuple[PlannedShape, ...]

    @property
    def compile_seconds(self) -> float:
        return sum(one.compile_seconds for one in self.planned)

    @property
    def run_seconds(self) -> float:
        """Of the steps, without compiling."""
        return sum(one.run_seconds for one in self.planned)

    @property
    def padding(self) -> float:
        """The share of all tokens that is padding."""
        tokens = sum(one.tokens for one in self.planned)
        return 1 - sum(one.real_tokens for one in self.planned) / tokens if tokens else 0.0

    def shape_for(
        self, length: int, rows: int, edges: int = 0, terms: int = 0, *, evaluation: bool = False
    ) -> Shape | None:
        """The smallest planned shape that holds a batch of such sizes, or None."""
        needed = Shape(rows, length, edges, terms)
        fitting = [one.shape for one in self.planned if one.evaluation == evaluation and one.shape.holds(needed)]
        return min(fitting, key=lambda shape: (shape.rows * shape.length, shape), default=None)

    def __str__(self) -> str:
        """The plan as a table."""
        tokens = sum(one.tokens for one in self.planned) or 1.0
        lines = [
            f"{'shape':<40} {'for':<10} {'batches':>10} {'tokens':>7} {'padding':>7} {'compile s':>9} {'run s':>10}"
        ]
        lines += [
            f"{one.shape!s:<40} {'evaluation' if one.evaluation else 'training':<10} {one.batches:>10,.0f} {one.tokens / tokens:>7.1%} "
            f"{one.padding:>7.1%} {'cached' if one.cached else f'{one.compile_seconds:.1f}':>9} {one.run_seconds:>10,.1f}"
            for one in self.planned
        ]
        whole = f"{len(self.planned)} graphs"
        batches = sum(one.batches for one in self.planned)
        lines.append(
            f"{whole:<51} {batches:>10,.0f} {1:>7.1%} {self.padding:>7.1%} {self.compile_seconds:>9.1f} {self.run_seconds:>10,.1f}"
        )
        return "\n".join(lines)


def plan_shapes(
    training: Feed,
    evaluation: Feed | None = None,
    *,
    shapes: Shapes = "auto",
    step: int = 128,
    max_graphs: int = 8,
    longest: int | None = None,
) -> ShapePlan:
    """The shapes with the least seconds of compiling and running.

    Args:
        training, evaluation: what the run feeds. Several evaluation sets of one batch size are one feed.
        shapes: `auto`: the best, at most `max_graphs` of them. `multiple`: every multiple of `step` that occurs. `exact`: every length that occurs.
            Row lengths: these.
        step: lengths and numbers of edges are rounded up to multiples of this (128 on `neuron`).
        max_graphs: how many shapes there may be, in training and evaluation together. Only `auto` chooses by it.
        longest: no row may be longer than this; None for no such rule.

    Raises:
        ConfigError: sizes below 1, fewer graphs than feeds, or given lengths none of which holds the longest row.
        DatasetError: no rows, one without a token, or one longer than `longest`; names the row.
    """
    if step < 1 or max_graphs < 1:
        raise ConfigError(f"step and max_graphs must be at least 1, got {step} and {max_graphs}")
    feeds = [training] if evaluation is None else [training, evaluation]
    measured = [_Histogram(feed, 1 if shapes == "exact" else step, longest) for feed in feeds]
    if shapes == "auto":
        if max_graphs < len(feeds):
            raise ConfigError(
                f"training and evaluation are different graphs: max_graphs must be at least 2, got {max_graphs}"
            )
        chosen = _share_graphs([histogram.best(max_graphs) for histogram in measured], max_graphs)
    elif isinstance(shapes, str):
        if shapes not in ("multiple", "exact"):
            raise ConfigError(f"shapes must be 'auto', 'multiple', 'exact' or row lengths, got {shapes!r}")
        chosen = [histogram.lengths for histogram in measured]
    else:
        chosen = [histogram.held_by(shapes) for histogram in measured]
    planned = []
    for histogram, lengths, is_evaluation in zip(measured, chosen, (False, True), strict=False):
        planned += histogram.planned(lengths, evaluation=is_evaluation)
    return ShapePlan(tuple(planned))


class _Histogram:
    """A feed by rounded length: how often a batch is as long, and what its shape costs."""

    def __init__(self, feed: Feed, step: int, longest: int | None) -> None:
        exact = np.asarray(feed.lengths, dtype=np.int64)
        _refuse(exact, feed, longest)
        self.feed, self.step = feed, step
        self._order = np.argsort(exact, kind="stable")
        self._sorted = exact[self._order]
        self.lengths = np.unique(_round_up(exact, step))

    def best(self, most: int) -> list[tuple[float, np.ndarray]]:
        """For 1, 2, … `most` graphs (no more than there are lengths): seconds, and the lengths."""
        lengths = np.union1d(self.lengths, self._cached_lengths())
        longest = (
            int(np.searchsorted(lengths, self.lengths[-1])) + 1
        )  # the first so many lengths hold all but the longest rows
        batches, _ = self._up_to(lengths)
        shapes = self._shapes(lengths)
        seconds = [self.feed.cost.step_seconds(shape) for shape in shapes]
        compiling = [self.feed.cost.compiling_seconds(shape) for shape in shapes]
        size = len(lengths)
        least = np.full(size + 1, np.inf)  # for the first j lengths
        least[0] = 0.0
        came_from: list[np.ndarray] = []
        found = []
        for _ in range(min(most, size)):
            nearer, origin = np.full(size + 1, np.inf), np.zeros(size + 1, dtype=np.int64)
            for j in range(1, size + 1):
                way = least[:j] + (batches[j] - batches[:j]) * seconds[j - 1]
                origin[j] = way.argmin()
                nearer[j] = way[origin[j]] + compiling[j - 1]
            least = nearer
            came_from.append(origin)
            ends, j = [], longest + int(least[longest:].argmin())
            seconds_in_all = float(least[j])
            for origins in reversed(came_from):
                ends.append(j - 1)
                j = int(origins[j])
            found.append((seconds_in_all, lengths[ends[::-1]]))
        return found

    def _cached_lengths(self) -> np.ndarray:
        """Lengths whose graphs are in the cache, up to twice the longest row; none where there are too many to ask for each."""
        lengths = np.arange(self.step, 2 * int(self.lengths[-1]) + 1, self.step)
        if self.feed.cost.in_cache is None or len(lengths) > _ASKED:
            return lengths[:0]
        return lengths[[self.feed.cost.is_cached(shape) for shape in self._shapes(lengths)]]

    def held_by(self, given: Ordered[int]) -> np.ndarray:
        """The given lengths, ascending."""
        lengths = np.unique(np.asarray(given, dtype=np.int64))
        if not len(lengths) or lengths[0] < 1:
            raise ConfigError(f"row lengths must be numbers from 1, at least one of them; got {list(given)}")
        if lengths[-1] < self._sorted[-1]:
            raise ConfigError(
                f"row {int(self._order[-1])} has {int(self._sorted[-1])} tokens, the longest planned shape {int(lengths[-1])}: "
                "plan a longer one, or cut rows with max_length"
            )
        return lengths

    def planned(self, lengths: np.ndarray, *, evaluation: bool) -> list[PlannedShape]:
        """What is expected of a choice of lengths, each with what is not longer than it and longer than the one before."""
        batches, real = (np.diff(cumulative) for cumulative in self._up_to(lengths))
        return [
            PlannedShape(
                shape=shape,
                evaluation=evaluation,
                batches=float(batches[index]),
                real_tokens=float(real[index]),
                compile_seconds=self.feed.cost.compiling_seconds(shape),
                run_seconds=float(batches[index]) * self.feed.cost.step_seconds(shape),
                cached=self.feed.cost.is_cached(shape),
            )
            for index, shape in enumerate(self._shapes(lengths))
        ]

    def _up_to(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For ascending lengths, `[n + 1]` with 0 in front: how many batches are no longer, and the real tokens of those."""
        count = np.searchsorted(self._sorted, lengths, side="right")  # rows that are no longer
        total = np.append(0, np.cumsum(self._sorted))[count]
        rows, together = len(self._sorted), min(self.feed.rows, len(self._sorted))
        # Of `together` rows drawn without replacement: all no longer; and the tokens of those batches, a row with all others no longer.
        others = np.ones(len(count))
        for drawn in range(1, together):
            others *= np.maximum(count - drawn, 0) / (rows - drawn)
        batches = self.feed.batches * np.append(0, others * count / rows)
        return batches, self.feed.batches * np.append(0, others * total * together / rows)

    def _shapes(self, lengths: np.ndarray) -> list[Shape]:
        """The sizes that batches of at most such lengths need: the most edges and terms that any `R` rows have."""
        feed = self.feed
        trained = np.maximum(self._sorted - 1, 0) if feed.trained is None else np.asarray(feed.trained)[self._order]
        terms = None if feed.terms is None else np.asarray(feed.terms)[self._order]
        rows = feed.shape_rows or feed.rows
        return [
            Shape(
                rows,
                int(length),
                min(self._most(trained[:count]), int(length) * rows),
                0 if terms is None else self._most(terms[:count]),
            )
            for length, count in zip(lengths, np.searchsorted(self._sorted, lengths, side="right"), strict=True)
        ]

    def _most(self, counts: np.ndarray) -> int:
        """What `R` rows have at most together, rounded up to the step."""
        rows = self.feed.rows
        dearest = np.partition(counts, len(counts) - rows)[-rows:] if len(counts) > rows else counts
        return max(int(_round_up(dearest.sum(), self.step)), 1)


def _share_graphs(tables: list[list[tuple[float, np.ndarray]]], max_graphs: int) -> list[np.ndarray]:
    """The lengths of each feed, with the least seconds in all, if together they have at most `max_graphs`."""
    ways = itertools.product(*(range(1, len(table) + 1) for table in tables))
    allowed = [way for way in ways if sum(way) <= max_graphs]
    best = min(allowed, key=lambda way: sum(table[graphs - 1][0] for table, graphs in zip(tables, way, strict=True)))
    return [table[graphs - 1][1] for table, graphs in zip(tables, best, strict=True)]


def _round_up(count: np.ndarray, step: int) -> np.ndarray:
    return -(-count // step) * step


def _refuse(lengths: np.ndarray, feed: Feed, longest: int | None) -> None:
    if not len(lengths):
        raise DatasetError("shapes are planned from the rows of a run, and there are none")
    if feed.rows < 1:
        raise ConfigError(f"a batch needs at least one row, got {feed.rows}")
    if lengths.min() < 1:
        raise DatasetError(f"row {int(lengths.argmin())} has no tokens: drop empty rows before training")
    if longest is not None and lengths.max() > longest:
        row = int(lengths.argmax())
        raise DatasetError(
            f"row {row} has {int(lengths[row])} tokens, more than the {longest} that are allowed. Cut rows with max_length."
        )
