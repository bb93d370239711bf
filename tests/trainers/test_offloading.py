"""`activation_offloading` changes what a device holds, and nothing that is computed."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.trainers.tiny_runs import losses, tiny_trainer, token_rows
from trellium import SFTConfig
from trellium.errors import ConfigError
from trellium.models import offloading
from trellium.models.tiny import tiny_model
from trellium.trainers import base_config

needs_accelerator = pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="needs an accelerator, emulated or not"
)


def run(folder, *, offload, **options):
    """Losses, and the peak on the device."""
    torch.manual_seed(0)
    model = tiny_model("qwen3", vocab_size=64, num_hidden_layers=8, hidden_size=32, intermediate_size=64)
    trainer = tiny_trainer(
        folder,
        model,
        use_cpu=False,
        bf16=False,
        train_dataset=token_rows(16, shortest=100, longest=150),
        per_device_train_batch_size=8,
        max_steps=2,
        activation_offloading=offload,
        **options,
    )
    torch.accelerator.reset_peak_memory_stats()
    trainer.train()
    return losses(trainer), torch.accelerator.max_memory_allocated()


@needs_accelerator
@pytest.mark.parametrize(
    "regions", [{}, {"torch_compile": True, "torch_compile_backend": "aot_eager", "compile_regions": "blocks"}]
)
@pytest.mark.parametrize(("checkpointing", "share"), [(False, 0.3), (True, 0.9)])
def test_losses_are_the_same_to_the_bit_and_the_device_holds_less(tmp_path, checkpointing, share, regions):
    kept, most = run(tmp_path / "kept", offload=False, gradient_checkpointing=checkpointing, **regions)
    moved, least = run(tmp_path / "moved", offload=True, gradient_checkpointing=checkpointing, **regions)
    assert moved == kept
    assert least < share * most


@needs_accelerator
def test_a_graph_of_the_whole_model_cannot_be_offloaded_and_says_so(tmp_path):
    with pytest.raises(ConfigError, match="Set compile_regions=blocks"):
        run(tmp_path, offload=True, torch_compile=True, compile_regions="model")


def test_without_an_accelerator_it_is_said_once_that_nothing_is_offloaded(tmp_path, caplog):
    base_config._said.clear()
    with caplog.at_level(logging.WARNING, logger="trellium"):
        for _ in range(2):
            SFTConfig(output_dir=str(tmp_path), use_cpu=True, activation_offloading=True)
    assert [record.message for record in caplog.records].count(
        "activation_offloading=True does nothing here: no accelerator is in use, so activations are in the host's memory as they are."
    ) == 1
    rows, options = token_rows(8), {"use_cpu": True, "bf16": False}
    kept, asked = (
        tiny_trainer(tmp_path, train_dataset=rows, activation_offloading=offload, **options)
        for offload in (False, True)
    )
    kept.train()
    asked.train()
    assert losses(asked) == losses(kept)


@needs_accelerator
def test_what_several_operators_saved_is_copied_once_and_weights_stay(monkeypatch):
    copied = []

    class Counted(offloading._OnHost):
        def __init__(self, tensor, *others):
            copied.append(tuple(tensor.shape))
            super().__init__(tensor, *others)

    monkeypatch.setattr(offloading, "_OnHost", Counted)
    device = torch.accelerator.current_accelerator()
    layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3)).to(device)
    given = torch.randn(32, 64, device=device, requires_grad=True)
    with offloading.offloaded_activations(layers):
        sum(layer(given).sum() for layer in layers).backward()
    assert copied == [(32, 64)]


@needs_accelerator
def test_views_with_gaps_come_back_equal():
    device = torch.accelerator.current_accelerator()
    whole = torch.randn(64, 128, device=device, requires_grad=True)

    def gradient():
        left, right = whole.chunk(2, dim=1)
        (left * right.t().t()).square().sum().backward()
        found, whole.grad = whole.grad, None
        return found

    expected = gradient()
    with offloading.offloaded_activations(torch.nn.Identity()):
        assert torch.equal(gradient(), expected)
    with offloading.offloaded_activations(torch.nn.Identity(), exact_strides=True):
        assert torch.equal(gradient(), expected)
