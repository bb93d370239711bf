"""Let a model of transformers read rows of trees, where its layers can.

A model reads a forest in one of three ways, decided once from its configuration, its class and a measurement:

- `operator`: every layer is full or sliding attention through transformers' `AttentionInterface`; `trellium::forest_attention` takes its place. No mask
  is built. The forest reaches each layer as the attention mask: a 4-D mask is handed through as it is by every model that is written to the interface,
  through gradient checkpointing and compiled blocks, so ours is `[R, 1, 2, L]` int64, `subtree_end` above `position_ids`.
- `dense`: the model brings its own attention, but takes a 4-D mask: `[R, 1, L, L]`, of `forest_mask`. It costs R·L² numbers.
- `chains`: a layer carries a state from left to right (recurrence, linear attention, convolution) or looks at places in another way than by a mask. Such
  a model gets one sequence a row and no mask.

The measurement: a prompt of five tokens with two branches, once as a forest and once as two rows, must give the same hidden states. A model that
fails it reads chains; nothing is trained on a mask that a layer ignored. It costs two forward calls of about twenty tokens.

Whatever is called without a forest (`generate`, evaluation by others) runs the attention that the model had before.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from trellium.errors import ModelError
from trellium.ops.attention import forest_attention, forest_mask

logger = logging.getLogger(__name__)

Reading = Literal["operator", "dense", "chains"]

IMPLEMENTATION = "trellium_forest"
"""What `config._attn_implementation` is called on a model that reads by the operator; followed by `_` and the former one unless that is `sdpa`."""

_READABLE_LAYERS = {"full_attention", "sliding_attention"}
_SAID: set[tuple[str, str]] = set()


@dataclass(frozen=True, slots=True)
class ForestSupport:
    """How a model reads rows of trees.

    Attributes:
        reading: `operator`, `dense`, or `chains`: see the module.
        shares: whether sequences may share a prefix's tokens and still be trained exactly as if they were separate.
        reason: why it is not `operator`, or does not share; empty otherwise.
    """

    reading: Reading
    shares: bool
    reason: str = ""


def forest_support(config: PretrainedConfig, model_class: type[PreTrainedModel] | None = None) -> ForestSupport:
    """What a configuration says about its model's layers, without a model.

    Args:
        config: of a causal language model.
        model_class: the model's class; that which transformers would choose for the configuration if None.
    """
    text = config.get_text_config()
    if model_class is None:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if config.is_encoder_decoder:
        return _chains("it is an encoder-decoder")
    kinds = set(getattr(text, "layer_types", None) or ())
    if other := sorted(kinds - _READABLE_LAYERS):
        return _chains(f"its layers of type {', '.join(other)} do not see by a mask")
    if model_class is None:
        return _chains(f"no model class of transformers belongs to {type(config).__name__}")
    if getattr(model_class, "_is_stateful", False):
        return _chains("its layers carry a state from token to token")
    if getattr(text, "use_bidirectional_attention", None) or not getattr(text, "is_causal", True):
        return _chains("its attention is not causal")
    noise = {name: value for name, value in _dropouts(text).items() if value}
    if any("att" in name for name in noise):
        return _chains(f"attention dropout is on ({_listed(noise)}); set it to 0")
    reading: Reading = "operator"
    reason = ""
    if not model_class._can_set_attn_implementation():
        if "sliding_attention" in kinds or getattr(text, "sliding_window", None) is not None:
            return _chains("it brings its own attention, with a sliding window of its own")
        reading, reason = "dense", "it brings its own attention, so a mask is built"
    if noise:
        return ForestSupport(
            reading, False, f"dropout is on ({_listed(noise)}), and sequences that share tokens would share its noise"
        )
    if getattr(text, "output_router_logits", False):
        return ForestSupport(
            reading,
            False,
            "its load-balancing loss would count shared tokens once; set output_router_logits=False to share",
        )
    return ForestSupport(reading, True, reason)


def let_read_forests(model: nn.Module) -> ForestSupport:
    """Let `model` read rows of trees if it can: decide, change its attention implementation, measure. In place; doing it twice does nothing more.

    Args:
        model: a causal language model of transformers, or a PEFT model around one; before it is wrapped for several devices or compiled.

    Returns:
        How it will read, also kept for `forest_reading`. Anything but full support is logged once for each class of model.

    Raises:
        ModelError: not a model of transformers.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, PreTrainedModel):
        raise ModelError(f"reading forests needs a causal language model of transformers, got {type(base).__name__}")
    known = base.__dict__.get("_forest_support")
    if known is not None:
        return known
    support = forest_support(base.config, type(base))
    if support.reading == "dense" and "position_ids" not in inspect.signature(_inner(base).forward).parameters:
        support = _chains("it brings its own attention and takes no positions")
    if support.reading == "operator":
        before = base.config._attn_implementation
        base.set_attn_implementation(_registered(before or "eager"))
        if (problem := _measured(base, "operator")) is not None:
            base.set_attn_implementation(before)
            support = _chains(problem)
    elif support.reading == "dense" and (problem := _measured(base, "dense")) is not None:
        support = _chains(problem)
    base._forest_support = support  # a plain attribute: copied and pickled with the model, not saved with its weights
    if support.reason and (said := (type(base).__name__, support.reason)) not in _SAID:
        _SAID.add(said)
        what = (
            "one sequence a row"
            if support.reading == "chains"
            else "rows of trees"
            if support.shares
            else "packed rows, no shared prefixes"
        )
        logger.warning("%s: %s, because %s.", type(base).__name__, what, support.reason)
    return support


