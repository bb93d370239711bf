"""Scores of tokens without their logits.

`hidden @ weight.T` is never held: the vocabulary is walked in tiles (outer loop, so that a tile of the head is read and cast once)
and the edges in tiles (inner loop), each tile of logits lands in one reused work buffer and is folded at once into an online
log-sum-exp per edge. The backward makes each tile again, turns it into the tile's logit gradient in place, and adds two products.

Dtypes: products are made in `hidden`'s dtype (under autocast in autocast's; where the head is wider than `hidden`, in the head's);
every statistic and every accumulation is float32 (float64 where the products are). Weight gradients are accumulated per vocabulary
tile in float32 and rounded once to the head's dtype, so no float32 copy of the head's size exists.

Both directions are custom operators, so a compiled graph holds each as one node and its compilation does not grow with the vocabulary.

Cost: one product of 2·E·V·H operations forward, three backward (two when the head is frozen). Memory above inputs and gradients: two
tiles of logits forward, up to three backward (`TILE_BYTES` each), `[E, H]` for the gradient of `hidden`, and in low precision one `[tile, H]` of
weight gradient. The logits `[E, V]` exist nowhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

OUTPUTS = ("logprob", "entropy", "top1")
"""What `token_scores` can be asked for."""

TILE_BYTES = 8 << 20
"""The size of one work buffer: large enough for efficient products, small enough to stay near the cache."""

_EDGE_TILE = 2048
_VOCABULARY_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What the head says about `E` targets; a field is None if it was not asked for.

    Attributes:
        logprob: `[E]`, the target's log-probability; differentiable.
        entropy: `[E]`, entropy of the distribution over the vocabulary in nats; differentiable.
        top1: `[E]` bool, whether the target is the most likely token (the first of equals).
    """

    logprob: Tensor | None = None
    entropy: Tensor | None = None
    top1: Tensor | None = None


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    outputs: Sequence[str] = ("logprob",),
) -> TokenScores:
    """Score each target under `softmax(cap(logit_scale · (hidden @ weight.T + bias)) / temperature)`, `cap(z) = softcap · tanh(z / softcap)`.

    Args:
        hidden: `[E, H]`, the hidden state that predicts each target.
        weight: `[V, H]`, the output head. Nothing is computed for it when it is frozen.
        target: `[E]` int64 in `[0, V)`.
        bias: `[V]`; an entry of -inf takes its token out of the distribution.
        temperature: divides the logits last.
        logit_scale: multiplies the logits first.
        softcap: bounds the scaled logits softly, as Gemma 2 does.
        outputs: which of `OUTPUTS` to make; each costs only if asked for.

    Returns:
        `TokenScores` of `[E]` tensors in float32, or float64 where the products are float64.

    Raises:
        ValueError: shapes that do not fit, an unknown output, a temperature, scale or cap that is not usable.

    Source: online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867).
    """
    _check(hidden, weight, target, bias, temperature, logit_scale, softcap, outputs)
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    device_type = hidden.device.type
    if dtype != torch.float64 and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    logprob, entropy, top1, _, _ = _token_scores(
        hidden.to(dtype),
        weight,
        bias,
        target,
        float(temperature),
        float(logit_scale),
        softcap,
        "entropy" in outputs,
        "top1" in outputs,
    )
    found = {"logprob": logprob, "entropy": entropy, "top1": top1}
    return TokenScores(**{name: found[name] for name in outputs})


def _check(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    outputs: Sequence[str],
) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden must be [E, H] and weight [V, H], got {list(hidden.shape)} and {list(weight.shape)}")
    if target.shape != hidden.shape[:1]:
        raise ValueError(f"target must be [E] = [{hidden.shape[0]}], got {list(target.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [V] = [{weight.shape[0]}], got {list(bias.shape)}")
    if isinstance(outputs, str) or not outputs or not set(outputs) <= set(OUTPUTS):
        raise ValueError(f"outputs must name some of {OUTPUTS}, got {outputs!r}")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    if logit_scale == 0:
        raise ValueError("logit_scale must not be 0: every token would be equally likely")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be above 0, or None for none, got {softcap}")


