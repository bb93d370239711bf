"""A trainer whose model is compiled: the same losses, and a record of what was compiled in its logs."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from tests.trainers.tiny_runs import losses, tiny_trainer, token_rows
from trellium.errors import ConfigError
from trellium.monitor import max_compiles
from trellium.monitor.compile_limit import TooManyCompiles


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_steps_that_compiled_are_left_out_of_the_steady_rate_and_counted(tmp_path):
    rows = token_rows(8, shortest=12, longest=12).map(lambda row: {"labels": row["input_ids"]})  # one shape
    options = {"train_dataset": rows, "gradient_checkpointing": False, "per_device_train_batch_size": 2}
    plain = tiny_trainer(tmp_path / "plain", **options)
    plain.train()
    compiled = tiny_trainer(
        tmp_path / "compiled", torch_compile=True, torch_compile_backend="aot_eager", pad_to_multiple_of=4, **options
    )
    compiled.train()
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-5)
    logged = [entry for entry in compiled.state.log_history if "loss" in entry]
    assert logged[0]["compile/graphs"] >= 2  # forward and backward
    assert logged[0]["compile/seconds"] > 0
    assert "steady_tokens_per_second" not in logged[0]
    assert logged[-1]["compile/graphs"] == logged[0]["compile/graphs"]
    assert logged[-1]["steady_tokens_per_second"] > 0


def test_without_compilation_every_step_is_steady_and_nothing_more_is_logged(tmp_path):
    trainer = tiny_trainer(tmp_path, train_dataset=token_rows(8))
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["steady_tokens_per_second"] >= entry["tokens_per_second"] for entry in logged)
    assert not [name for entry in logged for name in entry if name.startswith("compile/")]


def test_compiling_block_by_block_trains_as_eager_does_on_one_graph_pair(tmp_path):
    rows = token_rows(8, shortest=12, longest=12).map(lambda row: {"labels": row["input_ids"]})
    options = {"train_dataset": rows, "per_device_train_batch_size": 2}
    plain = tiny_trainer(tmp_path / "plain", **options)
    plain.train()
    blocks = tiny_trainer(
        tmp_path / "blocks",
        torch_compile=True,
        torch_compile_backend="aot_eager",
        compile_regions="blocks",
        pad_to_multiple_of=4,
        **options,
    )
    with max_compiles(1):
        blocks.train()
    assert losses(blocks) == pytest.approx(losses(plain), rel=1e-5)


def test_what_is_compiled_must_be_a_known_region(tmp_path):
    with pytest.raises(ConfigError, match="compile_regions must be one of auto, model, blocks, got 'layers'"):
        tiny_trainer(tmp_path, compile_regions="layers")


@pytest.mark.skipif(not hasattr(torch, "neuron"), reason="no neuron device")
def test_blocks_are_the_choice_where_every_shape_is_compiled_ahead(tmp_path):
    options = {"train_dataset": token_rows(4), "torch_compile": True, "torch_compile_backend": "aot_eager"}
    chosen = [tiny_trainer(tmp_path, use_cpu=use_cpu, **options) for use_cpu in (False, True)]
    assert [trainer.args.compiles_blocks(trainer.model) for trainer in chosen] == [True, False]


def test_without_a_plan_the_step_that_is_one_length_too_many_is_named(tmp_path):
    lengths = list(range(5, 10))  # one more than are allowed
    rows = Dataset.from_list([{"input_ids": [2 + place % 60 for place in range(length)]} for length in lengths])
    trainer = tiny_trainer(
        tmp_path,
        train_dataset=rows.map(lambda row: {"labels": row["input_ids"]}),
        torch_compile=True,
        torch_compile_backend="aot_eager",
        compile_regions="blocks",
        per_device_train_batch_size=1,
        max_steps=len(lengths),
    )
    seen: list[int] = []
    collate = trainer.data_collator
    trainer.data_collator = lambda batch: seen.append(len(batch[0]["input_ids"])) or collate(batch)
    static = torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=64)
    with static, pytest.raises(TooManyCompiles) as raised, max_compiles(4):
        trainer.train()
    assert len(raised.value.compilations) >= 5
    assert raised.value.change is not None
    assert raised.value.change.new == seen[4]
    assert str(seen[4]) in str(raised.value).splitlines()[0]
