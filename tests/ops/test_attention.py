from __future__ import annotations

import torch

from trellium.ops.attention import forest_mask, rows_are_chains

# One row: tree 0-{1-2, 3} (token 0 with two branches, the first of two tokens), then a chain 4-5.
ENDS = torch.tensor([[4, 3, 3, 4, 6, 6]])
POSITIONS = torch.tensor([[0, 1, 2, 1, 0, 1]])


def test_a_token_sees_itself_and_its_ancestors_only():
    seen = [row.nonzero()[:, 0].tolist() for row in forest_mask(ENDS, POSITIONS)[0, 0]]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 3], [4], [4, 5]]


def test_a_window_counts_depth_not_distance_in_the_row():
    seen = [row.nonzero()[:, 0].tolist() for row in forest_mask(ENDS, POSITIONS, window=2)[0, 0]]
    assert seen == [[0], [0, 1], [1, 2], [0, 3], [4], [4, 5]]  # 3 sees 0: one step up, three places back


def test_the_mask_of_one_chain_is_causal():
    ends = torch.full((2, 5), 5)
    expected = torch.ones(5, 5, dtype=torch.bool).tril()
    assert (forest_mask(ends, torch.arange(5).expand(2, 5)) == expected).all()


def test_rows_are_chains_only_if_one_sequence_stands_at_the_left():
    assert rows_are_chains(torch.tensor([[3, 3, 3, 5, 5], [5, 5, 5, 5, 5], [1, 5, 5, 5, 5]]))
    assert not rows_are_chains(torch.tensor([[2, 2, 4, 4, 5]]))  # three chains
    assert not rows_are_chains(torch.tensor([[4, 3, 3, 4, 5]]))  # a branch
