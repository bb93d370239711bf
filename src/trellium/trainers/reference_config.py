"""The options of trainers that compare the policy with a reference, with TRL's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass, field

from trellium.errors import ConfigError
from trellium.trainers.base_config import BaseConfig


@dataclass
class ReferenceConfig(BaseConfig):
    """What can be said of the reference."""

    learning_rate: float = field(default=1e-6, metadata={"help": "The first learning rate of AdamW."})
    disable_dropout: bool = field(
        default=True, metadata={"help": "Turn the model's dropout off, so that both policies are compared as they are."}
    )
    beta: float = field(
        default=0.1, metadata={"help": "How much it costs to depart from the reference; higher keeps closer to it."}
    )
    precompute_ref_log_probs: bool = field(
        default=False,
        metadata={
            "help": "Score the whole dataset with the reference before training, once; the results are cached. Then no reference is kept."
        },
    )
    precompute_ref_batch_size: int | None = field(
        default=None, metadata={"help": "Rows of a batch of that. Unset: per_device_train_batch_size."}
    )
    sync_ref_model: bool = field(
        default=False, metadata={"help": "Move the reference towards the policy every ref_model_sync_steps steps."}
    )
    ref_model_mixup_alpha: float = field(
        default=0.6, metadata={"help": "How far sync_ref_model moves the reference: 1 makes it the policy."}
    )
    ref_model_sync_steps: int = field(default=512, metadata={"help": "How often sync_ref_model does."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.beta, int | float) or self.beta <= 0:
            raise ConfigError(f"beta must be above 0, got {self.beta!r}")
        if not 0 <= self.ref_model_mixup_alpha <= 1:
            raise ConfigError(f"ref_model_mixup_alpha must lie in [0, 1], got {self.ref_model_mixup_alpha!r}")
        for name in ("ref_model_sync_steps", "precompute_ref_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value!r}")
        if self.precompute_ref_log_probs and self.sync_ref_model:
            raise ConfigError(
                "precompute_ref_log_probs=True scores with the reference once, and sync_ref_model=True changes it later. Set one of them."
            )
