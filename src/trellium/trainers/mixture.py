"""The load-balancing loss of mixtures of experts: whether a model has one, and with what weight it is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from trellium.errors import ConfigError


@dataclass
class RouterLoss:
    """What a model's router adds to the loss.

    Attributes:
        coefficient: its weight; 0 where there is none.
        config: the model's text configuration; its `output_router_logits` asks the scoring forward for the loss.
        before: what the model's own configuration said, which is what is saved.
    """

    coefficient: float
    config: Any = None
    before: bool = False

    @classmethod
    def of(cls, model: nn.Module, coefficient: float | None) -> RouterLoss:
        """The router loss of `model`, switched on in its configuration unless its weight is 0.

        Args:
            coefficient: its weight; None for the one in the model's configuration.

        Raises:
            ConfigError: a weight for a model without experts.
        """
        config = model.config.get_text_config()  # type: ignore[union-attr]
        if not hasattr(config, "router_aux_loss_coef") or not hasattr(config, "output_router_logits"):
            if coefficient:
                raise ConfigError(
                    f"router_aux_loss_coef={coefficient}, but {config.model_type} has no experts to balance. Leave it unset."
                )
            return cls(0.0)
        before = bool(config.output_router_logits)
        weight = float(config.router_aux_loss_coef if coefficient is None else coefficient)
        config.output_router_logits = weight != 0.0
        return cls(weight, config, before)

    @contextlib.contextmanager
    def out_of_sight(self) -> Iterator[None]:
        """The model's configuration as it came, while it is saved."""
        if self.config is None:
            yield
            return
        now, self.config.output_router_logits = self.config.output_router_logits, self.before
        try:
            yield
        finally:
            self.config.output_router_logits = now