def _even_split(length: int, target: int, alignment: int = 1) -> list[tuple[int, int]]:
    """Cut `[0, length)` into pieces of at most about `target`, equal to within `alignment`: no ragged last piece."""
    units = -(-length // alignment)
    pieces = max(1, -(-length // max(target, alignment)))
    bounds = [min(length, alignment * (piece * units // pieces)) for piece in range(pieces)] + [length]
    return list(itertools.pairwise(bounds))


class _LogitTiles:
    """The tiles of one head's logits, made on demand in a buffer that is overwritten by the next."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        logit_scale: float,
        softcap: float | None,
    ) -> None:
        self.hidden, self.weight, self.bias, self.softcap = hidden, weight, bias, softcap
        self.statistics_dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        # logits = outer · f(inner · (hidden @ weight.T + bias)), with f = tanh or nothing
        self.inner = logit_scale / temperature if softcap is None else logit_scale / softcap
        self.outer = 1.0 if softcap is None else softcap / temperature
        edges, vocabulary = hidden.shape[0], weight.shape[0]
        self.edge_tiles = _even_split(edges, _EDGE_TILE)
        widest = max(stop - start for start, stop in self.edge_tiles)
        columns = TILE_BYTES // (max(widest, 1) * self.statistics_dtype.itemsize)
        self.vocabulary_tiles = _even_split(vocabulary, columns, _VOCABULARY_ALIGNMENT)
        self._size = widest * max(stop - start for start, stop in self.vocabulary_tiles)
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, rows: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """A contiguous `[rows, columns]` view of the named work buffer, allocated when first asked for."""
        flat = self._buffers.get(name)
        if flat is None:
            flat = self._buffers[name] = self.hidden.new_empty(self._size, dtype=dtype or self.statistics_dtype)
        return flat[: rows * columns].view(rows, columns)

    def heads(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Each vocabulary tile: which tokens, its weights in the products' dtype, and its bias, scaled."""
        for start, stop in self.vocabulary_tiles:
            tile_bias = None
            if self.bias is not None:
                tile_bias = self.bias[start:stop].to(self.statistics_dtype) * self.inner
            yield slice(start, stop), self.weight[start:stop].to(self.hidden.dtype), tile_bias

    def logits(self, edges: slice, head: Tensor, tile_bias: Tensor | None) -> Tensor:
        """The logits of one tile in the statistics' dtype. With a soft cap they still lack the factor `outer`: they are tanh(·)."""
        rows = self.hidden[edges]
        z = self.buffer("z", rows.shape[0], head.shape[0])
        if rows.dtype == z.dtype:
            if tile_bias is None:
                torch.mm(rows, head.t(), out=z)
                if self.inner != 1.0:
                    z.mul_(self.inner)
            else:
                torch.addmm(tile_bias, rows, head.t(), alpha=self.inner, out=z)
        else:
            product = self.buffer("product", rows.shape[0], head.shape[0], rows.dtype)
            torch.mm(rows, head.t(), out=product)
            z.copy_(product)
            if self.inner != 1.0:
                z.mul_(self.inner)
            if tile_bias is not None:
                z.add_(tile_bias)
        return z if self.softcap is None else z.tanh_()


def _add_product(accumulator: Tensor, left: Tensor, right: Tensor) -> None:
    """`accumulator += left @ right`, the sum in the accumulator's dtype."""
    if accumulator.dtype == left.dtype:
        accumulator.addmm_(left, right)
    else:
        accumulator.add_(torch.mm(left, right))


@torch.library.custom_op("trellium::token_scores", mutates_args=())
def _token_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    wants_entropy: bool,
    wants_top1: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Log-probability, entropy and top-1 (empty where not wanted), and for the backward the highest logit and the logarithm of Σ exp(z - highest)."""
    tiles = _LogitTiles(hidden, weight, bias, temperature, logit_scale, softcap)
    lowest = torch.finfo(tiles.statistics_dtype).min
    edges = hidden.shape[0]
    highest = hidden.new_full((edges,), lowest, dtype=tiles.statistics_dtype)  # of the logits so far
    total = torch.zeros_like(highest)  # Σ exp(z - highest)
    chosen = torch.zeros_like(highest)  # the target's logit
    moment = torch.zeros_like(highest) if wants_entropy else None  # Σ exp(z - highest) · (z - highest)
    best = torch.zeros_like(target) if wants_top1 else None
    for columns, head, tile_bias in tiles.heads():
        width = head.shape[0]
        for start, stop in tiles.edge_tiles:
            rows = slice(start, stop)
            z = tiles.logits(rows, head, tile_bias)
            if tiles.outer != 1.0:
                z.mul_(tiles.outer)
            place = target[rows] - columns.start
            here = (place >= 0) & (place < width)
            value = z.gather(1, place.clamp(0, width - 1).unsqueeze(1)).squeeze(1)
            chosen[rows] = torch.where(here, value, chosen[rows])
            before = highest[rows]
            if best is None:
                peak = z.amax(dim=1)
            else:
                peak_place = z.argmax(dim=1)  # the first of equals
                peak = z.gather(1, peak_place.unsqueeze(1)).squeeze(1)
                best[rows] = torch.where(peak > before, peak_place + columns.start, best[rows])
            after = torch.maximum(before, peak)
            shift = (before - after).clamp_(min=lowest)
            shrink = shift.exp()
            z.sub_(after.unsqueeze(1))
            if moment is None:
                total[rows] = total[rows] * shrink + z.exp_().sum(dim=1)
            else:
                probability = torch.exp(z, out=tiles.buffer("p", stop - start, width))
                z.clamp_(min=lowest).mul_(probability)  # a logit of -inf counts 0, not 0 · inf
                moment[rows] = (moment[rows] + total[rows] * shift) * shrink + z.sum(dim=1)
                total[rows] = total[rows] * shrink + probability.sum(dim=1)
            highest[rows] = after
    log_total = total.log()
    # logprob from the shifted parts: with logits of 1e6 the normalizer has no digits left for log_total
    logprob = (chosen - highest) - log_total
    entropy = highest.new_empty(0) if moment is None else log_total - moment / total
    top1 = target.new_empty(0, dtype=torch.bool) if best is None else best == target
    return logprob, entropy, top1, highest, log_total


@_token_scores.register_fake
def _(hidden, weight, bias, target, temperature, logit_scale, softcap, wants_entropy, wants_top1):  # type: ignore[no-untyped-def]
    edges = hidden.shape[0]
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    statistic = hidden.new_empty(edges, dtype=dtype)
    return (
        statistic,
        hidden.new_empty(edges if wants_entropy else 0, dtype=dtype),
        target.new_empty(edges if wants_top1 else 0, dtype=torch.bool),
        torch.empty_like(statistic),
        torch.empty_like(statistic),
    )


@torch.library.custom_op("trellium::token_scores_backward", mutates_args=())
def _token_scores_backward(
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
    wants_hidden: bool,
    wants_weight: bool,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias, empty where not wanted; each tile of logits is made again."""
    tiles = _LogitTiles(hidden, weight, bias, temperature, logit_scale, softcap)
    lowest = torch.finfo(tiles.statistics_dtype).min
    # d logprob = 1[target] - p,  d entropy = -p · (log p + entropy); both times the slope of the logits
    slope = tiles.inner * tiles.outer
    of_target = None if grad_logprob is None else grad_logprob.to(tiles.statistics_dtype) * slope
    of_entropy = None if grad_entropy is None else grad_entropy.to(tiles.statistics_dtype) * slope
    grad_hidden = torch.zeros_like(hidden, dtype=tiles.statistics_dtype) if wants_hidden else None
    grad_weight = torch.empty_like(weight) if wants_weight else None
    grad_bias = torch.empty_like(bias) if wants_bias and bias is not None else None
    for columns, head, tile_bias in tiles.heads():
        width = head.shape[0]
        # Many hosts have no low-precision kernel for a row-major right factor and are ten times slower without one.
        right = head if head.dtype == tiles.statistics_dtype else head.t().contiguous().t()
        tile_grad_weight = None
        if grad_weight is not None:
            if weight.dtype == tiles.statistics_dtype:
                tile_grad_weight = grad_weight[columns].zero_()
            else:
                tile_grad_weight = torch.zeros_like(head, dtype=tiles.statistics_dtype)
        tile_grad_bias = None if grad_bias is None else grad_bias.new_zeros(width, dtype=tiles.statistics_dtype)
        for start, stop in tiles.edge_tiles:
            rows = slice(start, stop)
            z = tiles.logits(rows, head, tile_bias)
            bend = None
            if softcap is not None:  # the derivative of tanh
                bend = torch.mul(z, z, out=tiles.buffer("bend", stop - start, width)).neg_().add_(1.0)
                z.mul_(tiles.outer)
            z.sub_(highest[rows].unsqueeze(1)).sub_(log_total[rows].unsqueeze(1))  # log p
            if of_entropy is None:
                assert of_target is not None
                grad = z.exp_().mul_(-of_target[rows].unsqueeze(1))
            else:
                grad = torch.exp(z, out=tiles.buffer("p", stop - start, width))
                constant = of_entropy[rows] * entropy[rows]
                if of_target is not None:
                    constant = constant + of_target[rows]
                z.clamp_(min=lowest).mul_(-of_entropy[rows].unsqueeze(1)).sub_(constant.unsqueeze(1))
                grad.mul_(z)
            if of_target is not None:
                place = target[rows] - columns.start
                here = (place >= 0) & (place < width)
                addend = torch.where(here, of_target[rows], torch.zeros_like(of_target[rows]))
                grad.scatter_add_(1, place.clamp(0, width - 1).unsqueeze(1), addend.unsqueeze(1))
            if bend is not None:
                grad.mul_(bend)
            if tile_grad_bias is not None:
                tile_grad_bias.add_(grad.sum(dim=0))
            if grad.dtype != hidden.dtype:
                product = tiles.buffer("product", stop - start, width, hidden.dtype)
                grad = product.copy_(grad)
            if grad_hidden is not None:
                _add_product(grad_hidden[rows], grad, right)
            if tile_grad_weight is not None:
                _add_product(tile_grad_weight, grad.t(), hidden[rows])
        if grad_weight is not None and weight.dtype != tiles.statistics_dtype:
            grad_weight[columns] = tile_grad_weight
        if grad_bias is not None:
            grad_bias[columns] = tile_grad_bias
    return (
        hidden.new_empty(0) if grad_hidden is None else grad_hidden.to(hidden.dtype),
        weight.new_empty(0) if grad_weight is None else grad_weight,
        weight.new_empty(0) if grad_bias is None else grad_bias,
    )


@_token_scores_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    grad_logprob, grad_entropy, hidden, weight, bias, target, entropy, highest, log_total, temperature, logit_scale, softcap,
    wants_hidden, wants_weight, wants_bias,
):  # fmt: skip
    return (
        torch.empty_like(hidden) if wants_hidden else hidden.new_empty(0),
        torch.empty_like(weight) if wants_weight else weight.new_empty(0),
        torch.empty_like(bias) if wants_bias else weight.new_empty(0),
    )


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, target, *transform, _, _ = inputs
    _, entropy, top1, highest, log_total = output
    ctx.save_for_backward(hidden, weight, bias, target, entropy, highest, log_total)
    ctx.transform = transform
    ctx.mark_non_differentiable(top1, highest, log_total)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None, *_: None) -> tuple[Any, ...]:
    nothing = (None,) * 9
    if grad_logprob is None and grad_entropy is None:
        return nothing
    wanted = ctx.needs_input_grad[:3]
    grads = _token_scores_backward(grad_logprob, grad_entropy, *ctx.saved_tensors, *ctx.transform, *wanted)
    return (*(grad if want else None for grad, want in zip(grads, wanted, strict=True)), *nothing[3:])


_token_scores.register_autograd(_differentiate, setup_context=_save_for_backward)
