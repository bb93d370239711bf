"""The policy that a trained one is compared with: it scores the same batches, learns nothing, and has no dropout.

Unless a model is given, it is the trained model at the moment training starts, not whatever its path holds by now: what is trained is copied then, and is
put in its place for each call. For an adapter that is a copy of the adapter alone, whatever kind it is; for full fine-tuning it is a second copy of the
weights, as a second model would be, but one module, so that a compiled block serves both.

Cost: a forward pass, and the exchange of pointers (microseconds a tensor).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class ReferencePolicy:
    """A policy that is not trained.

    Args:
        model: the trained model, on its device, before it is wrapped for several.
        given: another model to take instead, ready to score; None for `model` as it is now.
    """

    def __init__(self, model: nn.Module, given: nn.Module | None = None) -> None:
        self._given = given
        if given is not None:
            given.eval()
            self._kept: list[tuple[nn.Parameter, Tensor]] = []
        else:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            self._kept = [(parameter, parameter.detach().clone()) for parameter in trained]
        self._model = model

    @property
    def weights(self) -> dict[str, Tensor]:
        """What `mix_in` moves, by name: all of a given model, else what is trained of the model."""
        if self._given is not None:
            return {name: parameter.data for name, parameter in self._given.named_parameters()}
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        return {names[parameter]: kept for parameter, kept in self._kept}

    @torch.no_grad()
    def logprob(self, model: nn.Module, fields: Mapping[str, Any]) -> Tensor:
        """`[E]`, the log-probability of each edge of a batch.

        Args:
            model: the trained model as it is called, wrapped or compiled.
            fields: the tensors of a `ForestBatch`.
        """
        if self._given is not None:
            return self._given(**fields, score_outputs=("logprob",)).logprob
        with self._in_place(), _without_dropout(model):
            return model(**fields, score_outputs=("logprob",)).logprob

    @torch.no_grad()
    def mix_in(self, share: float) -> None:
        """Move the reference towards the policy: `share` of the policy's weights, the rest its own (TR-DPO, Gorbatovski et al. 2024, eq. 3)."""
        if self._given is None:
            for parameter, kept in self._kept:
                kept.lerp_(parameter.to(kept.dtype), share)
            return
        own = dict(self._model.named_parameters())
        for name, parameter in self._given.named_parameters():
            parameter.lerp_(own[name].to(parameter.device, parameter.dtype), share)

    def fingerprint(self) -> str:
        """A hash of everything that its scores depend on."""
        import xxhash

        digest = xxhash.xxh3_128()
        with self._in_place():
            module = self._model if self._given is None else self._given
            for name, tensor in sorted(module.state_dict().items()):
                digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
                digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        policy = [parameter.data for parameter, _ in self._kept]
        for parameter, kept in self._kept:
            parameter.data = kept
        try:
            yield
        finally:
            for (parameter, _), weights in zip(self._kept, policy, strict=True):
                parameter.data = weights


@contextlib.contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules() if module.training]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout rate in `model` to 0: those of dropout layers, and those that attention layers hold as a number."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attn_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
