"""Give a sequence-classification model a second way to be called: a forest in, one reward a sample out.

Called with `sample_position`, the model runs its backbone on the forest and puts its `score` layer to the hidden state of each sample's last token, wherever
that lies: known by place, never by a padding token. Called in any other way it is the model's own forward. What a reward model pools is what its own forward
pools from one unpadded row; that is measured once, as for the output head of a language model.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils import ModelOutput

from trellium.errors import ModelError
from trellium.models.attention import forest_arguments, forest_reading
from trellium.models.forwards import replace_forward
from trellium.models.loading import load_with


@dataclass
class RewardOutput(ModelOutput):
    """What a reward model's forward over a forest returns.

    Attributes:
        rewards: `[S]` float32, one a sample; differentiable.
        aux_loss: None; a reward model's routers are not balanced.
    """

    rewards: Tensor | None = None
    aux_loss: Tensor | None = None


def load_reward_model(name_or_path: str | os.PathLike | None = None, **init_kwargs: Any) -> PreTrainedModel:
    """A sequence-classification model with one label; a causal language model's weights get a new `score` layer.

    Args, errors: as for `trellium.models.loading.load_model`.
    """
    return load_with(AutoModelForSequenceClassification, name_or_path, new="score.", num_labels=1, **init_kwargs)


def install_rewards(model: nn.Module) -> nn.Module:
    """Let `model` be called as `model(input_ids=…, subtree_end=…, position_ids=…, sample_position=…)`; in place, once.

    Raises:
        ModelError: not a sequence-classification model of transformers with one label and a `score` layer on its last token.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    name = type(base).__name__
    if not isinstance(base, PreTrainedModel) or not isinstance(getattr(base, "score", None), nn.Module):
        raise ModelError(
            f"a reward model is a sequence-classification model with a 'score' layer on its last token, got {name}. "
            "AutoModelForSequenceClassification.from_pretrained(…, num_labels=1) makes one of a decoder."
        )
    if base.config.num_labels != 1:
        raise ModelError(f"a reward is one number, but {name} has num_labels={base.config.num_labels}. Load it with 1.")
    if not any(parameter.is_meta for parameter in base.parameters()):
        _measure(base)
    replace_forward(base, "sample_position", _rewards)
    return model


def _rewards(
    model: PreTrainedModel,
    base: type[PreTrainedModel],
    *,
    input_ids: Tensor,
    subtree_end: Tensor,
    position_ids: Tensor,
    sample_position: Tensor,
    return_dict: bool | None = None,
    **others: Any,
) -> RewardOutput:
    # PEFT's wrapper of classifiers passes all arguments on, most of them as None, and return_dict as a value.
    given = [name for name, value in others.items() if value is not None]
    if return_dict is False:
        given.append("return_dict=False")
    if given:
        raise ModelError(f"a call for rewards does not take {', '.join(sorted(given))}")
    arguments = forest_arguments(forest_reading(model), subtree_end, position_ids, model.dtype)
    hidden = model.base_model(input_ids=input_ids, use_cache=False, return_dict=True, **arguments).last_hidden_state
    last = hidden.reshape(-1, hidden.shape[-1]).index_select(0, sample_position)
    return RewardOutput(rewards=model.score(last).squeeze(-1).float())


@torch.no_grad()
def _measure(model: PreTrainedModel) -> None:
    """Raise unless the model's own forward gives `score` of the last token's hidden state."""
    tokens = torch.arange(3, 8, device=model.get_input_embeddings().weight.device)[None]
    modes = [module for module in model.modules() if module.training]
    model.eval()
    pad, model.config.pad_token_id = model.config.pad_token_id, 0  # else a batch of more than one is refused
    try:
        logits = model(input_ids=tokens, use_cache=False).logits.float()
        hidden = model.base_model(input_ids=tokens, use_cache=False, return_dict=True).last_hidden_state
        expected = model.score(hidden[:, -1]).float()
    finally:
        model.config.pad_token_id = pad
        for module in modes:
            module.training = True
    tolerance = 1e-4 if model.dtype in (torch.float32, torch.float64) else 3e-2
    if logits.shape != expected.shape or not torch.allclose(logits, expected, rtol=tolerance, atol=tolerance):
        raise ModelError(
            f"{type(model).__name__} does not put its score layer to the last token's hidden state, so its rewards are not known here."
        )
