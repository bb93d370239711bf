"""Give a causal language model a second way to be called: edges in, scores out, no logits.

Called with `edge_position`, the model runs its backbone on the forest, gathers the hidden states that predict something, and scores their targets against
the head (`trellium.ops.head`). Called in any other way it is the model's own forward (`trellium.models.forwards`). Tied embeddings receive both gradients.

What the head does to its product (scale, soft cap, bias) is read from the configuration and then *measured* once: the model's own forward, with
its backbone replaced for that call by a known hidden state, must give the logits that we would. A model whose head does something else is refused
by name instead of being trained on wrong probabilities. That costs two rows of logits.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import ModelOutput

from trellium.errors import ModelError
from trellium.models.attention import forest_arguments, forest_reading
from trellium.models.forwards import has_second_forward, replace_forward
from trellium.models.image_positions import GRID, knows_positions, tree_positions
from trellium.models.images import TOKEN_TYPES, inputs_beside_text
from trellium.ops.attention import rows_are_chains
from trellium.ops.head import token_scores, weighted_nll


@dataclass
class ScoreOutput(ModelOutput):
    """What a scoring forward returns; fields not asked for are None.

    Attributes:
        logprob: `[E]`, each edge's log-probability; differentiable.
        entropy: `[E]`, the entropy of the distribution it was scored under, in nats; differentiable.
        log_sum_p2: `[E]`, the logarithm of Σ p² over the vocabulary.
        mean_logit: `[E]`, the mean over the vocabulary of its logits.
        top1: `[E]` bool, whether the target was the most likely token.
        loss_sum: `[]`, Σ edge_weight · -logprob where `fused_loss` was asked for; then it alone is differentiable. Its backward can run once.
        reference_logprob: `[E]`, what a reference policy says of the same edges; a trainer puts it here.
        aux_loss: `[]`, the load-balancing loss of a mixture of experts, without its coefficient; None unless the model's configuration has
            `output_router_logits`.
    """

    logprob: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_p2: Tensor | None = None
    mean_logit: Tensor | None = None
    top1: Tensor | None = None
    loss_sum: Tensor | None = None
    reference_logprob: Tensor | None = None
    aux_loss: Tensor | None = None


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """How a model makes logits of `hidden @ weight.T + bias`: `softcap · tanh(logit_scale · (…) / softcap)`."""

    logit_scale: float = 1.0
    softcap: float | None = None


def install_scores(model: nn.Module) -> nn.Module:
    """Let `model` be called as `model(input_ids=…, subtree_end=…, edge_position=…, edge_target=…, score_outputs=("logprob", …))`.

    Args:
        model: a causal language model of transformers, or a PEFT model around one. Changed in place. Before or after PEFT, but before it is
            wrapped for several devices or compiled. Doing it twice does nothing more.

    Returns:
        The same object.

    Raises:
        ModelError: not a decoder with an output head; a head inside an adapter; a head whose logits are not what its configuration says.

    The scoring call takes the tensors of a `ForestBatch`, `score_outputs` (of `trellium.ops.head.OUTPUTS`), `temperature`, and `fused_loss` ("nll" or
    "dft"), with which it also returns `loss_sum` over `edge_weight`, its gradients already made (`trellium.ops.head.weighted_nll`): a product less than
    a loss of the scores, which are then without gradients; `label_smoothing` goes with it. A vision-language model takes what its processor makes of
    images (`pixel_values` …) too. All by keyword. Rows must be single chains padded on the right, unless `trellium.models.attention.let_read_forests` found
    that the model reads trees. It returns a `ScoreOutput`.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, PreTrainedModel):
        raise ModelError(f"scores need a causal language model of transformers, got {type(base).__name__}")
    if has_second_forward(base):
        return model
    name = type(base).__name__
    if base.config.is_encoder_decoder:
        raise ModelError(f"{name} is an encoder-decoder; only decoders with an output head can be trained here")
    backbone, head = _backbone(base), _head(base)
    transform = _head_transform(base)
    if not any(parameter.is_meta for parameter in head.parameters()):
        _measure_head(base, backbone, head, transform)
    # Plain attributes: copied and pickled with the model, not saved with its weights.
    base._inputs_beside_text = inputs_beside_text(backbone)
    base._places_images = knows_positions(backbone)
    replace_forward(base, "edge_position", _score)
    return model