def forest_reading(model: nn.Module) -> Reading:
    """How `model` reads since `let_read_forests`; `chains` before."""
    support = getattr(model, "_forest_support", None)
    return "chains" if support is None else support.reading


def forest_arguments(
    reading: Reading, subtree_end: Tensor, position_ids: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The arguments of a backbone's forward that make it read a forest.

    Args:
        reading: the model's; `chains` takes nothing.
        subtree_end: `[R, L]` int64.
        position_ids: `[R, L]` int64.
        dtype: of the hidden states, which a dense mask is added to.
    """
    if reading == "chains":
        return {}
    if reading == "operator":
        return {
            "attention_mask": torch.stack((subtree_end, position_ids), dim=1).unsqueeze(1),
            "position_ids": position_ids,
        }
    allowed = forest_mask(subtree_end, position_ids)
    mask = torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    return {"attention_mask": mask, "position_ids": position_ids}


def _chains(reason: str) -> ForestSupport:
    return ForestSupport("chains", False, reason)


def _dropouts(config: PretrainedConfig) -> dict[str, float]:
    """The configuration's dropout rates that act inside a decoder."""
    return {
        name: value
        for name, value in vars(config).items()
        if ("dropout" in name or name.endswith("pdrop"))
        and not any(part in name for part in ("classifier", "summary"))
        and isinstance(value, int | float)
    }


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(values.items()))


# ---- the operator behind transformers' interface


def _registered(former: str) -> str:
    """The name under which the operator, with `former` for calls without a forest, stands in transformers' tables."""
    if former.startswith(IMPLEMENTATION):
        return former
    name = IMPLEMENTATION if former == "sdpa" else f"{IMPLEMENTATION}_{former}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(
            name, _attention_over(None if former == "eager" else ALL_ATTENTION_FUNCTIONS[former])
        )
        if former in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[former])
    return name


def _attention_over(former: Callable[..., Any] | None) -> Callable[..., Any]:
    """An attention function for transformers; without a forest it is `former`, or the model's own eager function if that is None."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        if attention_mask is None or attention_mask.dtype != torch.int64 or attention_mask.ndim != 4:
            plain = former or sys.modules[type(module).__module__].eager_attention_forward
            return plain(module, query, key, value, attention_mask, **options)
        return _read(module, query, key, value, attention_mask, **options), None

    return attention


def _read(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    forest: Tensor,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """`[R, L, Hq, Dv]`; `forest` as `forest_arguments` makes it."""
    name = type(module).__name__
    if (
        dropout
        or position_bias is not None
        or not (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    ):
        raise ModelError(
            f"{name} wants dropout, a position bias or no causality in its attention: a forest has none of them"
        )
    # Looked at eagerly only, as the measurement runs: a graph that read the layer's index would be a graph for each layer.
    if sliding_window is None and not torch.compiler.is_compiling() and _slides(module):
        raise ModelError(
            f"{name} is a sliding layer by its configuration, but does not say its window to the attention function"
        )
    device_type = query.device.type
    if query.dtype != torch.float64 and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return forest_attention(
        query,
        key,
        value,
        forest[:, 0, 0],
        forest[:, 0, 1],
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )


def _slides(module: nn.Module) -> bool:
    kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
    layer = getattr(module, "layer_idx", None)
    return isinstance(layer, int) and layer < len(kinds) and kinds[layer] == "sliding_attention"


# ---- the measurement

# Five tokens, then a branch of seven and one of four: depth 12 passes a window of 8.
_PROMPT, _LONG, _SHORT = 5, 7, 4


def _inner(model: PreTrainedModel) -> nn.Module:
    """The module that makes hidden states."""
    inner = model.base_model
    return inner if inner is not model else model.get_decoder()


@torch.no_grad()
def _measured(model: PreTrainedModel, reading: Reading) -> str | None:
    """What is wrong with the model's hidden states over a small forest; None if nothing, or if its weights are not there to try."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return None
    weight = model.get_input_embeddings().weight
    device, vocabulary = weight.device, weight.shape[0]
    prompt, long, short = torch.arange(_PROMPT), torch.arange(_LONG) + 20, torch.arange(_SHORT) + 40
    tokens = torch.cat((prompt, long, short)).to(device) * 7 % vocabulary
    length = len(tokens)
    branch = _PROMPT + _LONG
    ends = torch.tensor([[length] * _PROMPT + [branch] * _LONG + [length] * _SHORT], device=device)
    positions = torch.tensor([[*range(branch), *range(_PROMPT, _PROMPT + _SHORT)]], device=device)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        inner = _inner(model)
        forest = forest_arguments(reading, ends, positions, weight.dtype)
        together = inner(input_ids=tokens[None], use_cache=False, return_dict=True, **forest).last_hidden_state[0]
        alone = [
            inner(input_ids=tokens[None, places], use_cache=False, return_dict=True).last_hidden_state[0, _PROMPT:]
            for places in (torch.arange(branch), torch.cat((torch.arange(_PROMPT), torch.arange(branch, length))))
        ]
    except (TypeError, ValueError, IndexError, RuntimeError, ModelError) as error:
        return f"it does not take a forest ({type(error).__name__}: {error})"
    finally:
        for module, training in modes.items():
            module.training = training
    found, expected = together[_PROMPT:].double(), torch.cat(alone).double()
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-9)
    # In low precision a router may flip for a token; a layer that ignores the forest shows in most.
    wide = weight.dtype in (torch.float32, torch.float64)
    deviation = float(errors.max() if wide else errors.median())
    if deviation <= (1e-3 if wide else 0.1):
        return None
    return f"its hidden states over a forest are not those of its sequences alone (they deviate by {deviation:.2g})"
