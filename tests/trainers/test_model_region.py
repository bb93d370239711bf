"""A model that is compiled as one region: training and evaluation both run what the warm-up compiled, and nothing is compiled after it."""

from __future__ import annotations

import pytest
import torch

from tests.trainers.test_planned_shapes import STATIC, rows_of
from tests.trainers.tiny_runs import losses, tiny_trainer
from trellium.monitor import max_compiles


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    with torch._dynamo.config.patch(STATIC):
        yield
    torch.compiler.reset()


def compiled(folder, **options):
    """A trainer whose model is one region, and a list of how it was called: (whether compiled, whether training)."""
    trainer = tiny_trainer(
        folder,
        torch_compile=True,
        torch_compile_backend="aot_eager",
        compile_regions="model",
        layout="padded",
        **options,
    )
    calls, score, eager = [], trainer.score, []

    def inside(*_):
        if not torch.compiler.is_compiling():  # what is traced runs it no more
            eager.append(True)

    def watched(model, inputs):
        eager.clear()
        scores = score(model, inputs)
        calls.append((not eager, model.training))
        return scores

    trainer.model.model.norm.register_forward_pre_hook(inside)
    trainer.score = watched
    return trainer, calls


def evaluated(trainer) -> list[float]:
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def test_evaluation_runs_the_graphs_that_were_compiled_for_it(tmp_path):
    options = {
        "train_dataset": rows_of([5, 6, 9, 12, 16, 7]),  # batches of 4: the last is of 2
        "eval_dataset": rows_of([4, 10, 15]),
        "eval_strategy": "steps",
        "eval_steps": 2,
        "max_steps": -1,
        "num_train_epochs": 2,
    }
    plain = tiny_trainer(tmp_path / "plain", layout="padded", **options)
    plain.train()
    trainer, calls = compiled(tmp_path / "planned", shapes=["16"], strict_shapes=True, **options)
    trainer.train()
    assert {is_compiled for is_compiled, _ in calls} == {True}
    assert {training for _, training in calls} == {True, False}
    assert losses(trainer) == pytest.approx(losses(plain), rel=1e-5)
    assert len(evaluated(plain)) == 2
    assert evaluated(trainer) == pytest.approx(evaluated(plain), rel=1e-5)
    calls.clear()
    with max_compiles(0):
        trainer.evaluate()
    assert calls == [(True, False)]


def test_rows_that_were_not_planned_are_compiled_and_told(tmp_path, caplog):
    trainer, calls = compiled(tmp_path, train_dataset=rows_of([5] * 4), shapes=["8"], max_steps=1)
    trainer.train()
    assert trainer.evaluate(rows_of([4, 12]))["eval_num_tokens"] == 16
    assert calls[-1] == (True, False)
    assert "compiled after the warm-up, in evaluation" in caplog.text


def test_evaluations_before_any_training_run_one_graph(tmp_path):
    trainer, calls = compiled(tmp_path, train_dataset=rows_of([5] * 4), eval_dataset=rows_of([5, 8]), shapes=["8"])
    with max_compiles(1):
        first = trainer.evaluate()
        second = trainer.evaluate()
    assert calls == [(True, False)] * 2
    assert first["eval_loss"] == second["eval_loss"]
