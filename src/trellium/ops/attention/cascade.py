"""Attention over a forest as a cascade of dense blocks.

Forward: each block of the plan gives an output and the log-sum-exp of its logits. Two parts of one query are merged by those, as if
their keys had been asked at once: `out = out + sigmoid(lse' - lse) · (out' - out)`. A sink is a part with the value 0.

Backward: with the *final* output and log-sum-exp, a block's own gradients are exact, because the probability of a key is
exp(logit - lse) whatever block it is in; they are added up.

A block runs in PyTorch's flash kernel for the CPU, grouped heads and low precision included. A soft cap, values of another width than the keys, and
other devices take tiles of explicit logits of at most `TILE_BYTES`. The results of blocks are rounded to the inputs' dtype, sums are made in float32
(float64 for float64).

Cost: the plan's pairs, which are the forest's, and about three passes over the queries of each merged block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trellium.ops.attention.plan import Block, plan_of

TILE_BYTES = 16 << 20
"""The size of a tile of explicit logits."""

_FLASH_DEVICES = ("cpu", "neuron")
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True, slots=True)
class Rule:
    """Which keys a query sees and how a logit is made: `cap(scale · q·k)`, `cap(z) = softcap · tanh(z / softcap)`.

    `subtree_end` and `position_ids` are `[R, L]`; see `trellium.ops.attention.forest_attention`.
    """

    subtree_end: Tensor
    position_ids: Tensor
    scale: float
    window: int | None
    softcap: float | None

    def allowed(self, block: Block, queries: slice, keys: slice) -> Tensor | None:
        """`[queries, keys]` bool for a part of a block; None if all of it is allowed."""
        if block.kind == "full":
            return None
        device = self.subtree_end.device
        query = torch.arange(block.query + queries.start, block.query + queries.stop, device=device).unsqueeze(1)
        key = torch.arange(block.key + keys.start, block.key + keys.stop, device=device)
        if block.kind == "causal":
            return key <= query
        places = slice(block.key + keys.start, block.key + keys.stop)
        allowed = (key <= query) & (query < self.subtree_end[block.row, places])
        if self.window is not None:
            position = self.position_ids[block.row]
            asking = position[block.query + queries.start : block.query + queries.stop].unsqueeze(1)
            allowed &= asking - position[places] < self.window
        return allowed


def forward(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    """`[B, Hq, L, D]`, `[B, Hkv, L, D]`, `[B, Hkv, L, Dv]`, `[Hq]` → output `[B, L, Hq, Dv]` and log-sum-exp `[B, Hq, L]`, both contiguous."""
    query, key, value = _dense(query), _dense(key), _dense(value)
    plan = plan_of(rule.subtree_end, rule.position_ids, rule.window)
    statistics = _statistics_dtype(query.dtype)
    rows, heads, length, _ = query.shape
    out = query.new_empty(
        (rows, length, heads, value.shape[3]), dtype=statistics if plan.merges or sinks is not None else query.dtype
    )
    lse = query.new_empty((rows, heads, length), dtype=statistics)
    outs = out.transpose(1, 2)
    for block in plan.blocks:
        part, part_lse = _attend(*_inputs(query, key, value, block), rule, block)
        here, here_lse = _of_queries(outs, block), _of_queries(lse.unsqueeze(3), block)
        if block.opens:
            here.copy_(part)
            here_lse.copy_(part_lse.unsqueeze(3))
        else:
            part_lse = part_lse.unsqueeze(3)
            here.lerp_(part.to(statistics), torch.sigmoid(part_lse - here_lse))
            here_lse.copy_(torch.logaddexp(here_lse, part_lse))
    if sinks is not None:
        with_sink = torch.logaddexp(lse, sinks.to(statistics).view(1, -1, 1))
        outs.mul_(torch.exp(lse - with_sink).unsqueeze(3))
        lse = with_sink
    return out.to(query.dtype), lse


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key and value, contiguous as `[B, L, H, D]`, and of the sinks. `grad`, `out`: `[B, L, Hq, Dv]`."""
    query, key, value = _dense(query), _dense(key), _dense(value)
    plan = plan_of(rule.subtree_end, rule.position_ids, rule.window)
    statistics = _statistics_dtype(query.dtype)
    grads, outs, lses = _dense(grad.transpose(1, 2)), out.transpose(1, 2), lse.unsqueeze(3)
    grad_query = query.new_empty(_by_place(query), dtype=statistics)
    grad_key = key.new_zeros(_by_place(key), dtype=statistics)
    grad_value = value.new_zeros(_by_place(value), dtype=statistics)
    for block in plan.blocks:
        q, k, v = _inputs(query, key, value, block)
        given = _of_queries(grads, block), _of_queries(outs, block), _of_queries(lses, block).squeeze(3)
        part_query, part_key, part_value = _attend_backward(given, q, k, v, rule, block)
        here = _of_queries(grad_query.transpose(1, 2), block)
        if block.opens:
            here.copy_(part_query)
        else:
            here.add_(part_query)
        _of_keys(grad_key.transpose(1, 2), block).add_(part_key)
        _of_keys(grad_value.transpose(1, 2), block).add_(part_value)
    grad_sinks = None
    if sinks is not None:
        # The sink's value is 0, so its logit's gradient is -p · Σ grad · out.
        delta = (grads.to(statistics) * outs.to(statistics)).sum(3)
        probability = torch.exp(sinks.to(statistics).view(1, -1, 1) - lse)
        grad_sinks = (probability * delta).sum((0, 2)).neg_().to(sinks.dtype)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), grad_sinks


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _dense(tensor: Tensor) -> Tensor:
    """The kernels take any strides but the last."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _by_place(tensor: Tensor) -> tuple[int, int, int, int]:
    rows, heads, length, width = tensor.shape
    return rows, length, heads, width


def _inputs(query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    return _of_queries(query, block), _of_keys(key, block), _of_keys(value, block)


def _of_queries(tensor: Tensor, block: Block) -> Tensor:
    """A block's queries of `[B, H, L, D]`: a view `[rows or copies, H, queries, D]`."""
    return _view(tensor, block, block.query, block.queries)


