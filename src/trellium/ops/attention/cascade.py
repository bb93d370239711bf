"""Attention over a forest as a cascade of dense blocks.

Forward: each block of the plan gives an output and the log-sum-exp of its logits. Two parts of one query are merged by those, as if
their keys had been asked at once: `out = out + sigmoid(lse' - lse) · (out' - out)`. A sink is a part with the value 0.

Backward: with the *final* output and log-sum-exp, a block's own gradients are exact, because the probability of a key is
exp(logit - lse) whatever block it is in; they are added up.

A block runs in PyTorch's flash kernel for the CPU, grouped heads and low precision included. A soft cap, values of another width than the keys, and
other devices take tiles of explicit logits of at most `TILE_BYTES`. So do large blocks of float32 on the host, a key's head at a time, where oneDNN
(`trellium.ops.products`) multiplies: 1.2 to 1.6 times as fast as the flash kernel, whose products are MKL's, from 2^17 logits a head on. The results of blocks
are rounded to the inputs' dtype, sums are made in float32 (float64 for float64).

Cost: the plan's pairs, which are the forest's, and about three passes over the queries of each merged block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trellium.ops.attention.plan import Block, plan_of
from trellium.ops.products import HAS_ONEDNN, product

TILE_BYTES = 16 << 20
"""The size of a tile of explicit logits."""
HOST_TILE_BYTES = 4 << 20
"""That of one that oneDNN multiplies: it is read again while it lies in the cache."""
LARGE_BLOCK = 1 << 17
LARGE_SQUARE = 1 << 19
"""Logits of a key's head in a block, and in a causal one, from which oneDNN's products are worth the calls."""

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
    if _goes_by_heads(query, key, rule, block):
        out = query.new_empty((*query.shape[:3], value.shape[3]))
        lse = query.new_empty(query.shape[:3])
        query, rule = query * rule.scale, replace(rule, scale=1.0)
        for asked, answering in _heads(query, key):
            parts = query[asked], key[answering], value[answering]
            out[asked], lse[asked] = _attend_by_tiles(*parts, rule, block, HOST_TILE_BYTES)
        return out, lse
    if _has_kernel(query, value, rule):
        mask = _additive_mask(query, rule, block)
        return _flash(query, key, value, 0.0, block.kind == "causal", attn_mask=mask, scale=rule.scale)
    return _attend_by_tiles(query, key, value, rule, block, TILE_BYTES)


def _attend_by_tiles(
    query: Tensor, key: Tensor, value: Tensor, rule: Rule, block: Block, tile_bytes: int
) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    for _, _, keys, logits in _logits(query, key, rule, block, tile_bytes):
        highest = logits.amax(-1, keepdim=True)
        weights = logits.sub_(highest).exp_()
        total = weights.sum(-1, keepdim=True)
        out = _times_shared(weights.to(value.dtype), value[:, :, keys].unsqueeze(2))
        outs.append(out.div_(total.to(out.dtype)).flatten(1, 2))
        lses.append(total.log_().add_(highest).squeeze(4).flatten(1, 2))
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _attend_backward(
    given: tuple[Tensor, Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor, rule: Rule, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    """One block's gradients. `given`: the gradient and the final output `[b, Hq, q, Dv]`, the final log-sum-exp `[b, Hq, q]`."""
    grad, out, lse = given
    if _goes_by_heads(query, key, rule, block):
        grads = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
        query, scale, rule = query * rule.scale, rule.scale, replace(rule, scale=1.0)
        for asked, answering in _heads(query, key):
            theirs = grad[asked], out[asked], lse[asked]
            parts = query[asked], key[answering], value[answering]
            found = _tiles_backward(theirs, *parts, rule, block, HOST_TILE_BYTES)
            for whole, where, part in zip(grads, (asked, answering, answering), found, strict=True):
                whole[where] = part
        grads[0].mul_(scale)
        return grads
    if _has_kernel(query, value, rule):
        mask = _additive_mask(query, rule, block)
        causal = block.kind == "causal"
        return _flash_backward(grad, query, key, value, out, lse, 0.0, causal, attn_mask=mask, scale=rule.scale)
    return _tiles_backward(given, query, key, value, rule, block, TILE_BYTES)


