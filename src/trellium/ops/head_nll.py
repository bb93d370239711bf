"""The operator behind `trellium.ops.head.weighted_nll`: a loss linear in the log-probability, with its gradients made in the forward pass.

A block of edges is projected over the whole vocabulary, as many edges as fit into `WORK_BYTES`. Its normalizers are then known before its logits are
gone, so the gradients follow without making them again: three products of 2·E·V·H operations (two when the head is frozen) and one exponential a
logit, instead of four and two. The normalizer, the edge's weight and the slope scale operands of `[block, H]`, not the logits.

The price is that the weight's gradient is summed over blocks, in float32, and that gradients live from the forward to the backward. The backward
multiplies them by the incoming gradient in place, so it can run once; a second one is refused by autograd. A head of lower precision is cast once a
block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trellium.ops.head_scores import Statistics
from trellium.ops.head_sharding import reduce_sum
from trellium.ops.head_tiles import Head, Workspace, add_product, row_plan, widest


class Gradients:
    """Sums of the gradients over blocks of edges."""

    def __init__(self, head: Head, *, hidden: bool, weight: bool, bias: bool) -> None:
        self._head = head
        self.hidden = torch.zeros_like(head.hidden) if hidden else None
        self.weight = torch.zeros_like(head.weight, dtype=head.statistics) if weight else None
        self.bias = None
        if bias and head.bias is not None:
            self.bias = torch.zeros_like(head.bias, dtype=head.statistics)

    def results(self, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """As an operator returns them: in the leaves' dtypes, empty where not wanted."""
        hidden, weight, bias = self._head.hidden, self._head.weight, self._head.bias
        return (
            hidden.new_empty(0) if self.hidden is None else self.hidden,
            weight.new_empty(0, dtype=weight_dtype) if self.weight is None else self.weight.to(weight_dtype),
            weight.new_empty(0) if self.bias is None or bias is None else self.bias.to(bias.dtype),
        )


def fake_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wants_hidden: bool,
    wants_weight: bool,
    wants_bias: bool,
    weight_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `Gradients.results` has, without its values."""
    return (
        torch.empty_like(hidden) if wants_hidden else hidden.new_empty(0),
        torch.empty_like(weight, dtype=weight_dtype) if wants_weight else weight.new_empty(0, dtype=weight_dtype),
        torch.empty_like(bias) if wants_bias and bias is not None else weight.new_empty(0),
    )


class RowBlock:
    """The logits of a few edges over the whole vocabulary, each tile of them contiguous."""

    def __init__(
        self, head: Head, factors: Tensor, flat: Tensor, pieces: list[tuple[int, int]], work: Workspace
    ) -> None:
        """`factors`: `[rows, H]`, the block's hidden states in the products' dtype; `flat`: room for `rows · V` logits."""
        self.head, self.factors, self.pieces, self.work = head, factors, pieces, work
        self.rows = slice(0, factors.shape[0])
        self.flat = flat[: factors.shape[0] * pieces[-1][1]]
        count = factors.shape[0]
        self.tiles = [self.flat[count * start : count * stop].view(count, stop - start) for start, stop in pieces]

    def project(self, statistics: Statistics) -> None:
        """Make the logits, and find the highest and the targets'."""
        for z, tile in zip(self.tiles, self.head.tiles(self.pieces), strict=True):
            self.head.project(self.factors, tile, z, self.work)
            final = z if self.head.outer == 1.0 else torch.mul(z, self.head.outer, out=self.work("final", *z.shape))
            statistics.highest = statistics.raise_highest(final, self.rows, tile.start)[1]

    def exponentiate(self, statistics: Statistics) -> None:
        """Replace each logit by exp(z - highest), times the soft cap's derivative, and sum."""
        for z in self.tiles:
            bend = None
            if self.head.softcap is not None:
                bend = torch.mul(z, z, out=self.work("bend", *z.shape)).neg_().add_(1.0)
                z.mul_(self.head.outer)
            probability = statistics.add_exponentials(z.sub_(statistics.highest.unsqueeze(1)), self.rows, self.work)
            if bend is not None:
                torch.mul(probability, bend, out=z)
            elif probability is not z:
                z.copy_(probability)

    def subtract_at_targets(self, statistics: Statistics) -> None:
        """Subtract `total`, times the soft cap's derivative, at each target: what is left, over `total`, is minus the gradient of the log-probability."""
        amount = -statistics.total
        if self.head.softcap is not None:
            amount = amount * (1.0 - (statistics.chosen / self.head.outer).square())
        bounds = statistics.target.new_tensor(self.pieces)
        vocabulary = self.pieces[-1][1]
        here = (statistics.target >= 0) & (statistics.target < vocabulary)
        token = statistics.target.clamp(0, vocabulary - 1)
        start, stop = bounds[torch.searchsorted(bounds[:, 1].contiguous(), token, right=True)].unbind(1)
        count = self.factors.shape[0]
        place = count * start + torch.arange(count, device=token.device) * (stop - start) + token - start
        self.flat.scatter_add_(0, place, torch.where(here, amount, 0.0))

    def multiply(self, scale: Tensor, total: Tensor, gradients: Gradients) -> Tensor | None:
        """Add the products to the gradients; the block's gradient of hidden. `scale`: `[rows]`, that of the normalized probabilities."""
        exact = self.head.products == self.head.statistics
        # Probabilities that will be rounded are normalized before, so that they stay within the range of any dtype.
        of_rows = scale / total if exact else scale
        scaled = (self.factors * of_rows.unsqueeze(1)).to(self.head.products)
        found = None
        if gradients.hidden is not None:
            found = torch.zeros_like(self.factors, dtype=self.head.statistics)
        weights = self.head.tiles(self.pieces) if found is not None else iter([None] * len(self.pieces))
        for grad, (start, stop), tile in zip(self.tiles, self.pieces, weights, strict=True):
            factor = self.head.as_factor(grad if exact else grad.div_(total.unsqueeze(1)), self.work)
            if found is not None and tile is not None:
                add_product(found, factor, tile.weight)
            if gradients.weight is not None:
                add_product(gradients.weight[start:stop], factor.t(), scaled)
            if gradients.bias is not None:
                gradients.bias[start:stop].addmv_(grad.t(), of_rows)
        return None if found is None else found.mul_(of_rows.unsqueeze(1))


