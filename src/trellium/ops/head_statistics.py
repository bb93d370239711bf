"""What is known of some edges' distributions while their logits pass by, tile after tile: an online log-sum-exp and its relatives."""

from __future__ import annotations

import torch
from torch import Tensor

from trellium.ops.head_sharding import reduce_maximum, reduce_minimum, reduce_sums
from trellium.ops.head_tiles import Head, Workspace, logit_tiles


class Statistics:
    """What is known of some edges' distributions while their logits pass by. `[edges]` each; None where not wanted.

    Attributes:
        highest: the highest logit so far.
        total: Σ exp(z - highest).
        chosen: the target's logit.
        moment: Σ exp(z - highest) · (z - highest), for the entropy.
        squares: Σ exp(z - highest)².
        plain: Σ z.
        first: whether the target is the first that reaches `highest`.
        vocabulary: how many tokens all ranks' heads have, known after `join_sums`.
    """

    def __init__(
        self,
        like: Tensor,
        target: Tensor,
        *,
        lowest: float,
        moment: bool = False,
        squares: bool = False,
        plain: bool = False,
        first: bool = False,
    ) -> None:
        """`like`: a tensor of the statistics' dtype and device; `target`: `[edges]`, counted from this rank's first token."""
        self.target, self.lowest = target, lowest
        edges = target.shape[0]
        self.highest = like.new_full((edges,), lowest)
        self.total = like.new_zeros(edges)
        self.chosen = like.new_zeros(edges)
        self.moment = like.new_zeros(edges) if moment else None
        self.squares = like.new_zeros(edges) if squares else None
        self.plain = like.new_zeros(edges) if plain else None
        self.first = torch.zeros_like(target, dtype=torch.bool) if first else None
        self.vocabulary = like.new_zeros(edges)

    def raise_highest(self, z: Tensor, rows: slice, start: int) -> tuple[Tensor, Tensor]:
        """Fold the maxima of a tile of logits of the tokens from `start` on; the highest before and after, `[rows]`."""
        width = z.shape[1]
        place = self.target[rows] - start
        here = (place >= 0) & (place < width)
        place = place.clamp_(0, width - 1)
        value = z.gather(1, place.unsqueeze(1)).squeeze(1)
        self.chosen[rows] = torch.where(here, value, self.chosen[rows])
        if self.plain is not None:
            self.plain[rows] += z.sum(dim=1)
        before, peak = self.highest[rows], z.amax(dim=1)
        after = torch.maximum(before, peak)
        if self.first is not None:
            reached = here & (value == peak) & (peak > before)
            self.first[rows] = torch.where(peak > before, _first_of_equals(z, place, reached), self.first[rows])
        return before, after

    def fold(self, z: Tensor, rows: slice, start: int, work: Workspace) -> None:
        """Fold a tile of logits, which is overwritten."""
        before, after = self.raise_highest(z, rows, start)
        shift = (before - after).clamp_(min=self.lowest)
        shrink = shift.exp()
        if self.moment is not None:
            self.moment[rows] = (self.moment[rows] + self.total[rows] * shift) * shrink
        self.total[rows] *= shrink
        if self.squares is not None:
            self.squares[rows] *= shrink.square()
        self.highest[rows] = after
        self.add_exponentials(z.sub_(after.unsqueeze(1)), rows, work)

    def add_exponentials(self, shifted: Tensor, rows: slice, work: Workspace) -> Tensor:
        """Add a tile of `z - highest`; its exponential, in the tile's place or, where the entropy is wanted, in a buffer of its own."""
        if self.moment is None:
            probability = shifted.exp_()
        else:
            probability = torch.exp(shifted, out=work("probability", *shifted.shape))
            # a logit of -inf counts 0, not 0 · inf
            self.moment[rows] += shifted.clamp_(min=self.lowest).mul_(probability).sum(dim=1)
        self.total[rows] += probability.sum(dim=1)
        if self.squares is not None:
            self.squares[rows] += torch.linalg.vector_norm(probability, dim=1).square_()
        return probability

    def join_highest(self, group: str) -> None:
        """Make `highest` and `first` those of all ranks; what was summed is shrunk to the new maximum."""
        if not group:
            return
        before = self.highest.clone()
        reduce_maximum(self.highest, group)
        shift = (before - self.highest).clamp_(min=self.lowest)
        shrink = shift.exp()
        if self.moment is not None:
            self.moment.add_(self.total * shift).mul_(shrink)
        self.total.mul_(shrink)
        if self.squares is not None:
            self.squares.mul_(shrink.square())
        if self.first is not None:
            self._join_first(before == self.highest, group)

    def _join_first(self, reached: Tensor, group: str) -> None:
        """The earliest rank that reached the highest logit decides; twice its number, plus one unless its first to do so is the target."""
        assert self.first is not None
        rank = torch.distributed.get_rank(torch.distributed.distributed_c10d._resolve_process_group(group))
        vote = torch.where(reached, 2 * rank + (~self.first).to(self.target.dtype), torch.iinfo(self.target.dtype).max)
        self.first = reduce_minimum(vote, group) % 2 == 0

    def join_sums(self, vocabulary: int, group: str) -> None:
        """Make the sums those of all ranks, in one exchange; `plain` becomes the mean over the whole vocabulary of `vocabulary` tokens here."""
        here = (self.target >= 0) & (self.target < vocabulary)
        sums = {"total": self.total, "chosen": torch.where(here, self.chosen, 0.0)}
        sums |= {
            name: getattr(self, name) for name in ("moment", "squares", "plain") if getattr(self, name) is not None
        }
        sums["size"] = torch.full_like(self.total, vocabulary)
        joined = dict(zip(sums, reduce_sums(list(sums.values()), group), strict=True))
        self.vocabulary = joined.pop("size")
        for name, value in joined.items():
            setattr(self, name, value)
        if self.plain is not None:
            self.plain = self.plain / self.vocabulary

    def logprob(self) -> Tensor:
        """From the shifted parts: with logits of 1e6 the normalizer has no digits left for the logarithm."""
        return (self.chosen - self.highest) - self.total.log()

    def mean_logprob(self) -> Tensor | None:
        """Over the whole vocabulary, after `join_sums`."""
        return None if self.plain is None else (self.plain - self.highest) - self.total.log()

    def entropy(self) -> Tensor | None:
        return None if self.moment is None else self.total.log() - self.moment / self.total

    def log_sum_p2(self) -> Tensor | None:
        return None if self.squares is None else self.squares.log() - 2 * self.total.log()


def _first_of_equals(z: Tensor, place: Tensor, reached: Tensor) -> Tensor:
    """Which of the rows that reached their maximum at `place` reached it nowhere earlier."""
    if z.device.type != "cpu":
        return reached & (z.argmax(dim=1) == place)
    # On the host argmax costs ten times what amax does, and one tile an edge is all that matters.
    rows = reached.nonzero().squeeze(1)
    if rows.numel():
        reached[rows] = z[rows].argmax(dim=1) == place[rows]
    return reached


def fold_tiles(head: Head, target: Tensor, group: str, **wanted: bool) -> Statistics:
    """Of all edges, from one product: each tile of logits is folded as it is made, then what the ranks of `group` found is joined. `target`, `wanted`: as of `Statistics`."""
    statistics = Statistics(head.hidden.new_empty(0, dtype=head.statistics), target, lowest=head.lowest, **wanted)
    for logits in logit_tiles(head, buffers=1 + (statistics.moment is not None)):
        z = logits.z if head.outer == 1.0 else logits.z.mul_(head.outer)
        statistics.fold(z, logits.rows, logits.tile.start, logits.work)
    statistics.join_highest(group)
    statistics.join_sums(head.weight.shape[0], group)
    return statistics
