"""The operators behind `trellium.ops.head.token_scores`.

Forward: the vocabulary is the outer loop, so that a tile of the head is read and cast once, and the edges are the inner one; each tile of logits is
folded at once into an online log-sum-exp an edge. Backward: each tile is made again, turned in place into the gradient of its logits, and adds two
products. Both are custom operators: one node each in a compiled graph, whose compilation does not grow with the vocabulary.

Cost: one product of 2·E·V·H operations forward, three backward (two when the head is frozen); one exponential a logit in each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trellium.ops.head_sharding import reduce_maximum, reduce_minimum, reduce_sum, reduce_sums
from trellium.ops.head_tiles import Head, HeadTile, Workspace, add_product, tile_plan, widest


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
        size = joined.pop("size")
        for name, value in joined.items():
            setattr(self, name, value)
        if self.plain is not None:
            self.plain = self.plain / size

    def logprob(self) -> Tensor:
        """From the shifted parts: with logits of 1e6 the normalizer has no digits left for the logarithm."""
        return (self.chosen - self.highest) - self.total.log()

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


def _empty(like: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    return like.new_empty(size, dtype=dtype)


@torch.library.custom_op("trellium::token_scores", mutates_args=())
def token_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    first_token: int,
    group: str,
    wants_entropy: bool,
    wants_log_sum_p2: bool,
    wants_mean_logit: bool,
    wants_top1: bool,
    weight_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Log-probability, entropy, log Σp², mean logit and top-1 (empty where not wanted), and for the backward the highest logit and log Σ exp(z - highest)."""
    head = Head(hidden, weight, bias, temperature, logit_scale, softcap)
    (edges, width), vocabulary, itemsize = hidden.shape, weight.shape[0], head.statistics.itemsize
    factors = hidden if head.products == hidden.dtype else hidden.to(head.products)
    cast_bytes = 0 if factors is hidden else factors.nbytes
    edge_pieces, token_pieces = tile_plan(
        edges, vocabulary, width, itemsize=itemsize, buffers=1 + wants_entropy, other_bytes=cast_bytes
    )
    work = Workspace(hidden, widest(edge_pieces) * widest(token_pieces), head.statistics)
    statistics = Statistics(
        hidden.new_empty(0, dtype=head.statistics),
        target - first_token,
        lowest=head.lowest,
        moment=wants_entropy,
        squares=wants_log_sum_p2,
        plain=wants_mean_logit,
        first=wants_top1,
    )
    for tile in head.tiles(token_pieces):
        for start, stop in edge_pieces:
            z = head.project(factors[start:stop], tile, work("z", stop - start, tile.width), work)
            if head.outer != 1.0:
                z.mul_(head.outer)
            statistics.fold(z, slice(start, stop), tile.start, work)
    statistics.join_highest(group)
    statistics.join_sums(vocabulary, group)
    nothing = statistics.total.new_empty(0)
    found = (statistics.logprob(), statistics.entropy(), statistics.log_sum_p2(), statistics.plain)
    first = target.new_empty(0, dtype=torch.bool) if statistics.first is None else statistics.first
    return (
        *(nothing.clone() if value is None else value for value in found),
        first,
        statistics.highest,
        statistics.total.log(),
    )  # type: ignore[return-value]


@token_scores.register_fake
def _(  # type: ignore[no-untyped-def]
    hidden, weight, bias, target, temperature, logit_scale, softcap, first_token, group,
    wants_entropy, wants_log_sum_p2, wants_mean_logit, wants_top1, weight_dtype,
):  # fmt: skip
    edges = hidden.shape[0]
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return (
        _empty(hidden, edges, dtype),
        *(
            _empty(hidden, edges if wants else 0, dtype)
            for wants in (wants_entropy, wants_log_sum_p2, wants_mean_logit)
        ),
        _empty(target, edges if wants_top1 else 0, torch.bool),
        _empty(hidden, edges, dtype),
        _empty(hidden, edges, dtype),
    )


