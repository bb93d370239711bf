"""The repeated block compiled once: found in any model, equal to eager, one graph whatever the depth, and out of the way of generation."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from trellium.errors import ModelError
from trellium.models.blocks import compile_blocks, repeated_blocks
from trellium.models.scoring import install_scores
from trellium.models.tiny import tiny_model
from trellium.monitor import max_compiles

VOCABULARY = 64


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def batch(rows: int = 2, length: int = 8) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))
    return {
        "input_ids": tokens,
        "subtree_end": torch.full_like(tokens, length),
        "edge_position": torch.arange(rows * length - 1),
        "edge_target": tokens.flatten()[1:],
    }


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**batch()).logprob.sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def scored(layers: int = 4) -> nn.Module:
    return install_scores(tiny_model(vocab_size=VOCABULARY, num_hidden_layers=layers))


def test_blocks_are_found_through_an_adapter():
    model = scored(3)
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    assert repeated_blocks(adapted) == list(model.model.layers)


def test_a_model_without_repeated_blocks_is_refused():
    with pytest.raises(ModelError, match="no repeated blocks"):
        compile_blocks(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_blocks_give_the_gradients_of_eager_ones_on_one_graph(checkpointing):
    model = scored(4)
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    expected = gradients(model)
    names = set(model.state_dict())
    assert compile_blocks(model, backend="aot_eager") == 4
    with max_compiles(1):
        found = gradients(model)
    assert set(model.state_dict()) == names
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def test_generation_with_a_cache_compiles_nothing():
    model = scored(2).eval()
    prompt = torch.ones(1, 3, dtype=torch.int64)
    expected = model.generate(prompt, max_new_tokens=5, do_sample=False)
    compile_blocks(model, backend="aot_eager")
    with max_compiles(0):
        assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), expected)


def test_a_copy_of_the_model_is_not_compiled():
    model = scored(2)
    compile_blocks(model, backend="aot_eager")
    copied = copy.deepcopy(model)
    with max_compiles(0):
        copied(**batch())