def _score(
    model: PreTrainedModel,
    base: type[PreTrainedModel],
    *,
    edge_position: Tensor,
    edge_target: Tensor,
    input_ids: Tensor | None = None,
    subtree_end: Tensor | None = None,
    position_ids: Tensor | None = None,
    score_outputs: Sequence[str] = ("logprob",),
    temperature: float = 1.0,
    fused_loss: str | None = None,
    label_smoothing: float | None = None,
    edge_weight: Tensor | None = None,
    real_tokens: Tensor | None = None,
    sequence_tokens: Tensor | None = None,
    data_tokens: Tensor | None = None,
    **kwargs: Any,
) -> ScoreOutput:
    # PEFT and trainers name optional arguments of a plain call; None says nothing.
    given = {name: value for name, value in kwargs.items() if value is not None}
    backbone, head = _backbone(model), _head(model)
    images = {name: given.pop(name) for name in model._inputs_beside_text if name in given}
    if given:
        prompt_learning = "past_key_values" in given or "inputs_embeds" in given
        raise ModelError(
            f"a scoring call does not take {', '.join(sorted(given))}. "
            + (
                "Adapters that put virtual tokens before the prompt are not supported; use LoRA."
                if prompt_learning
                else ""
            )
        )
    if input_ids is None or subtree_end is None:
        raise TypeError("a scoring call needs input_ids, subtree_end, edge_position and edge_target")
    routers = bool(getattr(model.config.get_text_config(), "output_router_logits", False))
    arguments: dict[str, Any] = {"output_router_logits": True} if routers else {}
    types = next((name for name in TOKEN_TYPES if name in images), "")
    # A model that is told which tokens are of images makes their attention itself, a sequence a row, unless it only places them.
    reading = "chains" if types and not model._places_images else forest_reading(model)
    if reading == "chains":
        if not torch.compiler.is_compiling():
            torch._assert_async(
                rows_are_chains(subtree_end), "rows must be single chains, padded on the right by a chain"
            )
        # One chain a row: causal attention over 0, 1, 2… is the forest's mask. Saying nothing lets the model take its fastest causal path, and is
        # exact for models that build masks without positions, take no positions, or carry a state from left to right.
    elif position_ids is None:
        raise TypeError("a scoring call of a model that reads forests needs position_ids")
    else:
        arguments |= forest_arguments(reading, subtree_end, position_ids, next(head.parameters()).dtype)
        if types:
            arguments["position_ids"] = tree_positions(backbone, subtree_end, images.pop(types), images.get(GRID))
    outputs = backbone(input_ids=input_ids, use_cache=False, return_dict=True, **arguments, **images)
    hidden = outputs.last_hidden_state
    weight = head.weight  # once: where PEFT trains some of its rows, it is put together anew
    transform = _head_transform(model)
    options: dict[str, Any] = {
        "bias": getattr(head, "bias", None),
        "temperature": temperature,
        "logit_scale": transform.logit_scale,
        "softcap": transform.softcap,
        "outputs": score_outputs,
    }
    edges = hidden.reshape(-1, hidden.shape[-1]).index_select(0, edge_position)
    loss_sum = None
    if fused_loss is None:
        scores = token_scores(edges, weight, edge_target, **options)
    elif edge_weight is None:
        raise TypeError(f"a scoring call with fused_loss={fused_loss!r} needs edge_weight")
    else:
        options |= {"mode": fused_loss, "label_smoothing": label_smoothing or 0.0}
        loss_sum, scores = weighted_nll(edges, weight, edge_target, edge_weight, **options)
    aux_loss = _load_balancing_loss(model, base, outputs.router_logits, input_ids, real_tokens) if routers else None
    found = {name: getattr(scores, name) for name in score_outputs}
    return ScoreOutput(**found, loss_sum=loss_sum, aux_loss=aux_loss)


def _backbone(model: PreTrainedModel) -> nn.Module:
    """The module between `input_ids` and the head."""
    for backbone in (model.base_model, getattr(model, "model", None), model.get_decoder()):
        if isinstance(backbone, nn.Module) and backbone is not model:
            return backbone
    raise ModelError(
        f"{type(model).__name__} has no backbone below its output head (base_model_prefix {model.base_model_prefix!r}); "
        "give a causal language model, not a bare backbone"
    )


def _head(model: PreTrainedModel) -> nn.Module:
    """The output head: a linear layer with floating-point `weight` `[V, H]` and perhaps a `bias`."""
    head = model.get_output_embeddings()
    name = type(model).__name__
    if head is None:
        raise ModelError(f"{name} has no output head (get_output_embeddings() is None); give a causal language model")
    if adapter_is_passed_by(head):
        raise ModelError(
            f"the output head of {name} is inside an adapter ({type(head).__name__}), which scoring without logits would pass by. "
            "Take the head out of target_modules, or train it whole: modules_to_save."
        )
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        raise ModelError(
            f"the output head of {name} must be a linear layer with a floating-point weight, got {type(head).__name__}. "
            "If the model is quantized, leave its head out (llm_int8_skip_modules)."
        )
    return head


