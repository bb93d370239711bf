"""Choose the few shapes a run may use.

Every shape costs a compilation; every token of padding costs its share of a step. Given the histogram of rounded lengths a run will feed, the cheapest set
of at most `max_graphs` lengths is found exactly: each planned length serves a run of neighbouring ones, so the best for the lengths up to `j` with `k`
graphs is the best up to some `i < j` with `k - 1`, and everything between padded to `j`. O(max_graphs · n²) for `n` distinct lengths: some 10 ms for
256 of them.

Batches of several rows are as long as their longest: how often that is which length follows exactly from the histogram, for shuffled rows. The other
sizes follow from the length: `E` is the most edges that any `R` rows of that length or less can have, so no batch ever needs more. A partial last
batch is filled up to `R`, so it needs no shape of its own. Training and evaluation are different graphs; `max_graphs` is shared between them in the best way.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

from trellium.errors import ConfigError, DatasetError
from trellium.forest.batch import Shape
from trellium.forest.step_cost import StepCost

Shapes = Literal["auto", "multiple", "exact"] | Ordered[int]


@dataclass(frozen=True)
class Feed:
    """What a run feeds to one kind of graph.

    Attributes:
        lengths: `[n]`, tokens of every row (packed rows, where rows are packed).
        rows: `R`, rows of a batch on one device.
        batches: how many batches the run will feed on one device, micro-batches counted singly: steps · accumulation, or evaluations · batches of one.
        cost: seconds of its shapes.
        trained: `[n]`, trained tokens of every row; None for all but its first.
        terms: `[n]`, terms of every row; None for batches without terms.
    """

    lengths: Ordered[int] | np.ndarray
    rows: int
    batches: float
    cost: StepCost
    trained: Ordered[int] | np.ndarray | None = None
    terms: Ordered[int] | np.ndarray | None = None


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
    """

    shape: Shape
    evaluation: bool
    batches: float
    real_tokens: float
    compile_seconds: float
    run_seconds: float

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
            f"{one.padding:>7.1%} {one.compile_seconds:>9.1f} {one.run_seconds:>10,.1f}"
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
    histograms = [_Histogram(feed, shapes, step, longest) for feed in feeds]
    if shapes == "auto":
        if max_graphs < len(feeds):
            raise ConfigError(
                f"training and evaluation are different graphs: max_graphs must be at least 2, got {max_graphs}"
            )
        chosen = _share_graphs([histogram.best(max_graphs) for histogram in histograms], max_graphs)
    else:
        chosen = [np.arange(len(histogram.lengths)) for histogram in histograms]
    planned: list[PlannedShape] = []
    for histogram, places, is_evaluation in zip(histograms, chosen, (False, True), strict=False):
        planned += histogram.planned(places, evaluation=is_evaluation)
    return ShapePlan(tuple(planned))


class _Histogram:
    """A feed by the lengths that may be planned: how often a batch is no longer than each, and what a shape of each costs."""

    def __init__(self, feed: Feed, shapes: Shapes, step: int, longest: int | None) -> None:
        rows = np.asarray(feed.lengths, dtype=np.int64)
        _refuse_feed(feed, rows, longest)
        order = np.argsort(rows, kind="stable")
        ascending = rows[order]
        self.feed = feed
        self.lengths = _candidates(rows, shapes, step)
        count = np.searchsorted(ascending, self.lengths, side="right")  # rows that are no longer
        total = np.append(0, np.cumsum(ascending))[count]
        together = min(feed.rows, len(rows))
        # Of `together` rows drawn without replacement: the others no longer, given that one is.
        others = np.ones(len(count))
        for drawn in range(1, together):
            others *= np.maximum(count - drawn, 0) / (len(rows) - drawn)
        self.batches = feed.batches * np.append(0, others * count / len(rows))  # [n + 1], cumulative, as the next
        self.real_tokens = feed.batches * np.append(0, others * total * together / len(rows))
        trained = rows - 1 if feed.trained is None else np.asarray(feed.trained, dtype=np.int64)
        edges = _most_of_any(trained[order], count, feed.rows, step)
        terms = np.zeros_like(edges)
        if feed.terms is not None:
            terms = _most_of_any(np.asarray(feed.terms, dtype=np.int64)[order], count, feed.rows, step)
        self.shapes = [
            Shape(feed.rows, length, min(most, feed.rows * length), of_terms)
            for length, most, of_terms in zip(self.lengths.tolist(), edges.tolist(), terms.tolist(), strict=True)
        ]
        self.seconds = np.asarray([feed.cost.step_seconds(shape) for shape in self.shapes])
        self.compiling = np.asarray([feed.cost.compiling_seconds(shape) for shape in self.shapes])

    def best(self, most: int) -> list[tuple[float, np.ndarray]]:
        """For exactly 1, 2, … `most` graphs: seconds, and the places of the lengths."""
        size = len(self.lengths)
        least = np.append(0.0, np.full(size, np.inf))  # for the first j lengths
        came_from: list[np.ndarray] = []
        found = []
        for _ in range(min(most, size)):
            nearer, origin = np.full(size + 1, np.inf), np.zeros(size + 1, dtype=np.int64)
            for j in range(1, size + 1):
                way = least[:j] + (self.batches[j] - self.batches[:j]) * self.seconds[j - 1]
                origin[j] = way.argmin()
                nearer[j] = way[origin[j]] + self.compiling[j - 1]
            least = nearer
            came_from.append(origin)
            ends, j = [], size
            for origins in reversed(came_from):
                ends.append(j - 1)
                j = int(origins[j])
            found.append((float(least[size]), np.asarray(ends[::-1])))
        return found

    def planned(self, places: np.ndarray, *, evaluation: bool) -> list[PlannedShape]:
        """What is expected of a choice of lengths, each for what is longer than the one before it."""
        upto = np.append(0, places + 1)
        batches, real = np.diff(self.batches[upto]), np.diff(self.real_tokens[upto])
        return [
            PlannedShape(
                shape=self.shapes[place],
                evaluation=evaluation,
                batches=float(batches[index]),
                real_tokens=float(real[index]),
                compile_seconds=float(self.compiling[place]),
                run_seconds=float(batches[index] * self.seconds[place]),
            )
            for index, place in enumerate(places.tolist())
        ]


