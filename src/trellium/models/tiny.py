"""Tiny random language models, of real architectures: for tests, benchmarks and a dry run of one's own script in a second.

Two layers, hidden size 32 to 64, a few thousand to a hundred thousand parameters, made from transformers' configurations without any download. Weights
are larger than a real initialisation's, so that a mistake in attention, position or state changes the output visibly.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trellium.errors import ConfigError

_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _COMMON),
    "qwen2": ("qwen2", _COMMON),
    "qwen3": ("qwen3", _COMMON),
    "qwen3_moe": ("qwen3_moe", {**_COMMON, **_EXPERTS, "decoder_sparse_step": 1, "output_router_logits": True}),
    "gemma2": (
        "gemma2",
        {**_COMMON, "sliding_window": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "gemma3_text",
        {
            **_COMMON,
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt_oss": ("gpt_oss", {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "cohere": ("cohere", {**_COMMON, "logit_scale": 0.25}),
    "granite": ("granite", {**_COMMON, "logits_scaling": 4.0}),
    "phi": ("phi", {**_COMMON, "num_key_value_heads": 4}),
    "smollm3": ("smollm3", _COMMON),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "initializer_range": 0.2}),
    "mamba2": (
        "mamba2",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 8,
            "n_groups": 1,
            "chunk_size": 8,
            "initializer_range": 0.2,
        },
    ),
}

KINDS = tuple(_KINDS)
"""The architectures that `tiny_model` knows."""


def tiny_model(kind: str = "llama", *, vocab_size: int = 64, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of an architecture, in float32 on the CPU, the same for the same arguments.

    Args:
        kind: one of `KINDS`.
        vocab_size: tokens in its vocabulary; 0 is padding and beginning, 1 is end.
        seed: of its weights; the global generator is left as it was.
        **overrides: fields of its configuration.

    Raises:
        ConfigError: an unknown kind.
    """
    if kind not in _KINDS:
        raise ConfigError(f"no tiny model of kind {kind!r}; known are {', '.join(KINDS)}")
    model_type, fields = _KINDS[kind]
    tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
    config = AutoConfig.for_model(model_type, **{"vocab_size": vocab_size, **tokens, **fields, **overrides})
    for dropout in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if hasattr(config, dropout) and dropout not in overrides:
            setattr(config, dropout, 0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # Heads and biases start at zero in some architectures, which would hide a gradient that is wrong.
        for parameter in model.parameters():
            if parameter.ndim == 1 and not parameter.any():
                torch.nn.init.normal_(parameter, std=0.1)
    return model
