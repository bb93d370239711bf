"""Trellium: post-training for language models on accelerators that compile ahead of time.

Names are loaded when first used, so that `import torch` can load the emulated device from this package in milliseconds. They are TRL's: a script changes
its import. Names of TRL's that are not here yet are known, and say what to use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "BEMACallback": "trellium.trainers.moving_average",
    "DPOConfig": "trellium.trainers.dpo_config",
    "DPOTrainer": "trellium.trainers.dpo",
    "DatasetMixtureConfig": "trellium.trainers.dataset_mixture",
    "KTOConfig": "trellium.trainers.kto_config",
    "KTOTrainer": "trellium.trainers.kto",
    "LogCompletionsCallback": "trellium.trainers.callbacks",
    "ModelConfig": "trellium.trainers.script_options",
    "RewardConfig": "trellium.trainers.reward_config",
    "RewardTrainer": "trellium.trainers.reward",
    "RichProgressCallback": "trellium.trainers.callbacks",
    "SFTConfig": "trellium.trainers.sft_config",
    "SFTTrainer": "trellium.trainers.sft",
    "ScriptArguments": "trellium.trainers.script_options",
    "TrlParser": "trellium.trainers.script_parser",
    "add_response_schema": "trellium.data.responses",
    "clone_chat_template": "trellium.models.cloned_template",
    "get_dataset": "trellium.trainers.dataset_mixture",
    "get_peft_config": "trellium.trainers.script_options",
    "get_training_chat_template": "trellium.data.template_marks",
    "init_zero_verbose": "trellium.trainers.quiet",
    "parse_response": "trellium.data.responses",
    "pack_dataset": "trellium.trainers.dataset_packing",
    **dict.fromkeys(
        (
            "apply_chat_template",
            "extract_prompt",
            "is_conversational",
            "is_conversational_from_value",
            "maybe_apply_chat_template",
            "maybe_convert_to_chatml",
            "maybe_extract_prompt",
            "maybe_unpair_preference_dataset",
            "prepare_multimodal_messages",
            "supports_tool_calling",
            "unpair_preference_dataset",
        ),
        "trellium.data.conversion",
    ),
}

if TYPE_CHECKING:
    from trellium.data.conversion import (
        apply_chat_template,
        extract_prompt,
        is_conversational,
        is_conversational_from_value,
        maybe_apply_chat_template,
        maybe_convert_to_chatml,
        maybe_extract_prompt,
        maybe_unpair_preference_dataset,
        prepare_multimodal_messages,
        supports_tool_calling,
        unpair_preference_dataset,
    )
    from trellium.data.responses import add_response_schema, parse_response
    from trellium.data.template_marks import get_training_chat_template
    from trellium.models.cloned_template import clone_chat_template
    from trellium.trainers.callbacks import LogCompletionsCallback, RichProgressCallback
    from trellium.trainers.dataset_mixture import DatasetMixtureConfig, get_dataset
    from trellium.trainers.dataset_packing import pack_dataset
    from trellium.trainers.dpo import DPOTrainer
    from trellium.trainers.dpo_config import DPOConfig
    from trellium.trainers.kto import KTOTrainer
    from trellium.trainers.kto_config import KTOConfig
    from trellium.trainers.moving_average import BEMACallback
    from trellium.trainers.quiet import init_zero_verbose
    from trellium.trainers.reward import RewardTrainer
    from trellium.trainers.reward_config import RewardConfig
    from trellium.trainers.script_options import ModelConfig, ScriptArguments, get_peft_config
    from trellium.trainers.script_parser import TrlParser
    from trellium.trainers.sft import SFTTrainer
    from trellium.trainers.sft_config import SFTConfig

__all__ = [
    "BEMACallback",
    "DPOConfig",
    "DPOTrainer",
    "DatasetMixtureConfig",
    "KTOConfig",
    "KTOTrainer",
    "LogCompletionsCallback",
    "ModelConfig",
    "RewardConfig",
    "RewardTrainer",
    "RichProgressCallback",
    "SFTConfig",
    "SFTTrainer",
    "ScriptArguments",
    "TrlParser",
    "__version__",
    "add_response_schema",
    "apply_chat_template",
    "clone_chat_template",
    "extract_prompt",
    "get_dataset",
    "get_peft_config",
    "get_training_chat_template",
    "init_zero_verbose",
    "is_conversational",
    "is_conversational_from_value",
    "maybe_apply_chat_template",
    "maybe_convert_to_chatml",
    "maybe_extract_prompt",
    "maybe_unpair_preference_dataset",
    "pack_dataset",
    "parse_response",
    "prepare_multimodal_messages",
    "supports_tool_calling",
    "unpair_preference_dataset",
]

_METHODS = ("Distillation", "GRPO", "RLOO")
_FROM_TRL = "It is not here yet: take it from trl meanwhile."
_NOT_YET = {
    **{f"{method}{kind}": _FROM_TRL for method in _METHODS for kind in ("Config", "Trainer")},
    "SyncRefModelCallback": "The trainers do it themselves: set sync_ref_model=True in DPOConfig or KTOConfig.",
    "WeaveCallback": "It sends completions to a service, by a package of its own. LogCompletionsCallback writes them to completions.jsonl in the output folder.",
    "create_reference_model": "Leave ref_model out: the reference is the model as it is when the trainer is made.",
    "get_quantization_config": "Quantized base models are not supported yet: leave the call out.",
}
"""Public names of TRL 1.16 that are not here, and what to do."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _NOT_YET:
        # Of an AttributeError `from trellium import …` would drop the text.
        raise ImportError(f"trellium has no {name}. {_NOT_YET[name]}")
    raise AttributeError(f"module 'trellium' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
