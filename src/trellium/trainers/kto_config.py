"""The options of Kahneman-Tversky optimization, with TRL's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass, field

from trellium.errors import ConfigError
from trellium.trainers.reference_config import ReferenceConfig

LOSS_TYPES = ("kto", "apo_zero_unpaired")


@dataclass
class KTOConfig(ReferenceConfig):
    """What `KTOTrainer` can be told. `BaseConfig` says which of TRL's options come later."""

    train_sampling_strategy: str = field(
        default="sequential",
        metadata={"help": "In which order rows come: sequential, random, or what transformers has more. Any will do."},
    )
    loss_type: str = field(
        default="kto",
        metadata={
            "help": "kto; or apo_zero_unpaired, for completions that are better than what the model says by itself."
        },
    )
    desirable_weight: float = field(default=1.0, metadata={"help": "The weight of completions marked good."})
    undesirable_weight: float = field(default=1.0, metadata={"help": "The weight of completions marked bad."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_type not in LOSS_TYPES:
            raise ConfigError(f"loss_type must be one of {', '.join(LOSS_TYPES)}, got {self.loss_type!r}")
        for name in ("desirable_weight", "undesirable_weight"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be a number from 0, got {getattr(self, name)!r}")
