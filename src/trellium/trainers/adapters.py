"""Train an adapter instead of the model: what PEFT needs from us, and what it must not do.

Scores are computed from the output head's own weight, so a LoRA on the head would be passed by and is refused; so is one that puts virtual tokens
before the prompt, whose tokens have no place in a forest. A head that is trained whole, or in some rows because the embeddings it is tied to are, is its own weight.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from trellium.errors import ConfigError, unknown_name
from trellium.models.scoring import adapter_is_passed_by
from trellium.trainers.base_config import BaseConfig


def is_adapted(model: nn.Module) -> bool:
    """Whether `model` is a PEFT model. Does not import PEFT where nobody did."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def wrap_with_adapter(model: nn.Module, peft_config: Any, args: BaseConfig) -> nn.Module:
    """`model` with the adapter that `peft_config` describes, or as it came if that is None; checked for training either way.

    Args:
        model: a causal language model, or a PEFT model with something to train.
        peft_config: a `peft.PeftConfig`, e.g. `LoraConfig`, or None.
        args: says whether activations are recomputed and how.

    Raises:
        ConfigError: an adapter for a model that has one; one on the output head or of virtual tokens; nothing to train.
    """
    if peft_config is not None:
        model = _new_adapter(model, peft_config)
    if not is_adapted(model):
        return model
    if model.active_peft_config.is_prompt_learning:
        raise ConfigError(
            f"{type(model.active_peft_config).__name__} puts virtual tokens before the prompt, which cannot be trained here. Use LoRA."
        )
    head = model.get_base_model().get_output_embeddings()
    if head is not None and adapter_is_passed_by(head):
        raise ConfigError(
            "the adapter is on the output head, which is scored from its own weight, so the adapter would be passed by. "
            "Take the head out of target_modules, or train it whole: modules_to_save."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "the adapter has nothing to train: it was loaded for inference. Load it with PeftModel.from_pretrained(…, is_trainable=True)."
        )
    if (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        # The reentrant form drops a block whose inputs need no gradient, and the embeddings below an adapter are frozen.
        model.enable_input_require_grads()
    return model


def _new_adapter(model: nn.Module, peft_config: Any) -> nn.Module:
    from peft import PeftConfig, get_peft_model

    if not isinstance(peft_config, PeftConfig):
        raise ConfigError(f"peft_config must be a peft.PeftConfig such as LoraConfig, got {type(peft_config).__name__}")
    if is_adapted(model):
        raise ConfigError(
            "the model has an adapter already, and peft_config asks for one more. Give one of the two: merge the first with "
            "model.merge_and_unload(), or leave peft_config out and train the one it has."
        )
    _check_names(model, peft_config)
    try:
        with warnings.catch_warnings():
            # PEFT asks by a name that transformers has renamed.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            return get_peft_model(model, peft_config)
    except ValueError as error:
        raise ConfigError(f"PEFT cannot put this adapter on {type(model).__name__}: {error}") from error


def _check_names(model: nn.Module, peft_config: Any) -> None:
    """PEFT passes by a name that nothing has, and what was meant would stay as it is."""
    modules = [name for name, _ in model.named_modules() if name]
    parameters = [name for name, _ in model.named_parameters()]
    for field, names in (("modules_to_save", modules), ("target_parameters", parameters)):
        for wanted in getattr(peft_config, field, None) or ():
            if not any(name.endswith(wanted) for name in names):
                known = {name.rpartition(".")[2] for name in names}
                raise ConfigError(unknown_name(f"{field}: the model has nothing called", wanted, known))
