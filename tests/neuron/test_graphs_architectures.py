"""transformers' architectures, compiled: one training step of a tiny model has the loss and the gradients of the eager one.

Nine that differ where a compiler could: tied weights, sliding windows, sinks, experts, a recurrence. They run with `-m slow`: each is 10 to
50 s of compilation on one idle core. One layer of the first runs always. All hundred of `architectures.py` run with `-m architectures`, three quarters of an hour.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

if not (hasattr(torch, "neuron") and torch.neuron.is_available()):
    pytest.skip("needs the emulated device", allow_module_level=True)

import torch._dynamo

from tests.neuron.architectures import ARCHITECTURES, batch, build
from trellium.monitor import ledger

NAMES = ("llama", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss", "phi", "mistral", "gpt2", "mamba2")
GRAPHS = {"gpt2": 2, "openai-gpt": 2}  # a call of the logger about `loss_type` breaks their graphs
BY_NAME = {architecture.model_type: architecture for architecture in ARCHITECTURES}


@pytest.fixture(autouse=True)
def fresh(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TRELLIUM_HOME", str(tmp_path_factory.getbasetemp() / "trellium_home"))
    torch._dynamo.reset()
    torch.neuron.reset_dynamo_metrics()
    ledger.start()


def step(architecture, *, compiled):
    """One forward and backward on the device: the loss, and the gradients by name."""
    model = build(architecture)
    for module in model.modules():  # a compiled graph draws other masks
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    model.to("neuron").train()
    inputs = {key: value.to("neuron") for key, value in batch().items()}
    call = torch.compile(model, backend="neuron", dynamic=False) if compiled else model
    loss = call(**inputs, use_cache=False).loss
    loss.backward()
    return loss.item(), {key: value.grad.cpu() for key, value in model.named_parameters() if value.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_step_is_the_eager_one(name):
    compare(BY_NAME[name], graphs=GRAPHS.get(name, 1))


# Experts are chosen by loops over what the data says: the graph breaks there, and what lies between runs eagerly.
BROKEN_BY_DATA = {"dbrx", "glm5_next", "longcat_flash", "qwen4_exp_text"}


@pytest.mark.architectures
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_each_of_the_hundred_compiles_to_the_eager_step(name):
    compare(BY_NAME[name], graphs=None if name in BROKEN_BY_DATA else GRAPHS.get(name, 1))


def test_a_compiled_step_of_one_layer_is_the_eager_one():
    llama = BY_NAME[NAMES[0]]
    compare(dataclasses.replace(llama, config={**llama.config, "num_hidden_layers": 1}), graphs=1)


def compare(architecture, *, graphs):
    eager_loss, eager_gradients = step(architecture, compiled=False)
    with ledger.watch() as new:
        loss, gradients = step(architecture, compiled=True)
    compiled = torch.neuron.get_dynamo_metrics()["graphs"]
    if graphs is None:
        assert compiled > 1
        assert all(frame.cause == "graph break" for frame in new.eager_frames)
    else:
        assert compiled == graphs
        assert list(new.eager_frames) == []
    assert loss == pytest.approx(eager_loss, abs=1e-5)
    assert gradients.keys() == eager_gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, eager_gradients[key], atol=1e-5, rtol=1e-3, msg=lambda told, key=key: f"{key}: {told}"
        )
