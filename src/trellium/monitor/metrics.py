"""Metrics that stay on the device until they are logged.

A micro-batch adds scalars to sums kept on the device: no wait for it. Reading reduces all sums over the processes in one collective, brings them to the
host in one transfer, and starts again from zero. So a metric is a ratio of sums over everything since it was last read (`entropy`: nats over
trained tokens), which does not depend on how rows were laid out in batches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_DIGIT = 4096
"""Counts travel as digits of this base in float32: exact up to 2**24 * 4096, with no 64-bit number on the device's wire."""


class MetricSink:
    """Means since the last reading, and counts since the beginning, summed on one device.

    Args:
        device: where the sums live.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._means: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}

    def add_mean(self, name: str, total: Tensor, count: Tensor) -> None:
        """Add to a mean: `total` `[]` is the sum of the values, `count` `[]` how many there were."""
        pair = torch.stack([total.detach(), count.detach()]).to(self._device, torch.float32)
        self._means[name] = self._means[name] + pair if name in self._means else pair

    def add_count(self, name: str, count: Tensor) -> None:
        """Add to a count: `count` `[]`, an integer."""
        count = count.detach().to(self._device, torch.int64)
        self._counts[name] = self._counts[name] + count if name in self._counts else count

    def read(self, reduce: Callable[[Tensor], Tensor] | None = None) -> tuple[dict[str, float], dict[str, int]]:
        """Means since the last reading, which are then forgotten, and counts, which go on. One transfer to the host.

        Args:
            reduce: sums a tensor over all processes; None for a single one. Every process must have added the same names.

        Returns:
            The means by name, without those of nothing; the counts by name.
        """
        means, self._means = self._means, {}
        pairs = self._to_host(list(means.values()), reduce)
        ratios = {name: total / count for name, (total, count) in zip(means, pairs, strict=False) if count > 0}
        digits = zip(self._counts, pairs[len(means) :], strict=True)
        return ratios, {name: int(low) + int(high) * _DIGIT for name, (low, high) in digits}

    def counts(self, reduce: Callable[[Tensor], Tensor] | None = None) -> dict[str, int]:
        """The counts alone; the means are left as they are."""
        means, self._means = self._means, {}
        _, counts = self.read(reduce)
        self._means = means
        return counts

    def means(self) -> dict[str, Tensor]:
        """The sums of the means as they stand, for `put_back`; nothing is copied."""
        return dict(self._means)

    def put_back(self, means: dict[str, Tensor]) -> None:
        """Forget what was added to the means since `means()` gave these; counts stay."""
        self._means = dict(means)

    def _to_host(self, pairs: list[Tensor], reduce: Callable[[Tensor], Tensor] | None) -> list[list[float]]:
        pairs = pairs + [torch.stack([count % _DIGIT, count // _DIGIT]).float() for count in self._counts.values()]
        if not pairs:
            return []
        sums = torch.stack(pairs)
        return (sums if reduce is None else reduce(sums)).tolist()
