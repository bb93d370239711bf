"""Cut the attention of a forest into dense blocks: who asks whom, as rectangles of places.

A *chain* is a longest run of tokens with one `subtree_end`: what lies between two branchings. All that descends from it stands in one run behind it,
so that a row needs, without a gather,

- a causal block for every chain, and
- one unmasked block for every chain that branches: all of its descendants ask all of its tokens.

Together that is the forest's own area and nothing more. Two things bend the rule where it pays: neighbours so small that a call costs more than their
area share one masked block, and equal leaves in a row, or equal rows, share one call. Under a sliding window a chain that is longer than the window is
cut into tiles of queries, and each asks what is in its reach, along its path to the root.

Cost: numpy over the tokens and Python over the chains; a few milliseconds for a thousand chains. A batch is planned once for all layers and both
directions: plans are kept by the content of what they were made from, so that nothing can go stale.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

CALL = 1600
"""What a call of an attention kernel costs beyond its work, in query-key pairs: some 20 us at about 10 ns a pair (8 heads of 64)."""

WINDOW_TILE = 256
"""How many queries ask at once where a window moves with them."""

Kind = Literal["causal", "full", "masked"]


@dataclass(frozen=True, slots=True)
class Block:
    """Queries `[query, query + queries)` ask keys `[key, key + keys)` of rows `[row, row + rows)`.

    Attributes:
        kind: `causal`: the ranges are equal and each query sees itself and what stands before it; `full`: everything; `masked`: by `forest_mask`,
            under which each query sees at least one of the keys.
        copies: the block that many times, one behind the other; above 1 only for causal blocks of one row.
        opens: whether it is the first block of its queries; what comes later is merged into it.
    """

    row: int
    query: int
    queries: int
    key: int
    keys: int
    kind: Kind
    opens: bool
    rows: int = 1
    copies: int = 1

    @property
    def pairs(self) -> int:
        """The query-key pairs it computes."""
        pairs = self.queries * (self.queries + 1) // 2 if self.kind == "causal" else self.queries * self.keys
        return pairs * self.rows * self.copies


@dataclass(frozen=True, slots=True)
class Plan:
    """The blocks of a batch, in an order in which every query is opened before it is merged.

    Attributes:
        blocks: together they hold every pair of the mask once.
        merges: whether some query is in more than one block.
    """

    blocks: tuple[Block, ...]
    merges: bool


def plan_of(subtree_end: Tensor, position_ids: Tensor, window: int | None) -> Plan:
    """The plan of a batch, made now or found again; see `make_plan`. Waits for the device if the tensors are not on the host."""
    ends = subtree_end.cpu()
    positions = None if window is None else position_ids.cpu()
    for known_ends, known_positions, known_window, plan in tuple(_PLANS):
        if known_window == window and torch.equal(known_ends, ends) and _equal(known_positions, positions):
            return plan
    plan = make_plan(ends.numpy(), None if positions is None else positions.numpy(), window)
    _PLANS.appendleft((ends.clone(), None if positions is None else positions.clone(), window, plan))
    return plan


def _equal(left: Tensor | None, right: Tensor | None) -> bool:
    return left is right or (left is not None and right is not None and torch.equal(left, right))


_PLANS: deque[tuple[Tensor, Tensor | None, int | None, Plan]] = deque(maxlen=16)


def make_plan(subtree_end: np.ndarray, position_ids: np.ndarray | None, window: int | None) -> Plan:
    """Plan `[R, L]` int64 arrays that obey the laws of a forest (`trellium.forest.layout.check`).

    Args:
        subtree_end: one past the last descendant of each token.
        position_ids: each token's depth; only needed with a window.
        window: how many tokens a token sees at most, itself among them; None for all.
    """
    blocks: list[Block] = []
    rows = len(subtree_end)
    row = 0
    while row < rows:
        same = row + 1
        while same < rows and np.array_equal(subtree_end[same], subtree_end[row]):
            same += 1
        found = _row_blocks(subtree_end[row], None if position_ids is None else position_ids[row], window)
        for block in found:
            if block.copies == 1:
                blocks.append(replace(block, row=row, rows=same - row))
            else:
                blocks.extend(replace(block, row=each) for each in range(row, same))
        row = same
    blocks.sort(key=lambda block: not block.opens)
    return Plan(tuple(blocks), merges=any(not block.opens for block in blocks))


@dataclass(slots=True)
class _Unit:
    """A run of places that asks itself: one chain, small neighbours under one mask, or a chain with units behind it."""

    start: int
    stop: int
    cost: float
    kind: Literal["chain", "masked", "tree"]
    branch: int = 0  # where the chain of a tree ends
    children: Sequence[_Unit] = ()


def _row_blocks(ends: np.ndarray, positions: np.ndarray | None, window: int | None) -> list[Block]:
    """The blocks of one row, as row 0."""
    starts = np.flatnonzero(np.r_[True, ends[1:] != ends[:-1]])
    stops = np.r_[starts[1:], len(ends)]
    chains = list(zip(starts.tolist(), stops.tolist(), ends[starts].tolist(), strict=True))
    blocks: list[Block] = []
    reach = _Reach(chains, positions, window) if window is not None and positions is not None else None
    for unit in _walk(_merged(_units(chains))):
        if unit.kind == "masked":
            size = unit.stop - unit.start
            blocks.append(Block(0, unit.start, size, unit.start, size, "masked", True))
            continue
        stop = unit.branch if unit.kind == "tree" else unit.stop
        if reach is None or reach.holds(unit.start, stop):
            size = stop - unit.start
            blocks.append(Block(0, unit.start, size, unit.start, size, "causal", True))
        else:
            blocks.extend(reach.own_tiles(unit.start, stop))
        if unit.kind != "tree":
            continue
        if reach is None or reach.holds(unit.start, unit.stop):
            blocks.append(Block(0, stop, unit.stop - stop, unit.start, stop - unit.start, "full", False))
        else:
            blocks.extend(reach.tiles_behind(unit.start, stop, unit.stop))
    return _batched(blocks)


def _units(chains: list[tuple[int, int, int]]) -> list[_Unit]:
    """The trees of a row, each as the cheapest unit found; bottom-up, from the last chain to the first."""
    finished: list[_Unit] = []  # the leftmost last
    for start, branch, stop in reversed(chains):
        length = branch - start
        children = []
        while finished and finished[-1].start < stop:
            children.append(finished.pop())
        cost = length * length / 2 + CALL
        if not children:
            finished.append(_Unit(start, stop, cost, "chain"))
            continue
        children = _merged(children)
        cost += length * (stop - branch) + CALL + sum(child.cost for child in children)
        if _masked_cost(stop - start) <= cost:
            finished.append(_Unit(start, stop, _masked_cost(stop - start), "masked"))
        else:
            finished.append(_Unit(start, stop, cost, "tree", branch, children))
    return finished[::-1]


def _merged(siblings: list[_Unit]) -> list[_Unit]:
    """Neighbours put under one mask wherever that costs less than calling twice."""
    units: list[_Unit] = []
    for unit in siblings:
        if units:
            cost = _masked_cost(unit.stop - units[-1].start)
            if cost <= units[-1].cost + unit.cost:
                units[-1] = _Unit(units[-1].start, unit.stop, cost, "masked")
                continue
        units.append(unit)
    return units


def _masked_cost(length: int) -> float:
    return length * length + CALL


def _walk(units: list[_Unit]) -> Iterator[_Unit]:
    """All units, each before its children, from left to right; without recursion, because trees may be deep."""
    pending = units[::-1]
    while pending:
        unit = pending.pop()
        yield unit
        pending.extend(reversed(unit.children))


def _batched(blocks: list[Block]) -> list[Block]:
    """Equal causal blocks that stand one behind the other, in one call."""
    found: list[Block] = []
    behind: dict[int, int] = {}  # the place at which a causal block ends -> its index in `found`
    for block in blocks:
        if block.kind == "causal" and block.opens:
            index = behind.pop(block.query, None)
            if index is not None and found[index].queries == block.queries:
                found[index] = replace(found[index], copies=found[index].copies + 1)
            else:
                index = len(found)
                found.append(block)
            behind[block.query + block.queries] = index
        else:
            found.append(block)
    return found


class _Reach:
    """What a window lets the tokens of one row see."""

    def __init__(self, chains: list[tuple[int, int, int]], positions: np.ndarray, window: int) -> None:
        self.window = window
        self.positions = positions
        self.starts = np.asarray([chain[0] for chain in chains])
        self.stops = np.asarray([chain[1] for chain in chains])

    def holds(self, start: int, stop: int) -> bool:
        """Whether everything in `[start, stop)` sees the token at `start`."""
        return int(self.positions[start:stop].max()) - int(self.positions[start]) < self.window

    def own_tiles(self, start: int, stop: int) -> Iterator[Block]:
        """A chain's blocks with itself."""
        for query in range(start, stop, WINDOW_TILE):
            end = min(stop, query + WINDOW_TILE)
            key = max(start, query - self.window + 1)
            yield Block(0, query, end - query, key, end - key, "masked", True)

    def tiles_behind(self, start: int, branch: int, stop: int) -> Iterator[Block]:
        """The blocks of what descends from the chain `[start, branch)`, up to `stop`, with the chain."""
        last = int(self.positions[branch - 1])
        first, end = np.searchsorted(self.starts, (branch, stop))
        # Descendants out of reach ask nothing, and one that begins in reach may end out of it.
        near = np.flatnonzero(self.positions[self.starts[first:end]] - last < self.window) + first
        for chain in near.tolist():
            chain_start = int(self.starts[chain])
            depth = int(self.positions[chain_start])
            chain_stop = min(int(self.stops[chain]), chain_start + last + self.window - depth)
            for query in range(chain_start, chain_stop, WINDOW_TILE):
                query_stop = min(chain_stop, query + WINDOW_TILE)
                oldest = depth + query - chain_start - self.window + 1  # the least position that the first query sees
                key = max(start, branch - 1 - (last - oldest))
                sees_all = int(self.positions[query_stop - 1]) - int(self.positions[key]) < self.window
                kind: Kind = "full" if sees_all else "masked"
                yield Block(0, query, query_stop - query, key, branch - key, kind, False)
