"""Which rows of an optimizer step go together, where that does not change it.

The loss of a step is one sum over all of its rows, whichever process and micro-batch each is in. So the rows may be dealt out by what they cost: processes
are done at the same time, and micro-batches laid in one row are nearly as long as each other, so that fewer planned lengths hold them with less padding.
Cost: a sort.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import numpy as np


def balance(costs: Ordered[float] | np.ndarray, parts: int) -> np.ndarray:
    """`[n]` int64, the part of each row, such that parts have as many rows, to one, and nearly the same cost.

    By blocks of `parts` rows in descending cost, the dearest of a block to the part with the least so far. Two parts then differ by no more than the
    largest difference within a block, where a row that is missing costs nothing: their difference before is turned against the block's, and so stays
    within the larger of the two.

    Args:
        costs: `[n]`, what each row costs.
        parts: how many share them.
    """
    cost = np.asarray(costs, dtype=np.float64)
    descending = np.argsort(-cost, kind="stable")
    part = np.empty(len(cost), dtype=np.int64)
    load = np.zeros(parts)
    for begin in range(0, len(cost), parts):
        block = descending[begin : begin + parts]
        least = np.argsort(load, kind="stable")[: len(block)]
        part[block] = least
        load[least] += cost[block]
    return part


def divide_step(costs: Ordered[float] | np.ndarray, *, ranks: int, micro_batches: int) -> np.ndarray:
    """The rows of an optimizer step, dealt out: `[micro_batches, ranks, n / (micro_batches · ranks)]` int64, ascending within a batch.

    Blocks of `ranks` rows that cost much the same give each rank one; blocks are then dealt to the micro-batches. So what ranks do in the whole step is
    balanced as by `balance`, and in each micro-batch they meet rows of the same blocks.

    Args:
        costs: `[n]`, what each row costs; `n` is a multiple of `micro_batches · ranks`.
        ranks: how many processes share the step.
        micro_batches: how many batches each of them has in it.
    """
    cost = np.asarray(costs, dtype=np.float64)
    descending = np.argsort(-cost, kind="stable")
    blocks = np.empty((len(cost) // ranks, ranks), dtype=np.int64)
    place = np.empty(len(cost), dtype=np.int64)
    place[descending] = np.arange(len(cost))
    blocks[place // ranks, balance(cost, ranks)] = np.arange(len(cost))
    batch = balance(cost[blocks].sum(axis=1), micro_batches)
    return np.sort(blocks[np.argsort(batch, kind="stable")].reshape(micro_batches, -1, ranks).swapaxes(1, 2), axis=2)


def deal(rows: np.ndarray, costs: np.ndarray, *, batch: int, ranks: int) -> np.ndarray:
    """The rows of a step in the order in which its batches are read: the first batch of each rank, the second of each, and so on.

    Args:
        rows: `[n]` int64, as the sampler drew them. Whole rounds of `ranks` batches are dealt out; what is left over stays behind them, in its order.
        costs: by row of the dataset.
        batch: rows of a batch.
    """
    whole = len(rows) // (batch * ranks) * batch * ranks
    if not whole:
        return rows
    dealt = divide_step(costs[rows[:whole]], ranks=ranks, micro_batches=whole // (batch * ranks))
    return np.concatenate([rows[dealt.ravel()], rows[whole:]])