def _refuse_feed(feed: Feed, rows: np.ndarray, longest: int | None) -> None:
    if feed.rows < 1 or feed.batches < 0:
        raise ConfigError(f"a feed has at least 1 row a batch, and batches, got {feed.rows} and {feed.batches}")
    if not len(rows):
        raise DatasetError("shapes are planned from at least one row, got none")
    for name, counts in (("trained", feed.trained), ("terms", feed.terms)):
        if counts is not None and len(counts) != len(rows):
            raise ValueError(f"{name} must be one number a row, {len(rows)}, got {len(counts)}")
    if rows.min() < 1:
        raise DatasetError(f"row {int(rows.argmin())} has no tokens: drop empty rows before training")
    if longest is not None and rows.max() > longest:
        raise DatasetError(
            f"row {int(rows.argmax())} has {int(rows.max())} tokens, more than {longest}: cut it with max_length, or drop it"
        )


def _candidates(rows: np.ndarray, shapes: Shapes, step: int) -> np.ndarray:
    """The lengths that may be planned, ascending; the last holds the longest row."""
    if isinstance(shapes, str):
        if shapes not in ("auto", "multiple", "exact"):
            raise ConfigError(f"shapes must be 'auto', 'multiple', 'exact' or row lengths, got {shapes!r}")
        return np.unique(rows if shapes == "exact" else -(-rows // step) * step)
    lengths = np.unique(np.asarray(shapes, dtype=np.int64))
    if not len(lengths) or lengths[0] < 1:
        raise ConfigError(f"row lengths must be numbers from 1, at least one of them, got {list(shapes)}")
    if lengths[-1] < rows.max():
        raise ConfigError(
            f"row {int(rows.argmax())} has {int(rows.max())} tokens, the longest of the given shapes {int(lengths[-1])}: "
            "give a longer one, or cut rows with max_length"
        )
    return lengths


def _most_of_any(ascending: np.ndarray, count: np.ndarray, rows: int, step: int) -> np.ndarray:
    """`[n]`: the largest sum of any `rows` among the first `count[j]`, at least 1, rounded up to a multiple of the step."""
    largest = np.zeros(rows, dtype=np.int64)
    most = np.empty(len(count), dtype=np.int64)
    before = 0
    for j, upto in enumerate(count.tolist()):
        if upto > before:
            largest = np.concatenate([largest, ascending[before:upto]])
            largest = np.partition(largest, len(largest) - rows)[-rows:]
        most[j] = largest.sum()
        before = upto
    return -(-np.maximum(most, 1) // step) * step


def _share_graphs(found: list[list[tuple[float, np.ndarray]]], most: int) -> list[np.ndarray]:
    """One choice of each feed, at most so many graphs in all, with the least seconds; of equals the fewest graphs."""
    choices = [choice for choice in product(*found) if sum(len(places) for _, places in choice) <= most]
    best = min(
        choices, key=lambda choice: (sum(seconds for seconds, _ in choice), sum(len(places) for _, places in choice))
    )
    return [places for _, places in best]
