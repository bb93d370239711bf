"""The options of Kahneman-Tversky optimization, with TRL's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass, field

from trellium.ops.unpaired import UnpairedOptions
from trellium.trainers.reference_config import ReferenceConfig


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
        self.unpaired = UnpairedOptions(self.loss_type, self.beta, self.desirable_weight, self.undesirable_weight)
