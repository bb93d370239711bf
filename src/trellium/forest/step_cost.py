"""What a shape costs: seconds to compile it, and seconds of a step.

A step is linear in what it works on: tokens (the layers), pairs of tokens (attention), edges (the head), and a fixed part. The four rates are fitted to
measured steps by least squares under the rule that none is negative, so that a larger shape never costs less; a shape that was measured keeps
its measure, and one that a cache has is not compiled but loaded. Cost: microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from trellium.forest.batch import Shape


@dataclass(frozen=True)
class StepCost:
    """Seconds, linear in the sizes of a shape.

    Attributes:
        fixed: seconds of a step whatever its size.
        token: seconds for each of the `R · L` tokens.
        pair: seconds for each of the `R · L · (L + 1) / 2` pairs of a token and one it attends to.
        edge: seconds for each of the `E` edges.
        compile_seconds: what it takes to compile a shape.
        measured_steps: seconds of a step of shapes that were measured.
        measured_compiles: seconds to compile shapes that were measured.
        in_cache: whether a shape was compiled before and is only loaded; None for no cache.
        load_seconds: what that takes.
    """

    fixed: float = 0.0
    token: float = 1.0
    pair: float = 0.0
    edge: float = 0.0
    compile_seconds: float = 0.0
    measured_steps: Mapping[Shape, float] = field(default_factory=dict)
    measured_compiles: Mapping[Shape, float] = field(default_factory=dict)
    in_cache: Callable[[Shape], bool] | None = None
    load_seconds: float = 0.0

    @classmethod
    def fit(cls, steps: Mapping[Shape, float], compiles: Mapping[Shape, float]) -> StepCost:
        """Fitted to measured seconds of steps, at least one, and of compilations; a shape that was not compiled takes the mean of those that were.

        Raises:
            ValueError: no step measured.
        """
        if not steps:
            raise ValueError("a cost is fitted to at least one measured step, got none")
        sizes = np.asarray([_sizes(shape) for shape in steps], dtype=np.float64)
        rates = _non_negative_least_squares(sizes, np.fromiter(steps.values(), dtype=np.float64))
        mean = float(np.mean(list(compiles.values()))) if compiles else 0.0
        fixed, token, pair, edge = rates.tolist()
        return cls(fixed, token, pair, edge, mean, dict(steps), dict(compiles))

    def step_seconds(self, shape: Shape) -> float:
        """Of one batch: as measured, else by the rates."""
        if shape in self.measured_steps:
            return self.measured_steps[shape]
        return float(np.dot(_sizes(shape), (self.fixed, self.token, self.pair, self.edge)))

    def compiling_seconds(self, shape: Shape) -> float:
        """As measured, else `compile_seconds`; `load_seconds` for a shape in the cache."""
        return self.load_seconds if self.is_cached(shape) else self.measured_compiles.get(shape, self.compile_seconds)

    def is_cached(self, shape: Shape) -> bool:
        """Whether a shape is only loaded."""
        return self.in_cache is not None and self.in_cache(shape)


def _sizes(shape: Shape) -> tuple[float, float, float, float]:
    tokens = shape.rows * shape.length
    return 1.0, tokens, tokens * (shape.length + 1) / 2, shape.edges


def _non_negative_least_squares(sizes: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The rates, relative errors squared: the size whose rate is most negative is left out, until none is."""
    scale = sizes.max(axis=0)
    relative = sizes / scale / seconds[:, None]
    rates = np.zeros(sizes.shape[1])
    left = list(range(sizes.shape[1]))
    while left:
        found = np.linalg.lstsq(relative[:, left], np.ones(len(seconds)), rcond=None)[0]
        if (found >= 0).all():
            rates[left] = found
            break
        left.pop(int(found.argmin()))
    return rates / scale
