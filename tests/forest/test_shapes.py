"""The plan of shapes: the best there is, by brute force; never too small for a batch; and told."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trellium.errors import ConfigError, DatasetError
from trellium.forest.batch import Shape
from trellium.forest.shapes import Feed, plan_shapes
from trellium.forest.step_cost import StepCost

COST = StepCost(fixed=0.5, token=1e-3, pair=1e-6, edge=1e-4, compile_seconds=20.0)


def seconds_of(plan) -> float:
    return plan.compile_seconds + plan.run_seconds


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    rows=st.integers(1, 3),
    batches=st.integers(1, 500),
    max_graphs=st.integers(1, 4),
    compile_seconds=st.floats(0, 5),
)
def test_the_plan_is_the_best_of_all_choices_of_lengths(lengths, rows, batches, max_graphs, compile_seconds):
    cost = StepCost(fixed=0.1, token=1e-3, compile_seconds=compile_seconds)
    feed = Feed(lengths, rows, batches, cost)
    rounded = sorted({-(-length // 8) * 8 for length in lengths})
    choices = (
        [*some, rounded[-1]]
        for size in range(min(max_graphs, len(rounded)))
        for some in itertools.combinations(rounded[:-1], size)
    )
    best = min(seconds_of(plan_shapes(feed, shapes=choice, step=8)) for choice in choices)
    plan = plan_shapes(feed, step=8, max_graphs=max_graphs)
    assert len(plan.planned) <= max_graphs
    assert seconds_of(plan) == pytest.approx(best)


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    rows=st.integers(1, 3),
    batches=st.integers(1, 500),
    max_graphs=st.integers(1, 4),
    cached=st.sets(st.integers(1, 12).map(lambda eighth: 8 * eighth)),
)
def test_the_plan_is_the_best_of_all_choices_among_the_lengths_of_rows_and_of_cached_graphs(
    lengths, rows, batches, max_graphs, cached
):
    cost = StepCost(
        fixed=0.1, token=1e-3, compile_seconds=5.0, in_cache=lambda shape: shape.length in cached, load_seconds=0.25
    )
    feed = Feed(lengths, rows, batches, cost)
    rounded = {-(-length // 8) * 8 for length in lengths}
    known = sorted(rounded | {length for length in cached if length <= 2 * max(rounded)})
    choices = (
        choice
        for size in range(1, min(max_graphs, len(known)) + 1)
        for choice in itertools.combinations(known, size)
        if choice[-1] >= max(lengths)
    )
    best = min(seconds_of(plan_shapes(feed, shapes=choice, step=8)) for choice in choices)
    plan = plan_shapes(feed, step=8, max_graphs=max_graphs)
    assert len(plan.planned) <= max_graphs
    assert seconds_of(plan) == pytest.approx(best)
    assert [one.cached for one in plan.planned] == [one.shape.length in cached for one in plan.planned]
    assert str(plan).count("cached") == sum(one.cached for one in plan.planned)


COSTS = st.builds(
    StepCost, fixed=st.floats(0, 10), token=st.floats(0, 1), pair=st.floats(0, 0.1), edge=st.floats(0, 1), compile_seconds=st.floats(0, 100)
)  # fmt: skip


def seconds_told_plainly(lengths: tuple[int, ...], feed: Feed, step: int) -> float:
    """What a choice of row lengths costs: every batch that shuffling can make, each as likely, takes the smallest length that holds it."""
    batches = list(itertools.combinations(feed.lengths, min(feed.rows, len(feed.lengths))))

    def seconds(length: int) -> float:
        dearest = sorted((row - 1 for row in feed.lengths if row <= length), reverse=True)[: feed.rows]
        edges = max(-(-sum(dearest) // step) * step, 1)
        return feed.cost.step_seconds(Shape(feed.rows, length, min(edges, feed.rows * length)))

    run = sum(seconds(min(length for length in lengths if length >= max(batch))) for batch in batches)
    return run * feed.batches / len(batches) + len(lengths) * feed.cost.compile_seconds


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=9), rows=st.integers(1, 3), cost=COSTS, max_graphs=st.integers(1, 4),
    step=st.sampled_from([1, 4, 8]), batches=st.integers(1, 50),
)  # fmt: skip
def test_no_choice_is_cheaper_by_a_reckoning_of_its_own(lengths, rows, cost, max_graphs, step, batches):
    """Neither the plan's expectations nor its sizes are used to judge it."""
    feed = Feed(lengths, rows, batches, cost)
    plan = plan_shapes(feed, step=step, max_graphs=max_graphs)
    rounded = sorted({-(-length // step) * step for length in lengths})
    least = min(
        seconds_told_plainly((*some, rounded[-1]), feed, step)
        for size in range(min(max_graphs, len(rounded)))
        for some in itertools.combinations(rounded[:-1], size)
    )
    chosen = tuple(one.shape.length for one in plan.planned)
    assert seconds_told_plainly(chosen, feed, step) == pytest.approx(least, rel=1e-9, abs=1e-9)
    assert seconds_of(plan) == pytest.approx(least, rel=1e-9, abs=1e-9)


def test_the_rates_of_a_linear_cost_are_found_again():
    shapes = [Shape(rows, length, edges) for rows in (1, 4) for length in (128, 512, 2048) for edges in (128, length)]
    found = StepCost.fit({shape: COST.step_seconds(shape) for shape in shapes}, {})
    assert (found.fixed, found.token, found.pair, found.edge) == pytest.approx((0.5, 1e-3, 1e-6, 1e-4))


@settings(max_examples=60, deadline=None)
@given(seconds=st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_a_larger_shape_never_costs_less_whatever_was_measured(seconds):
    shapes = [Shape(1, 128 * (index + 1), 128) for index in range(len(seconds))]
    cost = StepCost.fit(dict(zip(shapes, seconds, strict=True)), {})
    assert min(cost.fixed, cost.token, cost.pair, cost.edge) >= 0
    assert cost.step_seconds(Shape(2, 2048, 256)) >= cost.step_seconds(Shape(2, 1024, 256)) > 0


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    rows=st.integers(1, 4),
    max_graphs=st.integers(1, 3),
    sizes=st.lists(st.tuples(st.integers(1, 40), st.floats(0, 1)), min_size=1, max_size=15),
)
def test_every_batch_of_the_rows_fits_a_planned_shape(data, rows, max_graphs, sizes):
    lengths = np.asarray([length for length, _ in sizes])
    trained = np.asarray([int(share * (length - 1)) for length, share in sizes])
    plan = plan_shapes(Feed(lengths, rows, 10, COST, trained), step=4, max_graphs=max_graphs)
    drawn = data.draw(st.lists(st.sampled_from(range(len(sizes))), min_size=1, max_size=rows, unique=True))
    shape = plan.shape_for(int(lengths[drawn].max()), len(drawn), int(trained[drawn].sum()))
    assert shape is not None
    assert shape.rows == rows  # a partial batch is filled up
    assert shape.length >= lengths[drawn].max()


def test_how_often_a_batch_is_as_long_follows_from_the_rows():
    lengths = [4, 4, 8, 12]
    plan = plan_shapes(Feed(lengths, 2, 600, COST), shapes="multiple", step=4)
    pairs = list(itertools.combinations(lengths, 2))
    for one in plan.planned:
        held = [pair for pair in pairs if max(pair) == one.shape.length]
        assert one.batches == pytest.approx(600 * len(held) / len(pairs))
        assert one.real_tokens == pytest.approx(600 * sum(map(sum, held)) / len(pairs))


def test_training_and_evaluation_share_the_graphs_in_the_best_way():
    training = Feed([10, 100, 200, 400] * 5, 1, 10_000, COST)
    evaluation = Feed([10, 400], 1, 1, COST)
    plan = plan_shapes(training, evaluation, step=1, max_graphs=5)
    assert [one.shape.length for one in plan.planned if not one.evaluation] == [10, 100, 200, 400]
    assert [one.shape.length for one in plan.planned if one.evaluation] == [400]
    assert plan.shape_for(50, 1, evaluation=True) == Shape(1, 400, 399)
    with pytest.raises(ConfigError, match="max_graphs must be at least 2, got 1"):
        plan_shapes(training, evaluation, max_graphs=1)


def test_a_short_run_compiles_less_than_a_long_one():
    lengths = list(range(16, 1024, 16))
    graphs = [
        len(plan_shapes(Feed(lengths, 1, batches, COST), step=16, max_graphs=16).planned) for batches in (10, 10_000)
    ]
    assert graphs[0] == 1 < graphs[1]


def test_a_measured_shape_keeps_its_measure():
    slow = Shape(1, 8, 8)
    cost = StepCost.fit({Shape(1, 16, 16): 1.6, slow: 0.8, Shape(2, 16, 32): 3.2}, {slow: 30.0})
    assert cost.step_seconds(slow) == 0.8
    assert cost.step_seconds(Shape(1, 32, 32)) > 1.6
    assert cost.compiling_seconds(slow) == cost.compiling_seconds(Shape(1, 16, 16)) == 30.0


def test_the_table_names_every_shape_and_the_padding():
    plan = plan_shapes(Feed([3, 8], 1, 10, COST), shapes=[4, 8], step=4)
    table = str(plan)
    assert "1x4 with 4 edges" in table
    assert "1x8 with 8 edges" in table
    assert "2 graphs" in table
    assert plan.padding == pytest.approx(1 - (3 + 8) / (4 + 8))


@pytest.mark.parametrize(
    ("lengths", "options", "error", "told"),
    [
        ([], {}, DatasetError, "there are none"),
        ([4, 0], {}, DatasetError, "row 1 has no tokens"),
        ([4, 9], {"longest": 8}, DatasetError, "row 1 has 9 tokens, more than the 8"),
        ([4, 9], {"shapes": [4, 8]}, ConfigError, "row 1 has 9 tokens, the longest planned shape 8"),
        ([4], {"shapes": []}, ConfigError, "at least one of them"),
        ([4], {"shapes": "bucket"}, ConfigError, "shapes must be 'auto'"),
        ([4], {"step": 0}, ConfigError, "must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_planned_is_said(lengths, options, error, told):
    with pytest.raises(error, match=told):
        plan_shapes(Feed(lengths, 1, 10, COST), **options)
