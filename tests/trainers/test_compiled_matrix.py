"""The equality matrix, compiled: every method, layout and accumulation trains as eager padded rows on the cpu do, on as many graphs as were planned.

A run here has a last batch that is not full, at every layer of it: rows, held-out rows, micro-batches. Shapes are strict, so that a graph that is compiled
after the warm-up is an error. The one-row shapes are the same for all methods, so that a cache of graphs serves the later ones.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from peft import LoraConfig

from tests.trainers.preference_runs import model_for
from tests.trainers.test_equality_matrix import LAYOUTS, METRICS, NEURON, assert_alike, matrix_trainer, results, run
from trellium.monitor import max_compiles
from trellium.trainers.referenced import ReferencedTrainer

ROW_LENGTHS = {"padded": ["32"], "packed": ["256"], "shared": ["256"]}
LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
STATIC = {"automatic_dynamic_shapes": False, "recompile_limit": 64}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    with torch._dynamo.config.patch(STATIC):
        yield
    torch.compiler.reset()


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    """From method and options to what eager padded rows train on the cpu, each trained once."""
    kept = {}

    def trained(method, **options):
        key = (method, *sorted(options.items()))
        if key not in kept:
            kept[key] = run(method, tmp_path_factory.mktemp(method), layout="padded", **fresh(options))
        return kept[key]

    return trained


def fresh(options):
    """The options with the models they name."""
    made = {"ref_model": lambda: model_for("dpo", "qwen3"), "peft_config": lambda: LoraConfig(**LORA)}
    return {name: made[name]() if name in made else value for name, value in options.items()}


def graphs_of(trainer, *, given):
    """How many graphs a run needs: one for each size that is trained, and one for each that is forwarded only. Blocks do not see how many edges there are."""
    blocks = trainer.args.compiles_blocks(trainer.model)
    training, evaluation = (
        {
            (planned.shape.rows, planned.shape.length) if blocks else planned.shape
            for planned in trainer.plan.planned
            if planned.evaluation is kind
        }
        for kind in (False, True)
    )
    if not isinstance(trainer, ReferencedTrainer):
        return len(training) + len(evaluation)
    forwarded = len(training | evaluation)  # by the reference
    # The blocks of a reference that is given are others; the whole model is asked for more than its reference.
    return len(training) + forwarded + (len(evaluation) if given or not blocks else 0)


def assert_compiled_as_eager(method, folder, expected, *, layout, device="neuron", **options):
    with max_compiles(64) as compilations:
        trainer = matrix_trainer(
            method,
            folder,
            layout=layout,
            use_cpu=device == "cpu",
            torch_compile=True,
            shapes=ROW_LENGTHS[layout],
            strict_shapes=True,
            **fresh(options),
        )
        found = results(method, trainer)
    assert_alike(found, expected)
    assert len([one for one in compilations if one.kind != "backward"]) == graphs_of(
        trainer, given="ref_model" in options
    )
    with max_compiles(0):
        trainer.evaluate()


def kto_options(method, steps):
    """KTO's own loss compares with an estimate from the rows of a micro-batch, which changes with its size; the other does not."""
    return {"loss_type": "apo_zero_unpaired"} if method == "kto" and steps > 1 else {}


@NEURON
@pytest.mark.parametrize("method", METRICS)
def test_graphs_of_neuron_train_and_evaluate_as_eager_rows_do(tmp_path, eager, method):
    assert_compiled_as_eager(method, tmp_path, eager(method), layout="shared")


@pytest.mark.slow
@NEURON
@pytest.mark.parametrize(("layout", "steps"), itertools.product(LAYOUTS, (1, 4)))
@pytest.mark.parametrize("method", METRICS)
def test_graphs_of_neuron_train_alike_in_every_layout_and_accumulation(tmp_path, eager, method, layout, steps):
    options = kto_options(method, steps)
    assert_compiled_as_eager(method, tmp_path, eager(method, **options), layout=layout, steps=steps, **options)


REFERENCES = {
    "given": {"ref_model": "qwen3"},
    # Checkpointing is turned on when training begins, after the reference was asked, and a block's guards see it: its graphs would be made twice.
    "precomputed": {"precompute_ref_log_probs": True, "gradient_checkpointing": False},
    "adapter off": {"peft_config": "lora"},
}


@pytest.mark.slow
@NEURON
@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_graphs_of_neuron_compare_with_every_reference_as_eager_rows_do(tmp_path, eager, method, reference):
    options = REFERENCES[reference]
    assert_compiled_as_eager(method, tmp_path, eager(method, **options), layout="padded", **options)


@pytest.mark.slow
@pytest.mark.parametrize("method", METRICS)
def test_graphs_of_inductor_train_and_evaluate_as_eager_rows_do(tmp_path, eager, method):
    """On the cpu, where the whole model is one region."""
    assert_compiled_as_eager(method, tmp_path, eager(method), layout="shared", device="cpu")


@pytest.mark.parametrize(
    ("method", "region"), [*((method, "blocks") for method in METRICS), ("dpo", "model"), ("reward", "model")]
)
def test_nothing_is_compiled_after_the_warm_up_whatever_batches_come(tmp_path, eager, method, region):
    """By both regions: a last batch that is not full, evaluation between and after the steps."""
    options = {"torch_compile_backend": "eager", "compile_regions": region}
    assert_compiled_as_eager(method, tmp_path, eager(method), layout="padded", device="cpu", **options)