class _LogitGradient:
    """What turns a tile of logits into the gradient of the tile: d logprob = 1[target] - p, d entropy = -p · (log p + entropy)."""

    def __init__(
        self,
        head: Head,
        target: Tensor,
        grad_logprob: Tensor | None,
        grad_entropy: Tensor | None,
        entropy: Tensor,
        highest: Tensor,
        log_total: Tensor,
    ) -> None:
        self.head, self.target, self.highest, self.log_total = head, target, highest, log_total
        self.of_target = None if grad_logprob is None else grad_logprob.to(head.statistics) * head.slope
        self.of_entropy = None if grad_entropy is None else grad_entropy.to(head.statistics) * head.slope
        self.constant = self.of_target  # what multiplies -p
        if self.of_entropy is not None:
            constant = self.of_entropy * entropy
            self.constant = constant if self.of_target is None else constant + self.of_target

    def __call__(self, z: Tensor, rows: slice, start: int, work: Workspace) -> Tensor:
        """The gradient of one tile, in a buffer; `z` is overwritten."""
        bend = None
        if self.head.softcap is not None:  # the derivative of tanh
            bend = torch.mul(z, z, out=work("bend", *z.shape)).neg_().add_(1.0)
            z.mul_(self.head.outer)
        z.sub_(self.highest[rows].unsqueeze(1)).sub_(self.log_total[rows].unsqueeze(1))  # log p
        assert self.constant is not None
        if self.of_entropy is None:
            grad = z.exp_().mul_(-self.constant[rows].unsqueeze(1))
        else:
            grad = torch.exp(z, out=work("probability", *z.shape))
            z.clamp_(min=self.head.lowest).mul_(-self.of_entropy[rows].unsqueeze(1))
            grad.mul_(z.sub_(self.constant[rows].unsqueeze(1)))
        if self.of_target is not None:
            add_at_targets(grad, self.target[rows] - start, self.of_target[rows])
        return grad if bend is None else grad.mul_(bend)


def add_at_targets(tile: Tensor, place: Tensor, addend: Tensor) -> None:
    """Add `addend` `[rows]` to each row's entry at `place`, where that lies in the tile."""
    width = tile.shape[1]
    here = (place >= 0) & (place < width)
    tile.scatter_add_(1, place.clamp(0, width - 1).unsqueeze(1), torch.where(here, addend, 0.0).unsqueeze(1))


class WeightGradient:
    """The gradient of the weights and the bias, gathered tile by tile of the vocabulary."""

    def __init__(self, head: Head, *, weight: bool, bias: bool, dtype: torch.dtype) -> None:
        """`dtype`: of the weight's gradient. A tile is summed in the statistics' dtype and rounded once."""
        self.statistics = head.statistics
        self.weight = torch.empty_like(head.weight, dtype=dtype) if weight else None
        self.bias = torch.empty_like(head.bias) if bias and head.bias is not None else None
        self._weight_tile: Tensor | None = None
        self._bias_tile: Tensor | None = None

    def open(self, tile: HeadTile) -> None:
        columns = slice(tile.start, tile.start + tile.width)
        if self.weight is not None:
            part = self.weight[columns]
            self._weight_tile = (
                part.zero_() if part.dtype == self.statistics else torch.zeros_like(part, dtype=self.statistics)
            )
        if self.bias is not None:
            self._bias_tile = torch.zeros_like(self.bias[columns], dtype=self.statistics)

    def add(self, grad: Tensor, factor: Tensor, rows: Tensor) -> None:
        """`grad`: the tile's gradient in the statistics' dtype; `factor`: the same in the products'."""
        if self._bias_tile is not None:
            self._bias_tile.add_(grad.sum(dim=0))
        if self._weight_tile is not None:
            add_product(self._weight_tile, factor.t(), rows)

    def close(self, tile: HeadTile) -> None:
        columns = slice(tile.start, tile.start + tile.width)
        if self.weight is not None and self.weight.dtype != self.statistics:
            self.weight[columns] = self._weight_tile
        if self.bias is not None:
            self.bias[columns] = self._bias_tile