def _tiles_backward(
    given: tuple[Tensor, Tensor, Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Rule,
    block: Block,
    tile_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, out, lse = given
    grad_query = query.new_empty(query.shape, dtype=lse.dtype)
    grad_key = key.new_zeros(key.shape, dtype=lse.dtype)
    grad_value = value.new_zeros(value.shape, dtype=lse.dtype)
    groups = (key.shape[1], query.shape[1] // key.shape[1])
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(3, keepdim=True)
    for queries, asking, keys, logits in _logits(query, key, rule, block, tile_bytes):
        shift = lse[:, :, queries].unsqueeze(3).unflatten(1, groups)
        probability = torch.exp(logits - shift) if rule.softcap is not None else logits.sub_(shift).exp_()
        grads = grad[:, :, queries].unflatten(1, groups)
        grad_value[:, :, keys] += _summed_over_queries(probability.to(value.dtype), grads, lse.dtype)
        slope = _times_shared(grads, value[:, :, keys].unsqueeze(2).transpose(3, 4)).to(lse.dtype)
        slope = slope.sub_(delta[:, :, queries].unflatten(1, groups)).mul_(probability)
        if rule.scale != 1.0:
            slope.mul_(rule.scale)
        if rule.softcap is not None:
            bend = logits.div_(rule.softcap).square_().neg_().add_(1.0)
            # where a key is not seen, the logit is -inf and the probability 0
            slope = torch.where(probability > 0, slope.mul_(bend), 0.0)
        slope = slope.to(query.dtype)
        grad_query[:, :, queries] = _times_shared(slope, key[:, :, keys].unsqueeze(2)).flatten(1, 2)
        grad_key[:, :, keys] += _summed_over_queries(slope, asking, lse.dtype)
    return grad_query, grad_key, grad_value


def _logits(
    query: Tensor, key: Tensor, rule: Rule, block: Block, tile_bytes: int
) -> Iterator[tuple[slice, Tensor, slice, Tensor]]:
    """Tiles of a block: which queries, these as `[b, Hkv, G, q, D]`, which keys, and the logits `[b, Hkv, G, q, k]` in the statistics' dtype."""
    statistics = _statistics_dtype(query.dtype)
    batch, heads, count, _ = query.shape
    groups = (key.shape[1], heads // key.shape[1])
    size = max(16, tile_bytes // (batch * heads * block.keys * statistics.itemsize))
    if block.kind == "causal":
        size = min(size, max(64, count // 8))  # half of the last square of a tile is not seen
    for start in range(0, count, size):
        queries = slice(start, min(count, start + size))
        keys = slice(0, queries.stop if block.kind == "causal" else block.keys)
        asking = query[:, :, queries].unflatten(1, groups)
        logits = _times_shared(asking, key[:, :, keys].unsqueeze(2).transpose(3, 4)).to(statistics)
        if rule.scale != 1.0:
            logits.mul_(rule.scale)
        if rule.softcap is not None:
            logits = logits.div_(rule.softcap).tanh_().mul_(rule.softcap)
        doubtful = queries if block.kind == "causal" else keys  # what stands before the queries all of them see
        allowed = rule.allowed(block, queries, doubtful)
        if allowed is not None:
            logits[..., doubtful].masked_fill_(~allowed, -math.inf)
        yield queries, asking, keys, logits


def _goes_by_heads(query: Tensor, key: Tensor, rule: Rule, block: Block) -> bool:
    """Whether a block is multiplied by oneDNN, a key's head at a time: in float32 on the host, where it is large."""
    if not (HAS_ONEDNN and query.is_cpu and query.dtype == torch.float32 and torch.backends.mkldnn.enabled):
        return False
    logits = query.shape[1] // key.shape[1] * block.queries * block.keys
    return logits >= (LARGE_SQUARE if block.kind == "causal" else LARGE_BLOCK)


def _heads(query: Tensor, key: Tensor) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice]]]:
    """A key's head at a time: which queries ask it, and itself."""
    group = query.shape[1] // key.shape[1]
    for row in range(query.shape[0]):
        for head in range(key.shape[1]):
            rows = slice(row, row + 1)
            yield (rows, slice(head * group, (head + 1) * group)), (rows, slice(head, head + 1))


def _times_shared(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right`: `[b, H, G, m, k]` times `[b, H, 1, k, n]`."""
    if right.shape[:2] != (1, 1) or not HAS_ONEDNN:
        return left @ right
    return product(left.reshape(-1, left.shape[-1]), right[0, 0, 0]).view(*left.shape[:-1], right.shape[-1])


def _summed_over_queries(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Of `[b, H, G, q, k]` and `[b, H, G, q, D]`, multiplied over the queries of a group: `[b, H, k, D]`."""
    if right.shape[:2] != (1, 1) or not HAS_ONEDNN:
        return (left.transpose(3, 4) @ right).sum(2, dtype=dtype)
    queries = left.shape[2] * left.shape[3]
    return product(left.reshape(queries, -1).t(), right.reshape(queries, -1)).to(dtype)[None, None]
