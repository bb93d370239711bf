"""The shapes of a run: planned from its rows, compiled before step 0, and nothing compiled after that."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from datasets import Dataset

from tests.trainers.tiny_runs import losses, tiny_trainer, token_rows
from trellium import SFTTrainer
from trellium.data.samples import ReadTokens
from trellium.errors import ConfigError, ModelError
from trellium.forest.batch import Shape
from trellium.forest.collate import ForestCollator
from trellium.forest.step_cost import StepCost
from trellium.monitor import max_compiles
from trellium.trainers import run_plan
from trellium.trainers.row_sizes import sizes_of

STATIC = {"automatic_dynamic_shapes": False, "recompile_limit": 64}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    with torch._dynamo.config.patch(STATIC):
        yield
    torch.compiler.reset()


def rows_of(lengths: list[int]) -> Dataset:
    rows = [[2 + place % 60 for place in range(length)] for length in lengths]
    return Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in rows])


def compiled(folder, layout="padded", **options):
    return tiny_trainer(
        folder,
        torch_compile=True,
        torch_compile_backend="aot_eager",
        compile_regions="blocks",
        layout=layout,
        **options,
    )


def test_row_sizes_are_counted_from_selected_and_shuffled_rows():
    rows = token_rows(20)
    chosen = rows.shuffle(seed=1).select(range(3, 15))
    sizes = sizes_of(chosen, ForestCollator(0, read=ReadTokens()))
    assert sizes.longest.tolist() == [len(row["input_ids"]) for row in chosen]
    assert sizes.trained.tolist() == [sum(label != -100 for label in row["labels"]) for row in chosen]


def test_rows_that_were_not_planned_are_evaluated_and_told(tmp_path, caplog):
    trainer = compiled(tmp_path, train_dataset=rows_of([5] * 4), shapes=["8"], max_steps=1)
    trainer.train()
    metrics = trainer.evaluate(rows_of([4, 12]))
    assert metrics["eval_num_tokens"] == 16
    assert trainer.predict(rows_of([13])).metrics["test_num_tokens"] == 13
    assert "compiled after the warm-up, in evaluation" in caplog.text


def test_strict_shapes_need_shapes_that_are_compiled_ahead(tmp_path):
    with pytest.raises(ConfigError, match="strict_shapes=True, but no shapes are compiled before the run"):
        tiny_trainer(tmp_path, strict_shapes=True)


def test_twelve_lengths_on_a_plan_of_four_shapes_compile_four_graph_pairs(tmp_path):
    trainer = compiled(
        tmp_path,
        train_dataset=rows_of(list(range(5, 17))),
        shapes=["7", "10", "13", "16"],
        per_device_train_batch_size=1,
        max_steps=12,
    )
    with max_compiles(4) as graphs:
        trainer.train()
    assert len([record for record in graphs if record.kind == "forward"]) == 4
    assert len([record for record in graphs if record.kind == "backward"]) == 4


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch, "neuron"), reason="no neuron device")
def test_twelve_lengths_on_neuron_compile_four_graph_pairs_ahead_of_time_and_train_as_eager_does(tmp_path):
    options = {
        "train_dataset": rows_of(list(range(5, 17))),
        "use_cpu": False,
        "per_device_train_batch_size": 1,
        "max_steps": 12,
    }
    eager = tiny_trainer(tmp_path / "eager", **options)
    eager.train()
    trainer = tiny_trainer(tmp_path / "graphs", torch_compile=True, shapes=["7", "10", "13", "16"], **options)
    with max_compiles(4):
        trainer.train()
    assert losses(trainer) == pytest.approx(losses(eager), rel=1e-4)


@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_nothing_is_compiled_after_the_warm_up_whatever_batches_come(tmp_path, layout):
    options = {
        "train_dataset": rows_of([5, 6, 9, 9, 12, 16, 7, 8, 11, 13]),  # batches of 4: the last is of 2
        "eval_dataset": rows_of([4, 10, 15]),
        "eval_strategy": "steps",
        "eval_steps": 2,
        "max_steps": -1,
        "num_train_epochs": 2,
    }
    plain = tiny_trainer(tmp_path / "plain", layout="padded", **options)
    plain.train()
    shapes = {"padded": ["8", "16"], "shared": ["8", "16", "52"]}[layout]  # 52: four rows that share nothing
    trainer = compiled(tmp_path / "planned", layout, shapes=shapes, strict_shapes=True, **options)
    trainer.train()
    assert losses(trainer) == pytest.approx(losses(plain), rel=1e-5)
    evaluated = [
        [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry] for run in (plain, trainer)
    ]
    assert len(evaluated[0]) == 3
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-5)
    with max_compiles(0):
        trainer.evaluate()


def test_warming_up_changes_neither_weights_nor_random_numbers(tmp_path):
    trainer = compiled(tmp_path, train_dataset=rows_of([5, 9]), shapes=["8", "16"], max_steps=1)
    trainer.model_wrapped = trainer.model
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    state = torch.get_rng_state()
    trainer.run_begins()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_a_compilation_after_the_warm_up_is_an_error_where_shapes_are_strict(tmp_path):
    trainer = compiled(tmp_path, train_dataset=rows_of([5] * 4), shapes=["8"], strict_shapes=True, max_steps=2)
    trainer.data_collator = replace(trainer.data_collator, plan=None)
    with pytest.raises(ModelError, match=r"compiled after the warm-up, in step 1: .*was 8, is 5"):
        trainer.train()


def test_a_plan_of_more_shapes_than_the_recompile_limit_makes_room_for_them(tmp_path):
    lengths = list(range(5, 11))
    trainer = compiled(
        tmp_path, train_dataset=rows_of(lengths), shapes=[str(length) for length in lengths], max_steps=2
    )
    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=4, fail_on_recompile_limit_hit=True):
        with max_compiles(len(lengths)):
            trainer.train()
        assert torch._dynamo.config.recompile_limit >= len(lengths)


def test_given_lengths_must_hold_the_longest_row(tmp_path):
    with pytest.raises(ConfigError, match="row 1 has 9 tokens, the longest planned shape 8"):
        compiled(tmp_path, train_dataset=rows_of([5, 9]), shapes=["4", "8"])


def test_given_lengths_must_hold_a_whole_batch_where_it_is_one_row(tmp_path):
    with pytest.raises(ConfigError, match=r"a batch may have 14 tokens in its one row, the longest given shape 9\."):
        compiled(tmp_path, "packed", train_dataset=rows_of([5, 9]), shapes=["9"])


@pytest.mark.parametrize("shapes", ["bucket", [], ["0"], ["8", "x"]])
def test_unknown_shapes_are_refused(tmp_path, shapes):
    with pytest.raises(ConfigError, match="shapes must be one of auto, multiple, exact, or row lengths"):
        tiny_trainer(tmp_path, shapes=shapes)


@pytest.mark.skipif(not hasattr(torch, "neuron"), reason="no neuron device")
def test_shapes_are_planned_by_themselves_where_each_is_compiled_ahead(tmp_path, caplog):
    rows, held_out = rows_of([100, 200, 300, 400, 500] * 4), rows_of([130])
    options = {"train_dataset": rows, "eval_dataset": held_out, "use_cpu": False}
    trainer = tiny_trainer(tmp_path / "graphs", torch_compile=True, max_graphs=3, **options)
    assert trainer.plan is not None
    assert 2 <= len(trainer.plan.planned) <= 3
    assert "Planned shapes (seconds are estimates for this host)" in caplog.text
    assert tiny_trainer(tmp_path / "eager", **options).plan is None


@pytest.fixture
def graph_folder(tmp_path, monkeypatch):
    """An empty cache of compiled graphs."""
    monkeypatch.setenv("TORCH_NEURONX_NEFF_CACHE_DIR", str(tmp_path / "graphs"))


@pytest.mark.skipif(not hasattr(torch, "neuron"), reason="no neuron device")
def test_a_plan_prefers_what_the_cache_of_the_device_has(tmp_path, graph_folder, caplog, monkeypatch):
    cost = StepCost(token=1e-4, compile_seconds=20.0, load_seconds=1.0)
    monkeypatch.setattr(run_plan, "step_cost", lambda *_: cost)
    one_row = {"layout": "padded", "per_device_train_batch_size": 1, "max_steps": 200}

    def planned(**options) -> SFTTrainer:
        rows = rows_of([100, 200, 300, 400, 500])
        return tiny_trainer(tmp_path, train_dataset=rows, use_cpu=False, torch_compile=True, **{**one_row, **options})

    first = planned()
    assert [one.shape.length for one in first.plan.planned] == [512]  # less padding is worth 2 s, not 20
    assert not any(one.cached for one in first.plan.planned)
    for length in (256, 512, 640):
        with first.graphs.labelled(Shape(1, length, 1), evaluation=False):
            torch.compile(lambda x: x + 1, backend="neuron")(torch.zeros(length, device="neuron"))
    second = planned()
    assert {one.shape.length: one.cached for one in second.plan.planned} == {256: True, 512: True}
    assert "cached" in caplog.text
    assert (first.plan.compile_seconds, second.plan.compile_seconds) == (20, 2)
    for other in ({"gradient_checkpointing": False}, {"per_device_train_batch_size": 2}):
        assert not any(one.cached for one in planned(**other).plan.planned)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch, "neuron"), reason="no neuron device")
def test_the_next_run_plans_with_the_graphs_that_this_one_compiled_and_compiles_none(tmp_path, graph_folder):
    options = {
        "train_dataset": rows_of([100, 200, 120, 250] * 4),
        "eval_dataset": rows_of([90] * 4),
        "layout": "padded",
        "use_cpu": False,
        "torch_compile": True,
        "max_steps": 2,
    }
    first = tiny_trainer(tmp_path / "first", shapes="multiple", **options)
    first.train()
    torch.compiler.reset()
    torch.neuron.reset_dynamo_metrics()
    second = tiny_trainer(tmp_path / "second", **options)
    assert all(one.cached for one in second.plan.planned)
    second.train()
    assert torch.neuron.get_dynamo_metrics()["cache_misses"] == 0
    assert losses(second) == pytest.approx(losses(first), rel=1e-5)


def test_lengths_cannot_be_given_for_streamed_rows(tmp_path):
    streamed = rows_of([5, 9] * 4).to_iterable_dataset()
    with pytest.raises(ConfigError, match="shapes cannot be given for rows that are streamed"):
        tiny_trainer(tmp_path, train_dataset=streamed, shapes=["16"], max_steps=1)


@pytest.mark.skipif(not hasattr(torch, "neuron"), reason="no neuron device")
def test_streamed_rows_are_rounded_and_it_is_said(tmp_path, caplog):
    streamed = rows_of([5, 9] * 4).to_iterable_dataset()
    trainer = tiny_trainer(tmp_path, train_dataset=streamed, use_cpu=False, torch_compile=True, max_steps=1)
    assert trainer.plan is None
    assert "Their lengths are rounded up to multiples of 128" in caplog.text