def _run_block(
    block: RowBlock, statistics: Statistics, edge_weight: Tensor, dft: bool, gradients: Gradients, group: str
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of the block and its gradient of hidden; adds the block's part of the other gradients."""
    block.project(statistics)
    statistics.join_highest(group)
    block.exponentiate(statistics)
    statistics.join_sums(block.pieces[-1][1], group)
    logprob = statistics.logprob()
    scale = edge_weight * block.head.slope
    if dft:
        scale = scale * logprob.exp()
    block.subtract_at_targets(statistics)
    return logprob, block.multiply(scale, statistics.total, gradients)


@torch.library.custom_op("trellium::weighted_nll", mutates_args=())
def weighted_nll(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    edge_weight: Tensor,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    first_token: int,
    group: str,
    dft: bool,
    wants_entropy: bool,
    wants_top1: bool,
    wants_hidden: bool,
    wants_weight: bool,
    wants_bias: bool,
    weight_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, log-probability, entropy, top-1, and the gradients of hidden, weight and bias for an incoming gradient of 1; empty where not wanted."""
    head = Head(hidden, weight, bias, temperature, logit_scale, softcap)
    gradients = Gradients(head, hidden=wants_hidden, weight=wants_weight, bias=wants_bias)
    (edges, width), vocabulary, itemsize = hidden.shape, weight.shape[0], head.statistics.itemsize
    held = hidden.nbytes if wants_hidden else 0
    edge_pieces, token_pieces = row_plan(edges, vocabulary, width, itemsize=itemsize, other_bytes=held)
    flat = hidden.new_empty(widest(edge_pieces) * vocabulary, dtype=head.statistics)
    work = Workspace(hidden, widest(edge_pieces) * widest(token_pieces), head.statistics)
    edge_weight = edge_weight.to(head.statistics)
    logprob = flat.new_zeros(edges)
    entropy = flat.new_zeros(edges if wants_entropy else 0)
    top1 = target.new_zeros(edges if wants_top1 else 0, dtype=torch.bool)
    for start, stop in edge_pieces if edges else ():
        rows = slice(start, stop)
        local = target[rows] - first_token
        statistics = Statistics(flat, local, lowest=head.lowest, moment=wants_entropy, first=wants_top1)
        block = RowBlock(head, hidden[rows].to(head.products), flat, token_pieces, work)
        logprob[rows], grad_rows = _run_block(block, statistics, edge_weight[rows], dft, gradients, group)
        if gradients.hidden is not None:
            gradients.hidden[rows] = reduce_sum(grad_rows, group) if grad_rows is not None else 0
        if wants_entropy:
            entropy[rows] = statistics.entropy()
        if statistics.first is not None:
            top1[rows] = statistics.first
    return (
        loss_of(logprob, edge_weight, dft=dft),
        logprob,
        entropy,
        top1,
        *gradients.results(weight_dtype),
    )


def loss_of(logprob: Tensor, edge_weight: Tensor, *, dft: bool) -> Tensor:
    """`-Σ edge_weight · logprob`, or with DFT `-Σ edge_weight · p · logprob`. An edge of weight 0 does not count, whatever its score."""
    scale = edge_weight * logprob.exp() if dft else edge_weight
    return -(logprob.masked_fill(edge_weight == 0, 0.0) * scale).sum()


@weighted_nll.register_fake
def _(  # type: ignore[no-untyped-def]
    hidden, weight, bias, target, edge_weight, temperature, logit_scale, softcap, first_token, group, dft,
    wants_entropy, wants_top1, wants_hidden, wants_weight, wants_bias, weight_dtype,
):  # fmt: skip
    edges = hidden.shape[0]
    logprob = hidden.new_empty(edges, dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32)
    return (
        logprob.new_empty(()),
        logprob,
        logprob.new_empty(edges if wants_entropy else 0),
        target.new_empty(edges if wants_top1 else 0, dtype=torch.bool),
        *fake_gradients(hidden, weight, bias, wants_hidden, wants_weight, wants_bias, weight_dtype),
    )


@torch.library.custom_op("trellium::scale_gradient", mutates_args=("gradient",))
def _scale_gradient(gradient: Tensor, factor: Tensor) -> None:
    """`gradient *= factor`: a gradient of the head's size is not copied."""
    gradient.mul_(factor)


@_scale_gradient.register_fake
def _(gradient, factor):  # type: ignore[no-untyped-def]
    return None


def save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """For an operator that returns a loss, other things, and last the gradients of its first three inputs."""
    ctx.save_for_backward(*output[-3:])
    ctx.inputs = len(inputs)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def give_gradients(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Any, ...]:
    """The saved gradients times the incoming one, in place."""
    found: list[Tensor | None] = [None] * ctx.inputs
    if grad_loss is None:
        return tuple(found)
    for place, gradient in enumerate(ctx.saved_tensors):
        if ctx.needs_input_grad[place]:
            _scale_gradient(gradient, grad_loss)
            found[place] = gradient
    return tuple(found)


weighted_nll.register_autograd(give_gradients, setup_context=save_gradients)