@torch.library.custom_op("trellium::token_scores_backward", mutates_args=())
def token_scores_backward(
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    entropy: Tensor,
    highest: Tensor,
    log_total: Tensor,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    first_token: int,
    group: str,
    wants_hidden: bool,
    wants_weight: bool,
    wants_bias: bool,
    weight_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias, empty where not wanted; each tile of logits is made again."""
    head = Head(hidden, weight, bias, temperature, logit_scale, softcap)
    (edges, width), vocabulary, itemsize = hidden.shape, weight.shape[0], head.statistics.itemsize
    gradient = _LogitGradient(head, target - first_token, grad_logprob, grad_entropy, entropy, highest, log_total)
    factors = hidden if head.products == hidden.dtype else hidden.to(head.products)
    grad_hidden = torch.zeros_like(hidden, dtype=head.statistics) if wants_hidden else None
    edge_pieces, token_pieces = tile_plan(
        edges,
        vocabulary,
        width,
        itemsize=itemsize,
        buffers=1 + (grad_entropy is not None) + (softcap is not None),
        other_bytes=(factors is not hidden) * factors.nbytes + (0 if grad_hidden is None else grad_hidden.nbytes),
    )
    work = Workspace(hidden, widest(edge_pieces) * widest(token_pieces), head.statistics)
    gathered = WeightGradient(head, weight=wants_weight, bias=wants_bias, dtype=weight_dtype)
    for tile in head.tiles(token_pieces):
        gathered.open(tile)
        for start, stop in edge_pieces:
            rows = factors[start:stop]
            z = head.project(rows, tile, work("z", stop - start, tile.width), work)
            grad = gradient(z, slice(start, stop), tile.start, work)
            factor = head.as_factor(grad, work)
            if grad_hidden is not None:
                add_product(grad_hidden[start:stop], factor, tile.weight)
            gathered.add(grad, factor, rows)
        gathered.close(tile)
    if grad_hidden is not None:
        reduce_sum(grad_hidden, group)
    return (
        hidden.new_empty(0) if grad_hidden is None else grad_hidden.to(hidden.dtype),
        weight.new_empty(0, dtype=weight_dtype) if gathered.weight is None else gathered.weight,
        weight.new_empty(0) if gathered.bias is None else gathered.bias,
    )


@token_scores_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    grad_logprob, grad_entropy, hidden, weight, bias, target, entropy, highest, log_total, temperature, logit_scale, softcap,
    first_token, group, wants_hidden, wants_weight, wants_bias, weight_dtype,
):  # fmt: skip
    return (
        torch.empty_like(hidden) if wants_hidden else hidden.new_empty(0),
        torch.empty_like(weight, dtype=weight_dtype) if wants_weight else weight.new_empty(0, dtype=weight_dtype),
        torch.empty_like(bias) if wants_bias else weight.new_empty(0),
    )


def gradient_dtype(weight: Tensor) -> torch.dtype:
    """The dtype to make `weight`'s gradient in: its own, or float32 where its `grad_dtype` says so.

    A graph that is being compiled cannot ask; there the gradient is rounded once and autograd sums it in `grad_dtype`.
    """
    wanted = weight.grad_dtype if weight.is_leaf and not torch.compiler.is_compiling() else weight.dtype
    return torch.float32 if wanted == torch.float32 else weight.dtype


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, target, *transform = inputs
    _, entropy, log_sum_p2, mean_logit, top1, highest, log_total = output
    ctx.save_for_backward(hidden, weight, bias, target, entropy, highest, log_total)
    ctx.transform, ctx.weight_dtype = transform[:5], transform[-1]
    ctx.mark_non_differentiable(log_sum_p2, mean_logit, top1, highest, log_total)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None, *_: None) -> tuple[Any, ...]:
    nothing = (None,) * 14
    if grad_logprob is None and grad_entropy is None:
        return nothing
    wanted = ctx.needs_input_grad[:3]
    arguments = (*ctx.saved_tensors, *ctx.transform, *wanted, ctx.weight_dtype)
    grads = token_scores_backward(grad_logprob, grad_entropy, *arguments)
    return (*(grad if want else None for grad, want in zip(grads, wanted, strict=True)), *nothing[3:])


token_scores.register_autograd(_differentiate, setup_context=_save_for_backward)
