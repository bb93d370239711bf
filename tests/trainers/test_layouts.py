"""The layout never changes the mathematics: padded, packed and shared rows train alike, whatever else is asked for."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from datasets import Dataset

from tests.trainers.tiny_runs import VOCABULARY, losses, tiny_trainer
from trellium.errors import ConfigError
from trellium.models.tiny import tiny_model

DEVICES = ["cpu", pytest.param("neuron", marks=pytest.mark.skipif(not hasattr(torch, "neuron"), reason="no device"))]


def related_rows(count: int = 16) -> Dataset:
    """Rows of which four each begin alike, one is inside another, and two are the same."""
    draw = random.Random(5)
    rows = []
    for group in range(count // 4):
        prompt = [draw.randrange(2, VOCABULARY) for _ in range(4 + group)]
        rows += [prompt + [draw.randrange(2, VOCABULARY) for _ in range(length)] for length in (1, 9, 0, 5)]
    rows[-1] = list(rows[-2])
    labels = [[-100 if draw.random() < 0.2 else token for token in ids[:-1]] + ids[-1:] for ids in rows]
    order = draw.sample(range(len(rows)), len(rows))
    return Dataset.from_list([{"input_ids": rows[at], "labels": labels[at]} for at in order])


def run(folder, *, model: str = "llama", seed: int = 0, **options):
    torch.manual_seed(seed)
    trainer = tiny_trainer(
        folder,
        tiny_model(model, vocab_size=VOCABULARY),
        **{
            "train_dataset": related_rows(),
            "eval_dataset": related_rows(8),
            "eval_strategy": "steps",
            "eval_steps": 2,
            "max_steps": 4,
            "learning_rate": 1e-3,
            "bf16": False,
            **options,
        },
    )
    trainer.train()
    weights = {name: value.detach().cpu() for name, value in trainer.model.state_dict().items()}
    held_out = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return trainer, losses(trainer) + held_out, weights


def assert_alike(one, other, *, rel: float = 2e-5) -> None:
    assert one[1] == pytest.approx(other[1], rel=rel)
    for name, value in one[2].items():
        torch.testing.assert_close(value, other[2][name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_every_layout_and_accumulation_trains_as_padded_rows_do(tmp_path, device, loss_type):
    options = {"loss_type": loss_type, "use_cpu": device == "cpu"}
    plain = run(tmp_path / "plain", layout="padded", **options)
    for layout, steps in itertools.product(("padded", "packed", "shared"), (1, 4)):
        other = run(
            tmp_path / f"{layout}{steps}",
            layout=layout,
            per_device_train_batch_size=4 // steps,
            gradient_accumulation_steps=steps,
            **options,
        )
        assert_alike(other, plain)


def test_shared_rows_forward_fewer_tokens_and_say_so(tmp_path):
    shared, *_ = run(tmp_path / "shared", per_device_train_batch_size=16)
    packed, *_ = run(tmp_path / "packed", per_device_train_batch_size=16, layout="packed")
    assert shared.data_collator.layout == "shared"
    entry, plain = (next(e for e in t.state.log_history if "packing_ratio" in e) for t in (shared, packed))
    assert entry["packing_ratio"] > 1.5
    assert entry["fill"] == 1.0
    assert plain["packing_ratio"] == 1.0
    assert entry["num_tokens"] == plain["num_tokens"]


@pytest.mark.parametrize(("compiled", "row_length"), [(False, None), (True, None), (False, 48)])
def test_packed_datasets_train_their_sequences_and_do_not_let_them_see_each_other(tmp_path, compiled, row_length):
    # One packed row a step: the sequences of a row, given as rows of their own, are the same step.
    rows = related_rows()
    options = {"max_length": 24, "packing": True, "per_device_train_batch_size": 1, "max_steps": 3}
    options |= {"packed_row_length": row_length}
    if compiled:
        options |= {"torch_compile": True, "torch_compile_backend": "aot_eager", "compile_regions": "blocks"}
    trainer, found, _ = run(tmp_path / "packed", train_sampling_strategy="sequential", **options)
    expected = []
    torch.manual_seed(0)
    model = tiny_model(vocab_size=VOCABULARY)
    for packed in trainer.train_dataset.select(range(1)):
        total, count, start = 0.0, 0, 0
        for length in packed["seq_lengths"]:
            ids = torch.tensor([packed["input_ids"][start : start + length]])
            labels = torch.tensor([packed["labels"][start : start + length]])
            logits = model(input_ids=ids).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(logits, labels[0, 1:], ignore_index=-100, reduction="sum").item()
            count += int((labels[0, 1:] != -100).sum())
            start += length
        expected.append(total / count)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert sum(map(len, rows["input_ids"])) == sum(map(sum, trainer.train_dataset["seq_lengths"]))
    assert (row_length or 24) * 0.8 < max(map(sum, trainer.train_dataset["seq_lengths"])) <= (row_length or 24)


def test_a_model_that_reads_one_sequence_a_row_is_padded_and_cannot_be_packed(tmp_path):
    trainer, *_ = run(tmp_path, model="mamba2", max_steps=1, eval_strategy="no")
    assert trainer.data_collator.layout == "padded"
    for options in ({"packing": True}, {"layout": "shared"}):
        with pytest.raises(ConfigError, match="reads one sequence a row: its layers of type linear_attention"):
            run(tmp_path, model="mamba2", max_length=24, **options)


def test_router_losses_are_those_of_padded_rows(tmp_path):
    options = {"model": "qwen3_moe", "router_aux_loss_coef": 0.5}
    packed = run(tmp_path / "packed", **options)
    assert packed[0].data_collator.layout == "packed"
    assert_alike(packed, run(tmp_path / "padded", layout="padded", **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "tree"}, "layout must be one of auto, padded, packed, shared"),
        ({"packing": True, "max_length": None}, "Set max_length"),
        ({"packing": True, "layout": "padded"}, "gives every sequence a row of its own"),
        ({"packing_strategy": "best"}, "packing_strategy must be one of bfd, bfd_split, wrapped"),
        ({"padding_free": True, "layout": "padded"}, "exclude each other"),
        ({"packed_row_length": 48}, "rows are not packed"),
        ({"packing": True, "max_length": 24, "packed_row_length": 16}, "does not hold a sequence of max_length=24"),
        ({"packing": True, "packed_row_length": 2048, "packing_strategy": "wrapped"}, "a wrapped row is one sequence"),
    ],
)
def test_layouts_that_cannot_be_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, **options)


def test_smoothed_labels_train_as_transformers_smooths_them(tmp_path):
    options = {
        "label_smoothing_factor": 0.2,
        "max_steps": 1,
        "eval_strategy": "no",
        "train_sampling_strategy": "sequential",
    }
    trainer, found, _ = run(tmp_path, **options)
    torch.manual_seed(0)
    model = tiny_model(vocab_size=VOCABULARY)
    total, count = 0.0, 0
    for row in related_rows().select(range(4)):
        logprobs = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].log_softmax(-1)
        for place, label in enumerate(row["labels"][1:]):
            if label != -100:
                total += -0.8 * logprobs[place, label].item() - 0.2 * logprobs[place].mean().item()
                count += 1
    assert found[0] == pytest.approx(total / count, rel=1e-5)
    held_out = trainer.evaluate(related_rows().select(range(4)))
    assert held_out["eval_loss"] < found[0]  # the same rows, a step later, by the same loss


def test_rows_that_are_packed_already_are_trained_as_they_are_or_refused(tmp_path):
    options = {"max_length": 24, "max_steps": 1, "eval_strategy": "no", "train_sampling_strategy": "sequential"}
    first, found, _ = run(tmp_path / "first", packing=True, **options)
    again, same, _ = run(tmp_path / "again", packing=True, train_dataset=first.train_dataset, **options)
    assert same == found
    assert again.train_dataset["seq_lengths"] == first.train_dataset["seq_lengths"]
    with pytest.raises(ConfigError, match="packed already"):
        run(tmp_path / "off", train_dataset=first.train_dataset, **options)