def adapter_is_passed_by(head: nn.Module) -> bool:
    """Whether an output head is in an adapter that does more than its `weight` says, as a LoRA does.

    What PEFT trains whole (`modules_to_save`) or by rows (`trainable_token_indices`, of embeddings that are tied to it) has the trained weight as its own, and
    the model's where the adapter is off.
    """
    whole = any(base.__name__ == "AuxiliaryTrainingWrapper" for base in type(head).__mro__)
    return type(head).__module__.split(".")[0] == "peft" and not whole


def _head_transform(model: PreTrainedModel) -> HeadTransform:
    """The scale and soft cap that the configuration names, as transformers' models apply them."""
    config = model.config.get_text_config()
    scale = 1.0
    for attribute in ("logit_scale", "lm_head_multiplier", "output_multiplier"):  # Cohere; Falcon-H1; Muse
        scale *= _number(getattr(config, attribute, None), 1.0)
    scaling = _number(getattr(config, "logits_scaling", None), 1.0)
    scale = scale * scaling if config.model_type.startswith("hyperclovax") else scale / scaling  # Granite divides
    softcap = None
    # Gemma; RecurrentGemma; xLSTM
    for attribute in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"):
        softcap = softcap or getattr(config, attribute, None)
    return HeadTransform(scale, None if softcap is None else float(softcap))


def _number(value: Any, default: float) -> float:
    return default if value is None else float(value)


class _KnownHidden(BaseModelOutputWithPast):
    """A backbone's output with a given hidden state; whatever else a model reads from it is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@torch.no_grad()
def _measure_head(model: PreTrainedModel, backbone: nn.Module, head: nn.Module, transform: HeadTransform) -> None:
    """Raise unless the model makes of a known hidden state the logits that `head` and `transform` say."""
    weight, bias = head.weight, getattr(head, "bias", None)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 2, weight.shape[1], generator=generator).to(weight)
    product = nn.functional.linear(hidden, weight)
    # Logits near 20: large enough that a soft cap shows, small enough that it does not flatten everything.
    hidden = hidden * (20.0 / (product.float().abs().max() * abs(transform.logit_scale)).clamp(min=1e-6)).to(
        hidden.dtype
    )
    # Some heads stand on the decoder inside the backbone (OPT): whichever is called first answers.
    inner = model.get_decoder()
    answering = [backbone] if inner is backbone or inner is model else [backbone, inner]
    shadowed = [module.__dict__.get("forward") for module in answering]
    for module in answering:
        module.__dict__["forward"] = lambda *args, **kwargs: _KnownHidden(last_hidden_state=hidden)
    try:
        token = torch.zeros(1, 2, dtype=torch.int64, device=model.get_input_embeddings().weight.device)
        logits = model(input_ids=token, use_cache=False, return_dict=True).logits
    finally:
        for module, forward in zip(answering, shadowed, strict=True):
            del module.__dict__["forward"]
            if forward is not None:
                module.__dict__["forward"] = forward
    expected = nn.functional.linear(hidden, weight, bias).float() * transform.logit_scale
    if transform.softcap is not None:
        expected = transform.softcap * torch.tanh(expected / transform.softcap)
    tolerance = 1e-4 if weight.dtype in (torch.float32, torch.float64) else 3e-2
    if logits.shape != expected.shape or not torch.allclose(
        logits.float(), expected.to(logits.device), rtol=tolerance, atol=tolerance * 20
    ):
        raise ModelError(
            f"the logits of {type(model).__name__} are not what its output head, logit scale {transform.logit_scale:g} and soft cap "
            f"{transform.softcap} give, so its tokens cannot be scored without logits. If its configuration names another scale or cap, "
            "trellium.models.scoring._head_transform is where to add it."
        )


def _load_balancing_loss(
    model: PreTrainedModel,
    base: type[PreTrainedModel],
    router_logits: Any,
    input_ids: Tensor,
    real_tokens: Tensor | None,
) -> Tensor:
    """The model's own auxiliary loss, over the tokens that are not padding. Exact where no sequences share tokens, which is the layout's affair."""
    module = sys.modules[base.__module__]
    function = getattr(module, "load_balancing_loss_func", None)
    known = ["gate_logits", "num_experts", "top_k", "attention_mask"]
    experts = (getattr(model, "num_experts", None), getattr(model, "num_experts_per_tok", None))
    if (
        function is None
        or list(inspect.signature(function).parameters) != known
        or not router_logits
        or None in experts
    ):
        raise ModelError(
            f"{base.__name__} has output_router_logits on, but no load-balancing loss that is known here. "
            "Set output_router_logits=False (router_aux_loss_coef=0)."
        )
    if real_tokens is None:
        raise TypeError("a scoring call with output_router_logits needs real_tokens")
    place = torch.arange(input_ids.shape[1], device=input_ids.device)
    return function(router_logits, *experts, (place < real_tokens[:, None]).to(torch.int64))
