"""The fused loss inside whole models, in the ways a trainer runs them."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.models.test_scoring import assert_same_gradients, batch_of, rows
from trellium.models.scoring import install_scores
from trellium.models.tiny import tiny_model
from trellium.ops import losses


def fused_loss(model, batch):
    return model(**batch, fused_loss="nll", score_outputs=("entropy",)).loss_sum


def loss_of_scores(model, batch):
    return losses.nll(model(**batch, score_outputs=("logprob",)).logprob, batch["edge_weight"], 1)


def two_models(**settings):
    model = install_scores(tiny_model("llama", **settings))
    return model, copy.deepcopy(model), batch_of(rows())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_gradient_checkpointing_of_the_model_changes_nothing(reentrant, tied):
    checkpointed, plain, batch = two_models(tie_word_embeddings=tied)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    checkpointed.enable_input_require_grads()
    checkpointed.train()
    fused_loss(checkpointed, batch).backward()
    loss_of_scores(plain, batch).backward()
    assert_same_gradients(checkpointed, plain, 2e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_under_autocast_it_is_the_loss_of_the_scores_with_gradients_in_float32(tied):
    fused, plain, batch = two_models(tie_word_embeddings=tied)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = fused_loss(fused, batch), loss_of_scores(plain, batch)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    ours.backward()
    theirs.backward()
    assert fused.lm_head.weight.grad.dtype == torch.float32
    assert_same_gradients(
        fused, plain, 1e-2
    )  # one rounding of hidden's gradient to bfloat16, whose neighbours may differ


@pytest.mark.parametrize("checkpointed", [True, False])
def test_a_frozen_head_under_adapters_gets_no_gradient_and_the_adapters_theirs(checkpointed):
    adapter = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    fused = get_peft_model(install_scores(tiny_model("llama")), adapter)
    plain, batch = copy.deepcopy(fused), batch_of(rows())
    if checkpointed:
        fused.gradient_checkpointing_enable({"use_reentrant": False})
        fused.enable_input_require_grads()
        fused.train()
    fused_loss(fused, batch).backward()
    loss_of_scores(plain, batch).backward()
    assert fused.get_base_model().lm_head.weight.grad is None
    assert_same_gradients(fused, plain, 2e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_training_step_of_it_is_one_graph(tied):
    model, plain, batch = two_models(tie_word_embeddings=tied)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    for _ in range(2):  # summed over two micro-batches
        fused_loss(compiled, batch).backward()
        loss_of_scores(plain, batch).backward()
    assert_same_gradients(model, plain, 2e-5)
    model.zero_grad()
    compiled.eval()
    with torch.no_grad():
        torch.testing.assert_close(fused_loss(compiled, batch), loss_of_scores(plain, batch))


def test_compiled_under_autocast_and_checkpointing_it_keeps_its_gradients():
    model, plain, batch = two_models()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = fused_loss(compiled, batch), loss_of_scores(plain, batch)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    ours.backward()
    theirs.backward()
    assert_same_gradients(model, plain, 2e-2)
