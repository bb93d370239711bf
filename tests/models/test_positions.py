"""Which models keep their positions in a table, and how many it has."""

from __future__ import annotations

import pytest
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from trellium.models.positions import learned_positions
from trellium.models.tiny import tiny_model

SMALL = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 24}
TABLES = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24, "vocab_size": 64},
    "gptj": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24, "vocab_size": 64, "rotary_dim": 4},
    "gpt_bigcode": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24, "vocab_size": 64},
    "gpt_neo": {**SMALL, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]},
    "opt": {**SMALL, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 16},
    "biogpt": {**SMALL, "hidden_size": 16, "intermediate_size": 16},
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_of_positions_is_found_with_its_length(kind):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TABLES[kind]))
    assert learned_positions(model) == 24


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba2", "phi"])
def test_computed_positions_have_no_end(kind):
    assert learned_positions(tiny_model(kind)) is None


def test_the_table_of_a_picture_s_patches_is_not_the_text_s():
    model = tiny_model()
    model.vision = nn.ModuleDict({"position_embedding": nn.Embedding(9, 4)})
    assert learned_positions(model) is None
