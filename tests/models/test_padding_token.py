"""Padding learns nothing and spoils nothing, whatever its embedding is."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

from tests.trainers.tiny_runs import VOCABULARY, padded_nll_sum, tiny_trainer
from trellium.models.tiny import tiny_model

PAD = 0
"""The tiny models' padding token, whose embedding is a row of zeros."""

RAGGED = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15, 16, 17, 18]]


def gemma_3n() -> torch.nn.Module:
    """A tiny Gemma 3n, which takes the root of the hidden states' magnitude: its slope at 0 is infinite."""
    config = AutoConfig.for_model(
        "gemma3n_text",
        vocab_size=VOCABULARY,
        vocab_size_per_layer_input=VOCABULARY,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=2,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=[48, 48],
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        laurel_rank=8,
        num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.5, 0.0],
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float()


def rows() -> list[dict]:
    return [{"input_ids": ids, "labels": ids} for ids in RAGGED]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("multiple", [None, 16])
@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_padding_of_a_zero_embedding_gives_the_gradients_of_rows_without_it(tmp_path, layout, multiple):
    model = gemma_3n()
    assert not model.get_input_embeddings().weight[PAD].any()
    total = sum(padded_nll_sum(model, [row])[0] for row in rows())
    (total / sum(len(ids) - 1 for ids in RAGGED)).backward()
    expected = gradients(model)
    trained = gemma_3n()
    trainer = tiny_trainer(
        tmp_path,
        trained,
        train_dataset=Dataset.from_list(rows()),
        layout=layout,
        pad_to_multiple_of=multiple,
        max_steps=1,
    )
    batch = trainer.data_collator(list(trainer.train_dataset))
    trained.train()
    trainer.compute_loss(trained, batch).backward()
    assert expected.keys() == gradients(trained).keys()
    for name, gradient in gradients(trained).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("llama", "shared"),
        ("gpt2", "padded"),
        ("gemma3", "packed"),
        ("gpt_oss", "packed"),
        ("mamba2", "padded"),
        ("gemma3n", "shared"),
    ],
)
def test_padding_has_a_gradient_of_exactly_zero(tmp_path, kind, layout):
    model = gemma_3n() if kind == "gemma3n" else tiny_model(kind, vocab_size=VOCABULARY)
    trainer = tiny_trainer(
        tmp_path, model, train_dataset=Dataset.from_list(rows()), layout=layout, pad_to_multiple_of=16, max_steps=1
    )
    batch = trainer.data_collator(list(trainer.train_dataset))
    seen = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: output.register_hook(seen.append) and None
    )
    trainer.compute_loss(model.train(), batch).backward()
    padding = torch.arange(batch["input_ids"].shape[1]) >= batch["real_tokens"][:, None]
    assert padding.any()
    (gradient,) = seen
    assert (gradient[padding] == 0).all()
    assert gradient[~padding].any()


def test_a_run_of_padded_rows_stays_finite_where_the_padding_token_is_all_zeros(tmp_path):
    trainer = tiny_trainer(
        tmp_path,
        gemma_3n(),
        train_dataset=Dataset.from_list(rows() * 4),
        layout="shared",
        pad_to_multiple_of=32,
        max_nonfinite_steps=1,
    )
    trainer.train()
    assert all(torch.isfinite(weight).all() for weight in trainer.model.parameters())


def test_a_row_that_ends_with_the_padding_token_is_filled_with_what_has_an_embedding(tmp_path):
    ending = [{"input_ids": [*ids, PAD], "labels": [*ids, PAD]} for ids in RAGGED]
    trainer = tiny_trainer(
        tmp_path,
        gemma_3n(),
        train_dataset=Dataset.from_list(ending),
        layout="padded",
        shapes=["24"],
        gradient_checkpointing=False,
        max_steps=1,
    )
    trainer.train()
    assert "skipped_steps" not in trainer.state.log_history[0]
    assert all(torch.isfinite(weight).all() for weight in trainer.model.parameters())