def _of_keys(tensor: Tensor, block: Block) -> Tensor:
    return _view(tensor, block, block.key, block.keys)


def _view(tensor: Tensor, block: Block, start: int, count: int) -> Tensor:
    if block.copies == 1:
        return tensor[block.row : block.row + block.rows, :, start : start + count]
    run = tensor[block.row, :, start : start + count * block.copies]
    return run.unflatten(1, (block.copies, count)).transpose(0, 1)


def _has_kernel(query: Tensor, value: Tensor, rule: Rule) -> bool:
    return rule.softcap is None and query.shape[3] == value.shape[3] and query.device.type in _FLASH_DEVICES


def _additive_mask(query: Tensor, rule: Rule, block: Block) -> Tensor | None:
    if block.kind != "masked":
        return None
    allowed = rule.allowed(block, slice(0, block.queries), slice(0, block.keys))
    assert allowed is not None
    return query.new_zeros(allowed.shape).masked_fill_(~allowed, -math.inf)


def _attend(query: Tensor, key: Tensor, value: Tensor, rule: Rule, block: Block) -> tuple[Tensor, Tensor]:
    """One block's output `[b, Hq, q, Dv]` and log-sum-exp `[b, Hq, q]`."""
    if _has_kernel(query, value, rule):
        mask = _additive_mask(query, rule, block)
        return _flash(query, key, value, 0.0, block.kind == "causal", attn_mask=mask, scale=rule.scale)
    outs, lses = [], []
    for _, _, keys, logits in _logits(query, key, rule, block):
        lse = logits.logsumexp(-1, keepdim=True)
        probability = logits.sub_(lse).exp_().to(value.dtype)
        outs.append((probability @ value[:, :, keys].unsqueeze(2)).flatten(1, 2))
        lses.append(lse.squeeze(4).flatten(1, 2))
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _attend_backward(
    given: tuple[Tensor, Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor, rule: Rule, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    """One block's gradients. `given`: the gradient and the final output `[b, Hq, q, Dv]`, the final log-sum-exp `[b, Hq, q]`."""
    grad, out, lse = given
    if _has_kernel(query, value, rule):
        mask = _additive_mask(query, rule, block)
        causal = block.kind == "causal"
        return _flash_backward(grad, query, key, value, out, lse, 0.0, causal, attn_mask=mask, scale=rule.scale)
    grad_query = query.new_empty(query.shape, dtype=lse.dtype)
    grad_key = key.new_zeros(key.shape, dtype=lse.dtype)
    grad_value = value.new_zeros(value.shape, dtype=lse.dtype)
    groups = (key.shape[1], query.shape[1] // key.shape[1])
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(3, keepdim=True)
    for queries, asking, keys, logits in _logits(query, key, rule, block):
        probability = torch.exp(logits - lse[:, :, queries].unsqueeze(3).unflatten(1, groups))
        grads = grad[:, :, queries].unflatten(1, groups)
        of_value = probability.to(value.dtype).transpose(3, 4) @ grads
        grad_value[:, :, keys] += of_value.sum(2, dtype=lse.dtype)
        slope = (grads @ value[:, :, keys].unsqueeze(2).transpose(3, 4)).to(lse.dtype)
        slope = slope.sub_(delta[:, :, queries].unflatten(1, groups)).mul_(probability).mul_(rule.scale)
        if rule.softcap is not None:
            bend = logits.div_(rule.softcap).square_().neg_().add_(1.0)
            # where a key is not seen, the logit is -inf and the probability 0
            slope = torch.where(probability > 0, slope.mul_(bend), 0.0)
        slope = slope.to(query.dtype)
        grad_query[:, :, queries] = (slope @ key[:, :, keys].unsqueeze(2)).flatten(1, 2)
        grad_key[:, :, keys] += (slope.transpose(3, 4) @ asking).sum(2, dtype=lse.dtype)
    return grad_query, grad_key, grad_value


def _logits(query: Tensor, key: Tensor, rule: Rule, block: Block) -> Iterator[tuple[slice, Tensor, slice, Tensor]]:
    """Tiles of a block: which queries, these as `[b, Hkv, G, q, D]`, which keys, and the logits `[b, Hkv, G, q, k]` in the statistics' dtype."""
    statistics = _statistics_dtype(query.dtype)
    batch, heads, count, _ = query.shape
    groups = (key.shape[1], heads // key.shape[1])
    size = max(16, TILE_BYTES // (batch * heads * block.keys * statistics.itemsize))
    for start in range(0, count, size):
        queries = slice(start, min(count, start + size))
        keys = slice(0, queries.stop if block.kind == "causal" else block.keys)
        asking = query[:, :, queries].unflatten(1, groups)
        logits = (asking @ key[:, :, keys].unsqueeze(2).transpose(3, 4)).to(statistics).mul_(rule.scale)
        if rule.softcap is not None:
            logits = logits.div_(rule.softcap).tanh_().mul_(rule.softcap)
        allowed = rule.allowed(block, queries, keys)
        if allowed is not None:
            logits = logits.masked_fill_(~allowed, -math.inf)
        yield queries, asking, keys, logits
