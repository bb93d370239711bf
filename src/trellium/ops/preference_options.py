"""The options of preference losses, and which of them go together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from trellium.errors import ConfigError, unknown_name

F_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
"""The regularisers that turn a log-ratio into a score."""


@dataclass(frozen=True, slots=True)
class LossTraits:
    """What a preference loss does with the options.

    Attributes:
        takes_divergence: it reads scores that any f-divergence can give (or none), not the log-ratios themselves.
        takes_smoothing: `label_smoothing` means something to it.
        takes_weighting: each of its values belongs to one pair, so that a pair's weight has a place.
        over: what the sum of its values is divided by: "pairs", or "chosen_tokens".
    """

    takes_divergence: bool = False
    takes_smoothing: bool = False
    takes_weighting: bool = True
    over: str = "pairs"


LOSS_TRAITS: Mapping[str, LossTraits] = MappingProxyType(
    {
        "sigmoid": LossTraits(takes_divergence=True),
        "hinge": LossTraits(takes_divergence=True),
        "ipo": LossTraits(takes_divergence=True),
        "exo_pair": LossTraits(takes_divergence=True, takes_smoothing=True),
        "nca_pair": LossTraits(),
        "robust": LossTraits(takes_divergence=True, takes_smoothing=True),
        "bco_pair": LossTraits(),
        "sppo_hard": LossTraits(),
        "aot": LossTraits(takes_smoothing=True, takes_weighting=False),
        "aot_unpaired": LossTraits(takes_smoothing=True, takes_weighting=False),
        "apo_zero": LossTraits(),
        "apo_down": LossTraits(),
        "discopop": LossTraits(takes_divergence=True),
        "sft": LossTraits(takes_divergence=True, over="chosen_tokens"),
        "sigmoid_norm": LossTraits(takes_divergence=True),
    }
)
"""Every preference loss by TRL's name. `trellium.ops.preference.PREFERENCE_LOSSES` has their formulas."""


@dataclass(frozen=True, slots=True)
class PreferenceOptions:
    """Which preference losses, and how. Names, defaults and meaning are those of TRL's `DPOConfig`.

    Attributes:
        loss_type: the losses that are added, of `LOSS_TRAITS`.
        loss_weights: a factor for each of them; None is 1 for all.
        beta: strength of the tie to the reference, above 0.
        label_smoothing: probability that a label is flipped (robust, aot, aot_unpaired), or EXO's ε. No other loss takes it.
        f_divergence_type: of `F_DIVERGENCES`; the regulariser whose score replaces the log-ratio.
        f_alpha_divergence_coef: α of "alpha_divergence".
        ld_alpha: LD-DPO's weight of tokens beyond the length of the pair's shorter response, in [0, 1]; None weighs all alike.
        use_weighting: weigh pairs by their likelihood under the policy (WPO).
        discopop_tau: temperature of DiscoPOP's modulation, above 0.

    Raises:
        ConfigError: an unknown name, a value out of its range, options that exclude each other; says which may stay.
    """

    loss_type: tuple[str, ...] = ("sigmoid",)
    loss_weights: tuple[float, ...] | None = None
    beta: float = 0.1
    label_smoothing: float = 0.0
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    ld_alpha: float | None = None
    use_weighting: bool = False
    discopop_tau: float = 0.05

    def __post_init__(self) -> None:
        self._check_names()
        self._check_numbers()
        self._check_smoothing()
        self._check_combinations()

    def weighted_losses(self) -> tuple[tuple[str, float], ...]:
        """Each loss with its factor."""
        return tuple(zip(self.loss_type, self.loss_weights or (1.0,) * len(self.loss_type), strict=True))

    def _check_names(self) -> None:
        if isinstance(self.loss_type, str) or not self.loss_type:
            raise ConfigError(f"loss_type must be a tuple of one or more losses, got {self.loss_type!r}")
        for name in self.loss_type:
            if name not in LOSS_TRAITS:
                raise ConfigError(
                    f"{unknown_name('loss_type: there is no', name, LOSS_TRAITS)} There are {', '.join(LOSS_TRAITS)}."
                )
        if self.f_divergence_type not in F_DIVERGENCES:
            unknown = unknown_name("f_divergence_type: there is no", self.f_divergence_type, F_DIVERGENCES)
            raise ConfigError(f"{unknown} There are {', '.join(F_DIVERGENCES)}.")
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_type):
            raise ConfigError(
                f"loss_weights must have one number for each loss_type, {len(self.loss_type)} for {', '.join(self.loss_type)}; "
                f"got {len(self.loss_weights)}. Leave it out to weigh all by 1."
            )

    def _check_numbers(self) -> None:
        for name in ("beta", "discopop_tau"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a number above 0, got {getattr(self, name)!r}")
        for name, value in (
            ("f_alpha_divergence_coef", self.f_alpha_divergence_coef),
            *(("loss_weights", weight) for weight in self.loss_weights or ()),
        ):
            if not math.isfinite(value):
                raise ConfigError(f"{name} must be finite, got {value!r}")
        if self.ld_alpha is not None and not 0 <= self.ld_alpha <= 1:
            raise ConfigError(f"ld_alpha must be in [0, 1], or unset to weigh all tokens alike; got {self.ld_alpha!r}")

    def _check_smoothing(self) -> None:
        smoothing = self.label_smoothing
        if not 0 <= smoothing < 1:
            raise ConfigError(f"label_smoothing must be in [0, 1), got {smoothing!r}")
        if "robust" in self.loss_type and smoothing >= 0.5:
            raise ConfigError(
                f"label_smoothing must be below 0.5 with the loss 'robust', which divides by 1 - 2 · label_smoothing; got {smoothing!r}. "
                "If more labels are wrong than right, swap chosen and rejected."
            )
        if "exo_pair" in self.loss_type and smoothing == 0:
            raise ConfigError(
                "label_smoothing must be above 0 with the loss 'exo_pair', which takes its logarithm. Its paper uses label_smoothing=1e-3."
            )
        takers = [name for name, traits in LOSS_TRAITS.items() if traits.takes_smoothing]
        if smoothing and not set(takers) & set(self.loss_type):
            raise ConfigError(
                f"label_smoothing={smoothing!r} would do nothing: {', '.join(self.loss_type)} does not take it. "
                f"Leave it at 0, or use one of {', '.join(takers)} ('robust' is the sigmoid loss for labels flipped with this probability)."
            )

    def _check_combinations(self) -> None:
        if self.f_divergence_type != "reverse_kl":
            self._refuse_unless(
                "takes_divergence", f"f_divergence_type={self.f_divergence_type!r}", "reads the log-ratio itself"
            )
        if self.use_weighting:
            self._refuse_unless(
                "takes_weighting", "use_weighting=True", "compares sorted samples, which have no pair to weigh"
            )

    def _refuse_unless(self, trait: str, option: str, reason: str) -> None:
        able = [name for name, traits in LOSS_TRAITS.items() if getattr(traits, trait)]
        for name in self.loss_type:
            if name not in able:
                raise ConfigError(
                    f"{option} cannot be with the loss {name!r}, which {reason}. Leave the option at its default, or use losses of: {', '.join(able)}."
                )


def needed_scores(options: PreferenceOptions) -> tuple[str, ...]:
    """What the losses need of the policy's head and no more, names of `trellium.ops.head.OUTPUTS`; of the reference they need `logprob`."""
    return ("logprob", "log_sum_p2") if options.use_weighting else ("logprob",)
