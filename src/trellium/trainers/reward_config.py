"""The options of reward modelling, with TRL's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass, field

from trellium.errors import ConfigError
from trellium.trainers.base_config import BaseConfig


@dataclass
class RewardConfig(BaseConfig):
    """What `RewardTrainer` can be told. `BaseConfig` says which of TRL's options come later."""

    learning_rate: float = field(default=1e-4, metadata={"help": "The first learning rate of AdamW."})
    max_length: int | None = field(
        default=1024, metadata={"help": "Leave out rows with a longer sequence; null (in a YAML file) keeps all."}
    )
    disable_dropout: bool = field(default=True, metadata={"help": "Turn the model's dropout off."})
    center_rewards_coefficient: float | None = field(
        default=None,
        metadata={
            "help": "The weight of the squared sum of a pair's rewards, which keeps rewards around 0. Unset: none."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        coefficient = self.center_rewards_coefficient
        if coefficient is not None and not coefficient >= 0:
            raise ConfigError(f"center_rewards_coefficient must be a number from 0, got {coefficient!r}")
