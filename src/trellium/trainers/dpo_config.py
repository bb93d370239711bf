"""The options of direct preference optimization, with TRL's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass, field

from trellium.errors import ConfigError
from trellium.ops.preference_options import LOSS_TRAITS, PreferenceOptions
from trellium.trainers.reference_config import ReferenceConfig


@dataclass
class DPOConfig(ReferenceConfig):
    """What `DPOTrainer` can be told. `BaseConfig` says which of TRL's options come later."""

    truncation_mode: str = field(
        default="keep_start", metadata={"help": "Which end of a longer row stays: keep_start or keep_end."}
    )
    padding_free: bool = field(
        default=False,
        metadata={"help": "Ask for batches without padding, which layout=auto gives wherever the model can read them."},
    )
    loss_type: list[str] = field(
        default_factory=lambda: ["sigmoid"],
        metadata={"help": f"One or several of {', '.join(LOSS_TRAITS)}."},
    )
    loss_weights: list[float] | None = field(
        default=None, metadata={"help": "A weight for each of several losses. Unset: 1 each."}
    )
    ld_alpha: float | None = field(
        default=None, metadata={"help": "LD-DPO: the weight of the tokens by which one completion is longer. Unset: 1."}
    )
    f_divergence_type: str = field(
        default="reverse_kl",
        metadata={"help": "reverse_kl, forward_kl, js_divergence or alpha_divergence, from the reference."},
    )
    f_alpha_divergence_coef: float = field(default=0.5, metadata={"help": "Alpha of alpha_divergence."})
    label_smoothing: float = field(
        default=0.0,
        metadata={"help": "The share of pairs that are the wrong way round (robust, aot), or epsilon (exo_pair)."},
    )
    use_weighting: bool = field(
        default=False, metadata={"help": "WPO: weigh pairs by how likely the policy is to write them."}
    )
    discopop_tau: float = field(default=0.05, metadata={"help": "The temperature of the discopop loss."})

    def __post_init__(self) -> None:
        if isinstance(self.loss_type, str):
            self.loss_type = [self.loss_type]
        super().__post_init__()
        if self.padding_free and self.layout == "padded":
            raise ConfigError("padding_free=True and layout='padded' exclude each other. Leave layout at 'auto'.")
        self.preference = PreferenceOptions(
            loss_type=tuple(self.loss_type),
            loss_weights=None if self.loss_weights is None else tuple(self.loss_weights),
            beta=self.beta,
            label_smoothing=self.label_smoothing,
            f_divergence_type=self.f_divergence_type,
            f_alpha_divergence_coef=self.f_alpha_divergence_coef,
            ld_alpha=self.ld_alpha,
            use_weighting=self.use_weighting,
            discopop_tau=self.discopop_tau,
        )
