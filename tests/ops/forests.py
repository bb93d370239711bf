"""Random forests, made in the plainest way: a parent for every token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor


@dataclass(frozen=True)
class Forest:
    """`subtree_end` and `position_ids`, `[R, L]` int64."""

    subtree_end: Tensor
    position_ids: Tensor

    def to(self, device) -> Forest:
        return Forest(self.subtree_end.to(device), self.position_ids.to(device))


def grow(*rows: list[int]) -> Forest:
    """A forest from each token's depth, in depth-first order: a token of depth d is a child of the last token before it of depth d - 1."""
    ends, positions = [], []
    for depths in rows:
        end = [len(depths)] * len(depths)
        for place, depth in enumerate(depths):
            for later in range(place + 1, len(depths)):
                if depths[later] <= depth:
                    end[place] = later
                    break
        ends.append(end)
        positions.append(depths)
    return Forest(torch.tensor(ends), torch.tensor(positions))


def chain_tree(*chains: tuple[int, int]) -> list[int]:
    """A row's depths from its chains: (depth at which each starts, its length)."""
    return [depth + step for depth, length in chains for step in range(length)]


@st.composite
def forests(draw, max_length: int = 24, max_rows: int = 3) -> Forest:
    """Any forest: rows of one length, each token as deep as its predecessor's child, or a child of any of its ancestors, or a new root."""
    length = draw(st.integers(1, max_length))
    rows = []
    for _ in range(draw(st.integers(1, max_rows))):
        depths = [0]
        for _ in range(length - 1):
            # Long chains are as likely as many branches.
            depths.append(draw(st.one_of(st.just(depths[-1] + 1), st.integers(0, depths[-1] + 1))))
        rows.append(depths)
    if draw(st.booleans()):
        rows = [rows[0]] * len(rows)
    return grow(*rows)
