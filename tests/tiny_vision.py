"""Tiny vision-language models of four families, their processors, and small images: made here, nothing is downloaded.

- `llava`: image features take the place of placeholders; plain positions.
- `idefics3` (SmolVLM's): the same with a fixed number of images a row, padded by black ones.
- `gemma3`: the tokens of an image see each other in both directions, which the model learns from `token_type_ids`.
- `qwen2_vl`: images of any size, and positions in three dimensions, which the model makes from `mm_token_type_ids` and `image_grid_thw`.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, List, concatenate_datasets
from datasets import Image as ImageFeature
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)

from tests.tiny_tokenizer import tiny_tokenizer

FAMILIES = ("llava", "idefics3", "gemma3", "qwen2_vl")
VOCABULARY = 448

_IMAGES = {
    "llava": "<image>",
    "idefics3": "<image>",
    "gemma3": "<start_of_image>",
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
}
_SPECIAL = {
    "llava": ["<image>"],
    "idefics3": ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"],
    "gemma3": ["<start_of_image>", "<image_soft_token>", "<end_of_image>"],
    "qwen2_vl": ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"],
}


def chat_template(family: str) -> str:
    """A template that writes blocks, and nothing of a content that is a text; with the marks by which transformers knows what the assistant wrote."""
    content = (
        "{% for block in message.content %}"
        "{% if block.type == 'image' %}"
        + _IMAGES[family]
        + "{% elif block.type == 'text' %}{{ block.text }}{% endif %}"
        "{% endfor %}<|im_end|>"
    )
    return (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.role == 'assistant' %}{% generation %}" + content + "{% endgeneration %}"
        "{% else %}" + content + "{% endif %}{{ '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def _tokenizer(family: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(_SPECIAL[family], special_tokens=True)
    tokenizer.eos_token = "<|im_end|>"
    if family != "gemma3":
        return tokenizer
    names = dict(zip(("boi_token", "image_token", "eoi_token"), _SPECIAL[family], strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
        extra_special_tokens=names,
    )


def tiny_processor(family: str) -> ProcessorMixin:
    """The family's processor over images of 16 pixels (`qwen2_vl`: of their own size), with a tokenizer of about 400 tokens."""
    tokenizer = _tokenizer(family)
    template = chat_template(family)
    if family == "llava":
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
        from transformers.models.llava.processing_llava import LlavaProcessor

        images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
        return LlavaProcessor(
            images,
            tokenizer,
            patch_size=8,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=template,
        )
    if family == "idefics3":
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
        from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

        images = Idefics3ImageProcessorPil(
            size={"longest_edge": 16}, max_image_size={"longest_edge": 16}, do_image_splitting=False
        )
        return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)
    if family == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
        from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

        images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
        return Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=template)
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

    class WithoutVideos(Qwen2VLProcessor):
        """Its reader of videos needs torchvision."""

        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
            self.image_token, self.video_token = "<|image_pad|>", None
            self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=1024)
    return WithoutVideos(images, tokenizer, chat_template=template)


def tiny_vision_model(family: str, *, seed: int = 0) -> PreTrainedModel:
    """A random model of the family that fits `tiny_processor`, in float32 on the CPU."""
    ids = dict(zip(_SPECIAL[family], _tokenizer(family).convert_tokens_to_ids(_SPECIAL[family]), strict=True))
    text: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 2,
        "initializer_range": 0.2,
    }
    vision: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
        "initializer_range": 0.2,
    }
    settings: dict[str, Any] = {}
    if family == "llava":
        text["model_type"], vision["model_type"] = "llama", "clip_vision_model"
        settings = {"image_token_index": ids["<image>"]}
    elif family == "idefics3":
        text["model_type"] = "llama"
        settings = {"image_token_id": ids["<image>"], "scale_factor": 1}
    elif family == "gemma3":
        text |= {
            "query_pre_attn_scalar": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        }
        settings = {"image_token_index": ids["<image_soft_token>"], "mm_tokens_per_image": 4}
        settings |= {"boi_token_index": ids["<start_of_image>"], "eoi_token_index": ids["<end_of_image>"]}
    else:
        text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
        vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
        vision |= {"spatial_merge_size": 2, "initializer_range": 0.2}
        settings = {"image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"]}
        settings |= {"vision_start_token_id": ids["<|vision_start|>"], "vision_end_token_id": ids["<|vision_end|>"]}
    config = AutoConfig.for_model(family, text_config=text, vision_config=vision, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if not parameter.any():  # a projection or bias that starts at zero would hide what it reads
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def picture(seed: int, *, width: int = 16, height: int = 16) -> Image.Image:
    """Coloured noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _said(draw: random.Random, most: int = 6) -> str:
    return " ".join(
        draw.choice(["the", "cat", "sat", "on", "a", "red", "mat", "and", "saw", "it"])
        for _ in range(draw.randint(1, most))
    )


def _pictures(index: int) -> list[Image.Image]:
    """Two, one or none, of unequal sizes."""
    return [picture(3 * index + each, width=16 + 8 * each) for each in range((2, 1, 0)[index % 3])]


def _rows(count: int, make: Any) -> Dataset:
    draw = random.Random(0)
    features = Features({"images": List(ImageFeature())})
    images = Dataset.from_dict({"images": [_pictures(index) for index in range(count)]}, features=features)
    return concatenate_datasets([images, Dataset.from_list([make(draw, index) for index in range(count)])], axis=1)


def _turn(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def message_rows(count: int = 12) -> Dataset:
    """Conversations of two or four turns."""
    return _rows(
        count,
        lambda draw, index: {
            "messages": [
                turn
                for _ in range(1 + index % 2)
                for turn in (*_turn("user", _said(draw)), *_turn("assistant", _said(draw)))
            ]
        },
    )


def completion_rows(count: int = 12) -> Dataset:
    """A prompt and its completion, in messages."""
    return _rows(
        count,
        lambda draw, index: {"prompt": _turn("user", _said(draw)), "completion": _turn("assistant", _said(draw))},
    )


def compared_rows(count: int = 12) -> Dataset:
    """Preferences."""
    return _rows(
        count,
        lambda draw, index: {
            "prompt": _turn("user", _said(draw)),
            "chosen": _turn("assistant", _said(draw)),
            "rejected": _turn("assistant", _said(draw)),
        },
    )


def judged_rows(count: int = 12) -> Dataset:
    """Judged completions."""
    return _rows(
        count,
        lambda draw, index: {
            "prompt": _turn("user", _said(draw)),
            "completion": _turn("assistant", _said(draw)),
            "label": index % 2 == 0,
        },
    )
