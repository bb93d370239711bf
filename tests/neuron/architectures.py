"""A hundred text-generation architectures, each as a model that trains in a fraction of a second.

Every entry is a model type of transformers 5.24 and the few configuration fields that make it small: two to four layers (one of each kind which the
architecture has: sliding and full attention, linear and full, dense and sparse), hidden size 32 to 64, 128 tokens, 4 experts of which 2 are chosen.
Nothing is downloaded: `build` makes the model from its configuration class, with random weights of the seed given. One model has 10 thousand to
a million parameters.

`ids` and `labels` of `batch` are two rows of 24 and 17 tokens, the second padded on the right. Its length is a multiple of 8 because xLSTM works in chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

VOCABULARY = 128
LENGTHS = (24, 17)


@dataclass(frozen=True)
class Architecture:
    """One model type in its tiny form.

    Attributes:
        model_type: transformers' name, as in `config.model_type`.
        layers: the kinds of layers that the tiny model has.
        config: the fields that differ from the configuration class's defaults.
        note: what a reader of the table should know.
    """

    model_type: str
    layers: str
    config: dict[str, Any]
    note: str = ""


_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DENSE = {
    **_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_HEAD = {**_DENSE, "head_dim": 8}
_ALL_HEADS = {name: value for name, value in _DENSE.items() if name != "num_key_value_heads"}
_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_GPT = {**_TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1}
# Multi-head latent attention: queries and keys through a low rank, a rotary part beside a plain one.
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_LATENT_DENSE = {**_DENSE, **_LATENT, "num_key_value_heads": 4}
_INDEXER = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 4}
_DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_LINEAR_FULL = {"layer_types": ["linear_attention", "full_attention"]}
_MAMBA_2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
_VISION = {
    "patch_size": 4,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
}

ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("llama", "full", {**_HEAD}),
    Architecture("qwen2", "full", {**_DENSE}),
    Architecture("qwen3", "full", {**_HEAD}),
    Architecture("mistral", "sliding", {**_HEAD, "sliding_window": 8}),
    Architecture("gpt2", "full", {**_GPT}),
    Architecture("gemma3_text", "sliding, full", {**_HEAD, **_SLIDING, "query_pre_attn_scalar": 8}),
    Architecture("gemma2", "sliding, full", {**_HEAD, **_SLIDING, "query_pre_attn_scalar": 8}),
    Architecture("gemma", "full", {**_HEAD}),
    Architecture("qwen3_moe", "full", {**_HEAD, **_EXPERTS, "moe_intermediate_size": 24}),
    Architecture("gpt_oss", "sliding, full", {**_HEAD, **_SLIDING, **_LOCAL_EXPERTS}, "attention sinks"),
    Architecture("phi3", "full", {**_DENSE}),
    Architecture("qwen3_5_text", "linear, full", {**_HEAD, **_DELTA, **_LINEAR_FULL}),
    Architecture(
        "qwen3_5_moe_text",
        "linear, full",
        {
            **_HEAD,
            **_DELTA,
            **_LINEAR_FULL,
            **_EXPERTS,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
    Architecture(
        "qwen3_next",
        "linear, full",
        {
            **_HEAD,
            **_DELTA,
            **_LINEAR_FULL,
            **_EXPERTS,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
    Architecture(
        "gemma4_text",
        "sliding, full",
        {
            **_HEAD,
            **_SLIDING,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "per_layer_config": {"1": {"head_dim": 16}},
        },
        "with its expert block",
    ),
    Architecture("mixtral", "full", {**_HEAD, **_LOCAL_EXPERTS}),
    Architecture("phi", "full", {**_DENSE}),
    Architecture(
        "qwen2_moe",
        "full",
        {**_DENSE, **_EXPERTS, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    ),
    Architecture("gpt_neox", "full", {**_ALL_HEADS}),
    Architecture(
        "opt",
        "full",
        {
            **_TOKENS,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
        },
    ),
    Architecture("deepseek_v3", "full", {**_LATENT_DENSE, **_ROUTED, "first_k_dense_replace": 1}),
    Architecture(
        "llama4_text",
        "chunked, full",
        {
            **_HEAD,
            **_LOCAL_EXPERTS,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 8,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "moe_layers": [0, 1],
        },
    ),
    Architecture("smollm3", "full", {**_DENSE, "no_rope_layers": [1, 0]}),
    Architecture("granite", "full", {**_DENSE}),
    Architecture("olmo2", "full", {**_DENSE}),
    Architecture(
        "falcon",
        "full",
        {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 64},
    ),
    Architecture("bloom", "full", {**_TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "ALiBi"),
    Architecture(
        "gemma3n_text",
        "sliding, full",
        {
            **_HEAD,
            **_SLIDING,
            "intermediate_size": [48, 48],
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": [0.5, 0.0],
        },
    ),
    Architecture("ministral3", "full", {**_HEAD}),
    Architecture("glm4_moe", "full", {**_HEAD, **_ROUTED, "first_k_dense_replace": 1}),
    Architecture("deepseek_v2", "full", {**_LATENT_DENSE, **_ROUTED, "first_k_dense_replace": 1}),
    Architecture(
        "granitemoehybrid",
        "ssm, full",
        {
            **_DENSE,
            **_LOCAL_EXPERTS,
            **_MAMBA_2,
            **_LINEAR_FULL,
            "shared_intermediate_size": 24,
        },
    ),
    Architecture("lfm2", "conv, full", {**_DENSE, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
    Architecture(
        "nemotron_h",
        "ssm, full",
        {
            **_HEAD,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "ssm_state_size": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "chunk_size": 8,
            "moe_shared_expert_intermediate_size": 24,
            "n_routed_experts": 4,
            "moe_intermediate_size": 24,
            "num_experts_per_tok": 2,
        },
        "one layer each: Mamba-2, experts, attention, dense",
    ),
    Architecture("starcoder2", "full", {**_DENSE}),
    Architecture("cohere2", "sliding, full", {**_HEAD, **_SLIDING}),
    Architecture("stablelm", "full", {**_DENSE}),
    Architecture("olmoe", "full", {**_DENSE, **_EXPERTS}),
    Architecture(
        "mamba",
        "ssm",
        {**_TOKENS, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "time_step_rank": 4},
    ),
    Architecture(
        "kimi_linear",
        "linear, full",
        {
            **_LATENT_DENSE,
            "q_lora_rank": None,
            **_LINEAR_FULL,
            "mlp_layer_types": ["dense", "sparse"],
            "moe_intermediate_size": 24,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
        },
    ),
    Architecture(
        "gpt_neo",
        "full, sliding",
        {
            **_TOKENS,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
            "max_position_embeddings": 128,
        },
    ),
    Architecture("gptj", "full", {**_GPT, "rotary_dim": 4}),
    Architecture("gpt_bigcode", "full", {**_GPT}, "multi-query"),
    Architecture("olmo", "full", {**_DENSE}),
    Architecture("olmo3", "sliding, full", {**_DENSE, **_SLIDING}),
    Architecture("cohere", "full", {**_DENSE}),
    Architecture("glm", "full", {**_HEAD}),
    Architecture("glm4", "full", {**_HEAD}),
    Architecture("glm4_moe_lite", "full", {**_LATENT_DENSE, **_ROUTED, "mlp_layer_types": ["dense", "sparse"]}),
    Architecture(
        "glm_moe_dsa",
        "indexed (top-k)",
        {
            **_LATENT_DENSE,
            **_ROUTED,
            **_INDEXER,
            "mlp_layer_types": ["dense", "sparse"],
            "layer_types": ["indexed_attention"] * 2,
            "indexer_types": ["full", "shared"],
        },
    ),
    Architecture(
        "glm5_next",
        "linear, indexed (top-k)",
        {
            "text_config": {
                **_LATENT_DENSE,
                **_ROUTED,
                **_INDEXER,
                "qk_rope_head_dim": 0,
                "mlp_layer_types": ["dense", "sparse"],
                "layer_types": ["linear_attention", "indexed_attention"],
                "indexer_types": ["full", "full"],
                "index_kpool": 4,
                "linear_head_dim": 8,
                "linear_num_heads": 4,
                "hc_mult": 2,
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "num_heads": 2,
                "image_size": 16,
                "patch_size": 4,
                "out_hidden_size": 32,
                "intermediate_size": 24,
                "projection_intermediate_size": 24,
            },
            "image_token_id": 120,
            "video_token_id": 121,
            "image_start_token_id": 122,
            "image_end_token_id": 123,
            "video_start_token_id": 124,
            "video_end_token_id": 125,
        },
        "text only; the vision tower is there and gets no gradient",
    ),
    Architecture(
        "minimax",
        "full, linear",
        {**_HEAD, **_LOCAL_EXPERTS, "layer_types": ["full_attention", "linear_attention"], "block_size": 8},
        "lightning attention",
    ),
    Architecture("minimax_m2", "full", {**_HEAD, **_LOCAL_EXPERTS}),
    Architecture(
        "deepseek_v32",
        "indexed (top-k)",
        {
            **_LATENT_DENSE,
            **_ROUTED,
            **_INDEXER,
            "mlp_layer_types": ["dense", "sparse"],
            "layer_types": ["indexed_attention"] * 2,
        },
    ),
    Architecture(
        "deepseek_v4",
        "compressed, compressed top-k",
        {
            **_TOKENS,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "q_lora_rank": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
            "mlp_layer_types": ["hash_moe", "moe"],
            "hc_mult": 2,
            "sliding_window": 8,
            "o_groups": 2,
            "o_lora_rank": 8,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 4,
            "partial_rotary_factor": 0.5,
        },
        "hyper-connections; one layer routes by a hash of the token",
    ),
    Architecture(
        "kimi_k25",
        "full",
        {
            "text_config": {
                **_LATENT_DENSE,
                **_ROUTED,
                "model_type": "deepseek_v3",
                "first_k_dense_replace": 1,
            },
            "vision_config": _VISION,
            "projection_hidden_size": 16,
            "image_token_id": 120,
            "video_token_id": 121,
            "vision_start_token_id": 122,
            "vision_end_token_id": 123,
        },
        "text only; the vision tower is there and gets no gradient",
    ),
    Architecture(
        "qwen4_exp_text",
        "linear, indexed (top-k)",
        {
            **_HEAD,
            **_DELTA,
            **_EXPERTS,
            "layer_types": ["linear_attention", "indexed_attention"],
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "hc_count": 2,
            "hc_lowrank": 8,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
        },
    ),
    Architecture(
        "mamba2",
        "ssm",
        {
            **_TOKENS,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 8,
            "n_groups": 1,
            "chunk_size": 8,
        },
    ),
    Architecture(
        "falcon_mamba",
        "ssm",
        {**_TOKENS, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "time_step_rank": 4},
    ),
    Architecture("falcon_h1", "ssm + full in one layer", {**_DENSE, **_MAMBA_2, "mamba_d_ssm": 64}),
    Architecture(
        "jamba",
        "ssm, full",
        {
            **_DENSE,
            **_EXPERTS,
            "num_hidden_layers": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    Architecture("bamba", "ssm, full", {**_DENSE, **_MAMBA_2, "attn_layer_indices": [1]}),
    Architecture(
        "zamba",
        "ssm, ssm + full in one layer",
        {
            **_TOKENS,
            "hidden_size": 32,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
            "max_position_embeddings": 128,
        },
        "its attention block is shared between layers",
    ),
    Architecture(
        "zamba2",
        "ssm, ssm + full in one layer",
        {
            **_TOKENS,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "chunk_size": 8,
            "adapter_rank": 4,
            "use_mamba_kernels": False,
            "max_position_embeddings": 128,
        },
        "its attention block is shared between layers, with an adapter each",
    ),
    Architecture("granitemoe", "full", {**_DENSE, **_LOCAL_EXPERTS}),
    Architecture("granitemoeshared", "full", {**_DENSE, **_LOCAL_EXPERTS, "shared_intermediate_size": 24}),
    Architecture("nemotron", "full", {**_HEAD}),
    Architecture(
        "lfm2_moe",
        "conv, full",
        {
            **_DENSE,
            **_EXPERTS,
            "moe_intermediate_size": 24,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention"],
        },
    ),
    Architecture("exaone4", "sliding, full", {**_DENSE, **_SLIDING}),
    Architecture("ernie4_5", "full", {**_HEAD}),
    Architecture(
        "ernie4_5_moe",
        "full",
        {
            **_DENSE,
            "moe_intermediate_size": 24,
            "moe_k": 2,
            "moe_num_experts": 4,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
        },
    ),
    Architecture("hunyuan_v1_dense", "full", {**_HEAD}),
    Architecture("hunyuan_v1_moe", "full", {**_HEAD, "num_experts": 4, "moe_topk": 2}),
    Architecture("seed_oss", "full", {**_HEAD}),
    Architecture("dots1", "full", {**_DENSE, **_ROUTED, "n_shared_experts": 1, "first_k_dense_replace": 1}),
    Architecture("arcee", "full", {**_HEAD}),
    Architecture("apertus", "full", {**_DENSE}),
    Architecture("helium", "full", {**_HEAD}),
    Architecture("diffllama", "full", {**_HEAD}),
    Architecture("bitnet", "full", {**_DENSE}),
    Architecture("phimoe", "full", {**_DENSE, **_LOCAL_EXPERTS}),
    Architecture("ministral", "sliding", {**_HEAD, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2}),
    Architecture("codegen", "full", {**_GPT, "n_ctx": 128, "rotary_dim": 4}),
    Architecture("persimmon", "full", {**_ALL_HEADS}),
    Architecture(
        "xglm",
        "full",
        {
            **_TOKENS,
            "d_model": 32,
            "ffn_dim": 48,
            "num_layers": 2,
            "attention_heads": 4,
            "max_position_embeddings": 128,
            "decoder_start_token_id": 1,
        },
    ),
    Architecture("biogpt", "full", {**_ALL_HEADS}),
    Architecture("mpt", "full", {**_TOKENS, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}, "ALiBi"),
    Architecture(
        "dbrx",
        "full",
        {
            **_TOKENS,
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 128,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {
                "hidden_size": 32,
                "ffn_hidden_size": 24,
                "moe_num_experts": 4,
                "moe_top_k": 2,
            },
        },
        "its own loop over experts, by `nonzero`",
    ),
    Architecture(
        "longcat_flash",
        "full",
        {
            **_TOKENS,
            **_LATENT,
            "hidden_size": 32,
            "num_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 24,
            "moe_topk": 2,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "max_position_embeddings": 128,
        },
        "its own loop over experts, by `nonzero`; two experts do nothing",
    ),
    Architecture("flex_olmo", "full", {**_DENSE, **_EXPERTS}),
    Architecture("doge", "full", {**_DENSE, "keep_window_size": 8}),
    Architecture("vaultgemma", "sliding, full", {**_HEAD, **_SLIDING, "query_pre_attn_scalar": 8}),
    Architecture(
        "t5gemma",
        "encoder-decoder: sliding, full, cross",
        {
            **_TOKENS,
            "encoder": {**_HEAD, **_SLIDING, "query_pre_attn_scalar": 8},
            "decoder": {**_HEAD, **_SLIDING, "query_pre_attn_scalar": 8, "cross_attention_hidden_size": 32},
        },
        "the rows are the encoder's input and the decoder's labels",
    ),
    Architecture(
        "muse_spark",
        "sliding, full",
        {
            "text_config": {
                **_HEAD,
                **_SLIDING,
                **_LOCAL_EXPERTS,
                "moe_intermediate_size": 24,
                "moe_hidden_size": 16,
                "mlp_layer_types": ["dense", "sparse"],
                "layer_rope_theta": [10000.0, 0],
            },
            "vision_config": {**_VISION, "layer_types": ["full_attention"]},
            "audio_config": {
                "patch_sizes": [2, 2],
                "hidden_sizes": [8, 8],
                "depths": [1, 1],
                "num_hidden_layers": 2,
                "out_hidden_size": 32,
            },
            "out_hidden_size": 32,
            "projector_hidden_size": 16,
            "image_token_id": 120,
            "video_token_id": 121,
            "audio_token_id": 122,
        },
        "text only; the vision and audio towers are there and get no gradient",
    ),
    Architecture(
        "muse_glimmer",
        "sliding, full",
        {
            "text_config": {**_HEAD, **_SLIDING, "layer_rope_theta": [10000.0, 0]},
            "vision_config": {**_VISION, "layer_types": ["full_attention"]},
            "out_hidden_size": 32,
            "projector_hidden_size": 16,
            "image_token_id": 120,
            "video_token_id": 121,
        },
        "text only; the vision tower is there and gets no gradient",
    ),
    Architecture(
        "recurrent_gemma",
        "recurrent (RG-LRU), sliding",
        {
            **_TOKENS,
            "hidden_size": 32,
            "intermediate_size": 48,
            "lru_width": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "attention_window_size": 8,
        },
    ),
    Architecture(
        "rwkv",
        "recurrent (RWKV)",
        {
            **_TOKENS,
            "hidden_size": 32,
            "attention_hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "context_length": 64,
        },
    ),
    Architecture(
        "xlstm",
        "recurrent (mLSTM)",
        {
            **_TOKENS,
            "hidden_size": 32,
            "embedding_dim": 32,
            "num_hidden_layers": 2,
            "num_blocks": 2,
            "num_heads": 4,
            "chunk_size": 8,
            "ffn_round_up_to_multiple_of": 8,
        },
        "trains only with `use_cache=False`; the length must divide by the chunk",
    ),
    Architecture("nanochat", "full", {**_DENSE}),
    Architecture("openai-gpt", "full", {**_GPT}),
)


def build(architecture: Architecture, *, seed: int = 0) -> PreTrainedModel:
    """The tiny model on the CPU in float32, in training mode, its weights drawn with `seed`; dropout as the configuration class has it.

    Raises:
        KeyError: the installed transformers has no such model type, or no class that generates text with it.
    """
    config = AutoConfig.for_model(architecture.model_type, **architecture.config)
    for mapping in (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    ):
        if type(config) in mapping:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return mapping[type(config)](config).float().train()
    raise KeyError(f"{architecture.model_type}: transformers has no model of it which generates text")


def batch(*, seed: int = 0) -> dict[str, torch.Tensor]:
    """Two rows of random tokens, 24 and 17 long, padded on the right to 24: `input_ids`, `attention_mask`, `labels`, each int64 `[2, 24]`."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, 100, (len(LENGTHS), max(LENGTHS)), generator=generator)
    attention_mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    input_ids = input_ids * attention_mask
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "labels": input_ids.masked_fill(attention_mask == 0, -100),
    }
