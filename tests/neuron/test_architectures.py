"""Tiny models of a hundred architectures take the CPU's training steps on `neuron`: same losses, same gradients, same ties.

For each: build on the CPU, move, two steps of AdamW on a ragged batch. As the device runs the CPU's kernels on the same bytes and draws the CPU's numbers
(dropout is on where an architecture has it), equal means bit for bit. Then once more in bfloat16, with eager attention and gradient checkpointing, and
generating with a cache. A few common ones run always; all of them with `-m slow`, about two minutes. What was measured stands in docs/architectures.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from tests.neuron.architectures import ARCHITECTURES, Architecture, batch, build

DOCUMENT = Path(__file__).parents[2] / "docs" / "architectures.md"
ALWAYS = {"llama", "qwen3", "gemma3_text", "gpt2", "qwen3_moe", "mamba2"}
LOSS_TOLERANCE = 1e-3

on_neuron = pytest.mark.skipif(
    not hasattr(torch, "neuron"), reason="the neuron extension is not built: see `trellium env`"
)


@dataclass
class Training:
    """Two steps of one model on one device, everything brought back to the CPU."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    ties: list[list[str]] = field(default_factory=list)


@dataclass
class Tally:
    """What the run of this file found, for its last line."""

    differences: dict[str, float] = field(default_factory=dict)
    tied: int = 0


def tied_names(model: nn.Module) -> list[list[str]]:
    """Names of parameters that are one and the same object, a list for each such object."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(group for group in names.values() if len(group) > 1)


def train(model: nn.Module, device: str, steps: int = 2) -> Training:
    """Move `model` to `device` and train it there: AdamW, learning rate 1e-3, `steps` times the same batch of ragged rows."""
    torch.manual_seed(0)  # dropout
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3
    )  # before the move: it must still own the parameters after it
    model.to(device)
    rows = {name: tensor.to(device) for name, tensor in batch().items()}
    training = Training(ties=tied_names(model))
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**rows, use_cache=False).loss
        loss.backward()
        training.losses.append(loss.item())
        training.gradients.append(
            {name: None if p.grad is None else p.grad.cpu().clone() for name, p in model.named_parameters()}
        )
        optimizer.step()
    training.parameters = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    return training


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    found = Tally()
    yield found
    capture = request.config.pluginmanager.getplugin("capturemanager")
    largest = max(found.differences, key=found.differences.__getitem__, default="")
    with capture.global_and_fixture_disabled():
        equal = sum(difference == 0.0 for difference in found.differences.values())
        print(
            f"\narchitectures: {len(found.differences)} trained two steps on neuron, {equal} with the CPU's losses, gradients and "
            f"weights bit for bit, {found.tied} with tied weights; largest difference {found.differences.get(largest, 0.0):.1e} ({largest})"
        )


def _parameter(architecture: Architecture) -> object:
    marks = [] if architecture.model_type in ALWAYS else [pytest.mark.slow]
    return pytest.param(architecture, id=architecture.model_type, marks=marks)


def _in_bfloat16(model: PreTrainedModel, device: str) -> list[float]:
    return train(model.bfloat16(), device).losses


def _checkpointed(model: PreTrainedModel, device: str) -> list[float]:
    model.set_attn_implementation("eager")
    model.gradient_checkpointing_enable()
    return train(model, device).losses


def _generated(model: PreTrainedModel, device: str) -> list[list[int]]:
    """Six greedy tokens behind the longer row, with a cache."""
    model.eval().to(device)
    prompt = batch()["input_ids"][:1].to(device)
    tokens = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    return tokens.tolist()


VARIANTS: dict[str, Callable[[PreTrainedModel, str], object]] = {
    "bfloat16": _in_bfloat16,
    "checkpointed": _checkpointed,
    "generated": _generated,
}
# What transformers 5.24 itself cannot do, on the CPU too, and the words it has for it.
CPU_CANNOT = {
    ("bfloat16", "xlstm"): "expected scalar type Float but found BFloat16",
    ("checkpointed", "openai-gpt"): "does not support activation checkpointing",
    ("generated", "xlstm"): "must match the existing size",
}


@on_neuron
@pytest.mark.parametrize("architecture", [_parameter(architecture) for architecture in ARCHITECTURES])
def test_two_training_steps_on_neuron_are_those_of_the_cpu(architecture: Architecture, tally: Tally) -> None:
    transformers.logging.set_verbosity_error()
    model = build(architecture)
    ties, parameters = tied_names(model), list(model.parameters())
    here = train(build(architecture), "cpu")
    there = train(model, "neuron")

    assert {p.device.type for p in model.parameters()} == {"neuron"}
    assert all(before is after for before, after in zip(parameters, model.parameters(), strict=True))
    assert there.ties == ties == here.ties

    assert here.losses[1] < here.losses[0], "the CPU does not learn this batch: the comparison would show nothing"
    difference = max(abs(a - b) for a, b in zip(here.losses, there.losses, strict=True))
    assert difference <= LOSS_TOLERANCE, f"losses on the CPU {here.losses}, on neuron {there.losses}"
    for expected, got in zip(here.gradients, there.gradients, strict=True):
        assert [name for name in expected if expected[name] is None] == [name for name in got if got[name] is None]
    pairs = [
        (name, value, other[name])
        for one, other in [*zip(here.gradients, there.gradients, strict=True), (here.parameters, there.parameters)]
        for name, value in one.items()
        if value is not None
    ]
    for name, expected, got in pairs:
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
        difference = max(difference, (got - expected).abs().max().item())
    tally.differences[architecture.model_type] = difference
    tally.tied += bool(ties)
    assert difference == 0.0 or architecture.model_type in NOT_BIT_EQUAL, (
        f"differs by {difference:.1e}: no reason is listed"
    )


# Model types that are close to the CPU but not bit-equal, and why.
NOT_BIT_EQUAL: dict[str, str] = {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@on_neuron
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.model_type)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_training_and_generation_on_neuron_are_those_of_the_cpu(
    variant: str, architecture: Architecture
) -> None:
    transformers.logging.set_verbosity_error()
    run = VARIANTS[variant]
    if reason := CPU_CANNOT.get((variant, architecture.model_type)):
        with pytest.raises((RuntimeError, ValueError), match=reason):
            run(build(architecture), "cpu")
        return
    assert run(build(architecture), "neuron") == run(build(architecture), "cpu")


@on_neuron
def test_weights_stay_tied_on_the_way_to_neuron_and_back() -> None:
    by_name = {architecture.model_type: architecture for architecture in ARCHITECTURES}
    model = build(by_name["gemma3_text"])
    ties = tied_names(model)
    assert ties == [["model.embed_tokens.weight", "lm_head.weight"]]
    assert tied_names(model.to("neuron")) == ties
    assert model.get_input_embeddings().weight.device.type == "neuron"
    assert tied_names(model.to("cpu")) == ties
    assert model.get_output_embeddings().weight.device.type == "cpu"


def test_the_list_holds_a_hundred_different_architectures() -> None:
    assert len(ARCHITECTURES) == len({architecture.model_type for architecture in ARCHITECTURES}) == 100


def test_the_document_lists_the_architectures_of_the_list() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+?) \|", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert rows == [(architecture.model_type, architecture.layers) for architecture in ARCHITECTURES]
