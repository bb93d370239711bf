from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trellium.forest.balance import balance, divide_step


@settings(max_examples=150, deadline=None)
@given(costs=st.lists(st.integers(0, 1000), min_size=1, max_size=40), ranks=st.integers(1, 6))
def test_ranks_have_as_many_rows_and_differ_in_cost_by_less_than_a_row(costs, ranks):
    rank = balance(costs, ranks)
    counts = np.bincount(rank, minlength=ranks)
    assert counts.max() - counts.min() <= 1
    whole = len(costs) // ranks * ranks  # the last, partial block of the cheapest rows comes on top
    ordered = sorted(costs, reverse=True)
    loads = np.bincount(rank, costs, minlength=ranks)
    blocks = [ordered[begin : begin + ranks] for begin in range(0, whole, ranks)]
    widest = max([block[0] - block[-1] for block in blocks] + [ordered[whole] if whole < len(costs) else 0])
    assert loads.max() - loads.min() <= widest


@settings(max_examples=150, deadline=None)
@given(
    ranks=st.integers(1, 5),
    micro_batches=st.integers(1, 4),
    rows=st.integers(1, 5),
    costs=st.randoms(use_true_random=False),
)
def test_a_step_dealt_out_has_each_row_once_and_ranks_differ_by_less_than_a_row(ranks, micro_batches, rows, costs):
    cost = np.asarray([costs.randint(0, 1000) for _ in range(ranks * micro_batches * rows)])
    dealt = divide_step(cost, ranks=ranks, micro_batches=micro_batches)
    assert dealt.shape == (micro_batches, ranks, rows)
    assert sorted(dealt.ravel().tolist()) == list(range(len(cost)))
    assert (np.diff(dealt, axis=2) > 0).all()
    of_ranks = cost[dealt].sum(axis=(0, 2))
    ordered = np.sort(cost)[::-1].reshape(-1, ranks)
    assert of_ranks.max() - of_ranks.min() <= (ordered[:, 0] - ordered[:, -1]).max()


def test_ranks_and_micro_batches_of_conversations_are_nearly_even_where_those_in_order_are_not():
    random = np.random.default_rng(0)
    costs = np.minimum(random.lognormal(7, 0.8, (200, 4 * 2 * 8)), 4096)  # cut at max_length
    spread = {"order": [], "dealt": []}
    for step in costs:
        dealt = divide_step(step, ranks=4, micro_batches=2)
        in_order = np.arange(len(step)).reshape(2, 4, 8)
        for way, rows in (("order", in_order), ("dealt", dealt)):
            batches = step[rows].sum(axis=2)
            spread[way].append((batches.sum(0).max() / batches.sum(0).mean(), batches.max() / batches.mean()))
    ranks, batches = np.mean(spread["dealt"], axis=0)
    assert ranks < 1.01
    assert batches < 1.05
    assert (np.mean(spread["order"], axis=0) > (1.15, 1.3)).all()
