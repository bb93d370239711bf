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

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=10)
COSTS = st.builds(
    StepCost,
    fixed=st.floats(0, 10),
    token=st.floats(0, 1),
    pair=st.floats(0, 0.1),
    edge=st.floats(0, 1),
    compile_seconds=st.floats(0, 100),
)


def every_batch(lengths: list[int], rows: int) -> list[tuple[int, ...]]:
    """All batches that shuffling can make, each as likely as the others."""
    return list(itertools.combinations(lengths, min(rows, len(lengths))))


def seconds_of(lengths: tuple[int, ...], feed: Feed, step: int) -> float:
    """What a choice of row lengths costs, plainly: every possible batch takes the smallest length that holds it."""
    batches = every_batch(list(feed.lengths), feed.rows)

    def shape(length: int) -> Shape:
        fitting = sorted((row - 1 for row in feed.lengths if row <= length), reverse=True)[: feed.rows]
        edges = -(-max(sum(fitting), 1) // step) * step
        return Shape(feed.rows, length, min(edges, feed.rows * length))

    run = sum(feed.cost.step_seconds(shape(min(one for one in lengths if one >= max(batch)))) for batch in batches)
    return run * feed.batches / len(batches) + len(lengths) * feed.cost.compile_seconds


@settings(max_examples=150, deadline=None)
@given(
    lengths=LENGTHS, rows=st.integers(1, 3), cost=COSTS, graphs=st.integers(1, 4), step=st.sampled_from([1, 4, 8]),
    batches=st.integers(1, 50),
)  # fmt: skip
def test_no_choice_of_as_many_lengths_is_cheaper_than_the_plan(lengths, rows, cost, graphs, step, batches):
    """Against every choice there is."""
    feed = Feed(lengths, rows, batches, cost)
    plan = plan_shapes(feed, step=step, max_graphs=graphs)
    rounded = sorted({-(-length // step) * step for length in lengths})
    choices = [
        (*others, rounded[-1])
        for size in range(min(graphs, len(rounded)))
        for others in itertools.combinations(rounded[:-1], size)
    ]
    least = min(seconds_of(choice, feed, step) for choice in choices)
    assert len(plan.planned) <= graphs
    assert plan.compile_seconds + plan.run_seconds == pytest.approx(least, rel=1e-9, abs=1e-9)
    chosen = tuple(one.shape.length for one in plan.planned)
    assert seconds_of(chosen, feed, step) == pytest.approx(least, rel=1e-9, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, held_out=LENGTHS, cost=COSTS, graphs=st.integers(2, 5))
def test_graphs_are_shared_between_training_and_evaluation_in_the_best_way(lengths, held_out, cost, graphs):
    training, evaluation = Feed(lengths, 1, 100, cost), Feed(held_out, 2, 7, cost)
    plan = plan_shapes(training, evaluation, step=8, max_graphs=graphs)
    apart = [
        plan_shapes(training, step=8, max_graphs=k).planned
        + plan_shapes(evaluation, step=8, max_graphs=graphs - k).planned
        for k in range(1, graphs)
    ]
    least = min(sum(one.compile_seconds + one.run_seconds for one in planned) for planned in apart)
    assert plan.compile_seconds + plan.run_seconds == pytest.approx(least)
    assert {one.evaluation for one in plan.planned} == {False, True}
    assert all(one.shape.rows == (2 if one.evaluation else 1) for one in plan.planned)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=7), rows=st.integers(1, 3), step=st.sampled_from([1, 8])
)
def test_expected_batches_and_tokens_are_those_of_all_possible_batches(lengths, rows, step):
    plan = plan_shapes(Feed(lengths, rows, 12, StepCost()), shapes="multiple", step=step)
    batches = every_batch(lengths, rows)
    for one in plan.planned:
        taking = [batch for batch in batches if -(-max(batch) // step) * step == one.shape.length]
        assert one.batches == pytest.approx(12 * len(taking) / len(batches))
        assert one.real_tokens == pytest.approx(12 * sum(map(sum, taking)) / len(batches))


@settings(max_examples=60, deadline=None)
@given(
    rows_given=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=12), rows=st.integers(1, 4), data=st.data()
)  # fmt: skip
def test_every_batch_the_rows_can_make_finds_a_shape_a_partial_one_too(rows_given, rows, data):
    lengths = [length for length, _ in rows_given]
    trained = [min(count, length - 1) for length, count in rows_given]
    feed = Feed(lengths, rows, 10, StepCost(compile_seconds=3.0), trained=trained, terms=[2 * one for one in trained])
    plan = plan_shapes(feed, step=8, max_graphs=3)
    members = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=rows, unique=True))
    edges = sum(trained[row] for row in members)
    longest = max(lengths[row] for row in members)
    shape = plan.shape_for(longest, len(members), edges, 2 * edges)
    assert shape is not None
    assert shape.rows == rows
    assert shape == min((one.shape for one in plan.planned if one.shape.length >= longest), key=lambda s: s.length)
    assert plan.shape_for(longest, rows + 1) is None
    assert plan.shape_for(longest, len(members), evaluation=True) is None


def test_dear_compiling_makes_few_graphs_and_long_runs_make_many():
    lengths = list(range(1, 1025))
    cost = StepCost(token=1e-3, compile_seconds=20.0)
    counts = [len(plan_shapes(Feed(lengths, 1, batches, cost), max_graphs=16).planned) for batches in (10, 1000, 10**6)]
    assert counts == [1, 4, 8]


def test_a_measured_shape_costs_what_was_measured():
    seven = Shape(1, 8, 8)
    cost = StepCost.fit({seven: 7.0, Shape(1, 16, 16): 14.0}, {seven: 30.0, Shape(1, 16, 16): 50.0})
    assert cost.step_seconds(seven) == 7.0
    assert cost.compiling_seconds(seven) == 30.0
    assert cost.compiling_seconds(Shape(1, 24, 24)) == 40.0
    assert 14.0 < cost.step_seconds(Shape(1, 32, 32)) <= 60.0


def test_the_rates_of_a_linear_cost_are_found_again():
    true = StepCost(fixed=0.5, token=2e-3, pair=3e-6, edge=1e-3)
    shapes = [Shape(r, n, e) for r in (1, 4) for n in (128, 512, 2048) for e in (128, r * n)]
    found = StepCost.fit({shape: true.step_seconds(shape) for shape in shapes}, {})
    assert (found.fixed, found.token, found.pair, found.edge) == pytest.approx((0.5, 2e-3, 3e-6, 1e-3))


@settings(max_examples=60, deadline=None)
@given(seconds=st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_a_larger_shape_never_costs_less_whatever_was_measured(seconds):
    shapes = [Shape(1, 128 * (index + 1), 128) for index in range(len(seconds))]
    cost = StepCost.fit(dict(zip(shapes, seconds, strict=True)), {})
    assert min(cost.fixed, cost.token, cost.pair, cost.edge) >= 0
    assert cost.step_seconds(Shape(2, 2048, 256)) >= cost.step_seconds(Shape(2, 1024, 256)) > 0


def test_given_lengths_are_the_shapes_and_exact_ones_are_not_rounded():
    feed = Feed([3, 5, 9, 9], 1, 4, StepCost())
    plan = plan_shapes(feed, shapes=[12, 5, 100])
    assert [(one.shape.length, one.batches) for one in plan.planned] == [(5, 2.0), (12, 2.0), (100, 0.0)]
    assert [one.shape.length for one in plan_shapes(feed, shapes="exact").planned] == [3, 5, 9]
    assert [one.shape.length for one in plan_shapes(feed, shapes="multiple", step=4).planned] == [4, 8, 12]


def test_a_plan_explains_itself():
    feed = Feed([100, 100, 120, 250], 1, 8, StepCost(token=0.01, compile_seconds=2.0))
    plan = plan_shapes(feed, feed, max_graphs=4)
    lines = str(plan).splitlines()
    assert len(lines) == 2 + len(plan.planned) == 6
    assert lines[1].split() == ["1x128", "with", "128", "edges", "training", "6", "30.0%", "16.7%", "2.0", "7.7"]
    assert lines[3].split()[4] == "evaluation"
    assert lines[-1].split()[:4] == ["4", "graphs", "16", "100.0%"]
    assert plan.padding == pytest.approx(1 - 570 / (3 * 128 + 256))


@pytest.mark.parametrize(
    ("lengths", "options", "error", "message"),
    [
        ([5, 300], {"longest": 256}, DatasetError, "row 1 has 300 tokens, more than 256"),
        ([5, 300], {"shapes": [128, 256]}, ConfigError, "row 1 has 300 tokens, the longest of the given shapes 256"),
        ([5, 0], {}, DatasetError, "row 1 has no tokens"),
        ([], {}, DatasetError, "at least one row"),
        (
            [5],
            {"shapes": "quantile"},
            ConfigError,
            "must be 'auto', 'multiple', 'exact' or row lengths, got 'quantile'",
        ),
        ([5], {"shapes": []}, ConfigError, "row lengths must be numbers from 1"),
        ([5], {"max_graphs": 0}, ConfigError, "at least 1, got 128 and 0"),
        (
            [5],
            {"evaluation": Feed([5], 1, 1, StepCost()), "max_graphs": 1},
            ConfigError,
            "max_graphs must be at least 2",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(lengths, options, error, message):
    with pytest.raises(error, match=message):
        plan_shapes(Feed(lengths, 1, 10, StepCost()), **options)
    with pytest.raises(ValueError, match="trained must be one number a row, 1, got 2"):
        plan_shapes(Feed([5], 1, 10, StepCost(), trained=np.zeros(2)))
