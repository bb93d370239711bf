"""Every method, in every layout, accumulated or not, on every device, compiled or not: the same losses, metrics and weights."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.trainers.preference_runs import logged, rows_for, trainer_for

LAYOUTS = ("padded", "packed", "shared")
NEURON = pytest.mark.skipif(not hasattr(torch, "neuron"), reason="no emulated device here")
METRICS = {
    "dpo": (
        "rewards/margins",
        "logps/chosen",
        "entropy",
        "logits/rejected",
        "mean_token_accuracy",
    ),
    "kto": ("rewards/margins", "logps/rejected", "entropy", "logits/chosen"),
    "reward": ("margin", "mean_reward"),
}


def matrix_trainer(method, folder, *, steps=1, **options):
    """An epoch of ten rows by four: the last step has two. It evaluates on the way; six held-out rows fill no batch either."""
    return trainer_for(
        method,
        folder,
        train_dataset=rows_for(method, 10),
        eval_dataset=rows_for(method, 6, seed=3),
        per_device_train_batch_size=4 // steps,
        gradient_accumulation_steps=steps,
        **{
            "max_steps": -1,
            "num_train_epochs": 1,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "optim": "sgd",  # Adam makes the rounding of a gradient near zero a whole step
            "learning_rate": 0.02,
            **options,
        },
    )


def run(method, folder, **options):
    return results(method, matrix_trainer(method, folder, **options))


def results(method, trainer):
    """What a run logs and evaluates to, and its weights."""
    trainer.train()
    held_out = trainer.evaluate()
    values = {name: logged(trainer, name) for name in ("loss", "grad_norm", *METRICS[method])}
    values |= {f"eval_{name}": [held_out[f"eval_{name}"]] for name in ("loss", *METRICS[method])}
    weights = {name: value.detach().cpu().clone() for name, value in trainer.model.state_dict().items()}
    return values, weights


def assert_alike(one, other):
    for name, values in one[0].items():
        assert values == pytest.approx(other[0][name], rel=2e-4, abs=2e-5), name
    for name, value in one[1].items():
        torch.testing.assert_close(value, other[1][name], rtol=2e-3, atol=2e-5, msg=name)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What padded rows on the cpu train, by method."""
    return {
        method: run(method, tmp_path_factory.mktemp(method), layout="padded", **options_of(method))
        for method in METRICS
    }


def options_of(method):
    """KTO's own loss compares with an estimate from the rows of a micro-batch, which changes with its size; the other does not."""
    return {"loss_type": "apo_zero_unpaired"} if method == "kto" else {}


@pytest.mark.parametrize("device", ["cpu", pytest.param("neuron", marks=NEURON)])
@pytest.mark.parametrize("method", METRICS)
def test_layouts_and_accumulation_change_nothing(tmp_path, plain, method, device):
    for layout, steps in itertools.product(LAYOUTS, (1, 4)):
        found = run(
            method,
            tmp_path / f"{layout}{steps}",
            steps=steps,
            layout=layout,
            use_cpu=device == "cpu",
            **options_of(method),
        )
        assert_alike(found, plain[method])


@pytest.mark.parametrize("device", ["cpu", pytest.param("neuron", marks=NEURON)])
def test_the_layout_does_not_change_the_estimated_divergence(tmp_path, device):
    found = [
        run("kto", tmp_path / layout, layout=layout, use_cpu=layout == "padded" or device == "cpu")
        for layout in LAYOUTS
    ]
    for other in found[1:]:
        assert_alike(other, found[0])
