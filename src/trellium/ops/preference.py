"""Losses over pairs of a better and a worse completion, as pure functions of log-probabilities.

A batch gives `PairScores`: for each pair the log-probabilities of both completions under the policy and under the reference, summed over their tokens. A
loss gives one number a pair; their weighted sum over pairs, divided by how many the optimizer step has, is the step's. Two losses are not of one pair alone:
`aot` and `aot_unpaired` sort the pairs of a micro-batch, so they change with its size by their nature.

Pairs that fill up a batch have weight 0 and stand at its end. They count nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trellium.ops.segments import lengths_of, per_sample, place_in_sample

F_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")


@dataclass(frozen=True, slots=True)
class PreferenceOptions:
    """What losses over pairs can be told; TRL's names.

    Attributes:
        loss_type: one or several of `PREFERENCE_LOSSES`.
        loss_weights: their weights; None for 1 each.
        beta: how much it costs to depart from the reference.
        label_smoothing: the share of pairs that are taken to be the wrong way round.
        f_divergence_type: the divergence from the reference, one of `F_DIVERGENCES`.
        f_alpha_divergence_coef: alpha of `alpha_divergence`.
        ld_alpha: the weight of the tokens by which one completion is longer than the other; None for 1.
        use_weighting: weigh pairs by how likely the policy is to write them.
        discopop_tau: the temperature of `discopop`.
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

    @property
    def weighted(self) -> tuple[tuple[str, float], ...]:
        """Each loss with its weight."""
        weights = (1.0,) * len(self.loss_type) if self.loss_weights is None else self.loss_weights
        return tuple(zip(self.loss_type, weights, strict=True))


@dataclass(frozen=True, slots=True)
class PairScores:
    """`P` pairs, each field `[P]`.

    Attributes:
        chosen, rejected: log-probability of a completion under the policy, its tokens summed (LD-DPO: weighed); differentiable.
        reference_chosen, reference_rejected: the same under the reference.
        chosen_length, rejected_length: their tokens.
        chosen_nll: negative log-likelihood of the chosen completion, its tokens summed; differentiable.
        weight: 1, or 0 for a pair that fills up the batch.
        likelihood: how likely the policy is to write both (WPO), held constant; None where nobody weighs by it.
    """

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    chosen_length: Tensor
    rejected_length: Tensor
    chosen_nll: Tensor
    weight: Tensor
    likelihood: Tensor | None = None

    @property
    def chosen_ratio(self) -> Tensor:
        """Policy minus reference."""
        return self.chosen - self.reference_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        """Policy minus reference."""
        return self.rejected - self.reference_rejected


def pair_scores(
    logprob: Tensor,
    reference: Tensor | tuple[Tensor, Tensor],
    sample: Tensor,
    term_weight: Tensor,
    pair_weight: Tensor,
    options: PreferenceOptions,
    log_sum_p2: Tensor | None = None,
) -> PairScores:
    """What the losses read, from the terms of a batch: sample `2 i` is chosen, `2 i + 1` rejected.

    Args:
        logprob: `[T]`, of the policy.
        reference: `[T]`, of the reference; or its sums, two `[P]`, chosen and rejected.
        sample, term_weight: `[T]`, as of `trellium.ops.segments`.
        pair_weight: `[P]`, 1, or 0 for a pair that fills up the batch.
        options: `ld_alpha` and `use_weighting`.
        log_sum_p2: `[T]`, the logarithm of Σ p²; for `use_weighting`.
    """
    pairs = len(pair_weight)
    lengths = lengths_of(sample, term_weight, 2 * pairs)

    def halves(values: Tensor) -> tuple[Tensor, Tensor]:
        chosen, rejected = per_sample(values, sample, term_weight, 2 * pairs).view(pairs, 2).unbind(1)
        return chosen, rejected

    scale = _length_weights(sample, lengths, options.ld_alpha)
    chosen, rejected = halves(logprob if scale is None else logprob * scale)
    if not isinstance(reference, tuple):
        reference = halves(reference if scale is None else reference * scale)
    reference_chosen, reference_rejected = reference
    likelihood = None
    if options.use_weighting:
        assert log_sum_p2 is not None
        aligned = halves((logprob - log_sum_p2).detach())
        means = (total / length.clamp(min=1) for total, length in zip(aligned, lengths.view(pairs, 2).T, strict=True))
        likelihood = torch.exp(sum(means, torch.zeros_like(pair_weight)))
    chosen_length, rejected_length = lengths.view(pairs, 2).unbind(1)
    return PairScores(
        chosen,
        rejected,
        reference_chosen,
        reference_rejected,
        chosen_length,
        rejected_length,
        -halves(logprob)[0],
        pair_weight,
        likelihood,
    )


def _length_weights(sample: Tensor, lengths: Tensor, alpha: float | None) -> Tensor | None:
    """`[T]`: 1 up to the shorter length of the pair, `alpha` beyond (LD-DPO, Liu et al. 2024, eq. 10)."""
    if alpha is None:
        return None
    shared = lengths.view(-1, 2).amin(1).repeat_interleave(2)[sample]
    return torch.where(place_in_sample(sample, lengths) < shared, 1.0, alpha)


def preference_loss(
    scores: PairScores, options: PreferenceOptions, normalizer: Tensor | float, pairs_per_token: Tensor | float
) -> Tensor:
    """The weighted sum of the losses that `options` name: `[]`, summed over pairs and divided by `normalizer`.

    Args:
        scores: of a micro-batch.
        options: which losses.
        normalizer: the pairs of the whole optimizer step.
        pairs_per_token: the step's pairs ÷ its chosen tokens, which makes a mean over tokens of the `sft` loss.
    """
    total = torch.zeros((), device=scores.weight.device, dtype=scores.chosen.dtype)
    for name, weight in options.weighted:
        loss = PREFERENCE_LOSSES[name](scores, options)
        if name == "sft":
            loss = loss * pairs_per_token
        if scores.likelihood is not None:
            loss = loss * scores.likelihood  # Zhou et al. 2024 (WPO), eq. 2
        total = total + weight * loss.masked_fill(scores.weight == 0, 0.0).sum()
    return total / normalizer


# ---- each loss: [P] from the scores; its arguments are policy minus reference, put through the derivative of the divergence


def _departures(scores: PairScores, options: PreferenceOptions) -> tuple[Tensor, Tensor]:
    """f'(policy ÷ reference) of the chosen and of the rejected completion, up to a constant (f-DPO, Wang et al. 2024, table 1)."""
    chosen, rejected = scores.chosen_ratio, scores.rejected_ratio
    return _departure(chosen, options), _departure(rejected, options)


def _departure(ratio: Tensor, options: PreferenceOptions) -> Tensor:
    order = options.f_alpha_divergence_coef - 1.0
    match options.f_divergence_type:
        case "forward_kl":
            return 1 - torch.exp(-ratio)
        case "js_divergence":
            return math.log(2) + F.logsigmoid(ratio)
        case "alpha_divergence" if abs(order) >= 1e-6:
            return torch.expm1((order * ratio).clamp(max=80.0)) / order
    return ratio


def _margin(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """Beta times the difference of the two departures."""
    chosen, rejected = _departures(scores, options)
    return options.beta * (chosen - rejected)


def _mean_margin(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """The difference of the two departures a token."""
    chosen, rejected = _departures(scores, options)
    return chosen / scores.chosen_length.clamp(min=1) - rejected / scores.rejected_length.clamp(min=1)


def _smoothed(margin: Tensor, smoothing: float) -> Tensor:
    if smoothing == 0.0:
        return -F.logsigmoid(margin)
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def sigmoid(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """DPO (Rafailov et al. 2023, eq. 7); with smoothing, conservative DPO (Mitchell 2023)."""
    return _smoothed(_margin(scores, options), options.label_smoothing)


def hinge(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """SLiC on the DPO margin (Zhao et al. 2023; Liu et al. 2024, RSO, eq. 10)."""
    return F.relu(1 - _margin(scores, options))


def ipo(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """IPO (Azar et al. 2023, eq. 17), on means over tokens as its authors advise."""
    return (_mean_margin(scores, options) - 1 / (2 * options.beta)) ** 2


def exo_pair(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """EXO for pairs (Ji et al. 2024, eq. 16); needs smoothing above 0."""
    margin, smoothing = _margin(scores, options), options.label_smoothing
    chosen = torch.sigmoid(margin) * (F.logsigmoid(margin) - math.log1p(-smoothing))
    return chosen + torch.sigmoid(-margin) * (F.logsigmoid(-margin) - math.log(smoothing))


def nca_pair(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """NCA for pairs (Chen et al. 2024, eq. 12)."""
    chosen, rejected = options.beta * scores.chosen_ratio, options.beta * scores.rejected_ratio
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def robust(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """Robust DPO (Chowdhury et al. 2024, eq. 12); `label_smoothing` is the share of flipped labels, below 1/2."""
    margin, flipped = _margin(scores, options), options.label_smoothing
    return (-(1 - flipped) * F.logsigmoid(margin) + flipped * F.logsigmoid(-margin)) / (1 - 2 * flipped)


def bco_pair(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """BCO for pairs (Jung et al. 2024, eq. 7), without its moving reference point, as in TRL."""
    return -F.logsigmoid(options.beta * scores.chosen_ratio) - F.logsigmoid(-options.beta * scores.rejected_ratio)


def sppo_hard(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """SPPO (Wu et al. 2024, eq. 4.7) where the chosen always wins."""
    return (scores.chosen_ratio - 0.5 / options.beta) ** 2 + (scores.rejected_ratio + 0.5 / options.beta) ** 2


def aot(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """Alignment by optimal transport (Melnyk et al. 2024, eq. 12): sorted margins of the policy against sorted margins of the reference."""
    policy, reference = (
        scores.chosen - scores.rejected,
        scores.reference_chosen - scores.reference_rejected,
    )
    return _smoothed(options.beta * _sorted_difference(policy, reference, scores.weight), options.label_smoothing)


def aot_unpaired(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """The same for sets that are not paired (Melnyk et al. 2024, eq. 9): sorted chosen against sorted rejected ratios."""
    difference = _sorted_difference(scores.chosen_ratio, scores.rejected_ratio, scores.weight)
    return _smoothed(options.beta * difference, options.label_smoothing)


def _sorted_difference(one: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    """Difference of the sorted values; those of fillers, which are sorted to the end, where fillers stand, are 0."""
    filler = weight == 0
    ranked = [values.masked_fill(filler, math.inf).sort().values.masked_fill(filler, 0.0) for values in (one, other)]
    return ranked[0] - ranked[1]


def apo_zero(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """APO-zero (D'Oosterlinck et al. 2024, eq. 7): the chosen up, the rejected down."""
    return torch.sigmoid(-options.beta * scores.chosen_ratio) + torch.sigmoid(options.beta * scores.rejected_ratio)


def apo_down(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """APO-down (D'Oosterlinck et al. 2024, eq. 8): both down, the rejected more."""
    difference = scores.chosen_ratio - scores.rejected_ratio
    return torch.sigmoid(options.beta * scores.chosen_ratio) + torch.sigmoid(-options.beta * difference)


def discopop(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """DiscoPOP (Lu et al. 2024, eq. 5): logistic where the margin is negative, exponential where it is positive."""
    margin = _margin(scores, options)
    share = torch.sigmoid(margin / options.discopop_tau)
    return -F.logsigmoid(margin) * (1 - share) + torch.exp(-margin) * share


def sft(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """Negative log-likelihood of the chosen completion, its tokens summed; `preference_loss` makes the mean over tokens of it."""
    return scores.chosen_nll


def sigmoid_norm(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """DPO on means over tokens (Meng et al. 2024, SimPO, eq. 4, with a reference)."""
    return -F.logsigmoid(options.beta * _mean_margin(scores, options))


PREFERENCE_LOSSES: Mapping[str, Callable[[PairScores, PreferenceOptions], Tensor]] = {
    loss.__name__: loss
    for loss in (
        sigmoid, hinge, ipo, exo_pair, nca_pair, robust, bco_pair, sppo_hard, aot, aot_unpaired, apo_zero, apo_down,
        discopop, sft, sigmoid_norm,
    )
}  # fmt: skip
"""Every loss, by TRL's name."""

_OF_DIFFERENCES = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
_SMOOTHED = {"sigmoid", "exo_pair", "robust", "aot", "aot_unpaired"}
_SORTED = {"aot", "aot_unpaired"}


def problem_with(options: PreferenceOptions) -> str | None:
    """What cannot be in these options, and the way out; None if nothing."""
    names = set(options.loss_type)
    if not names or not names <= set(PREFERENCE_LOSSES):
        return f"loss_type must be of {', '.join(PREFERENCE_LOSSES)}, got {', '.join(options.loss_type) or 'none'}"
    if options.loss_weights is not None and len(options.loss_weights) != len(options.loss_type):
        return f"loss_weights needs one number for each of the {len(options.loss_type)} losses, got {len(options.loss_weights)}"
    if options.f_divergence_type not in F_DIVERGENCES:
        return f"f_divergence_type must be one of {', '.join(F_DIVERGENCES)}, got {options.f_divergence_type!r}"
    if options.f_divergence_type != "reverse_kl" and (others := sorted(names - _OF_DIFFERENCES)):
        return (
            f"f_divergence_type={options.f_divergence_type!r} leaves a constant that only cancels in losses of the difference of a pair, and "
            f"{', '.join(others)} is none. Leave it at 'reverse_kl', or choose of {', '.join(sorted(_OF_DIFFERENCES))}."
        )
    smoothing = options.label_smoothing
    if not 0 <= smoothing < 0.5:
        return f"label_smoothing must lie in [0, 0.5), got {smoothing!r}"
    if "exo_pair" in names and smoothing == 0:
        return "loss_type exo_pair needs label_smoothing above 0; its paper takes 0.001"
    if smoothing and not names & _SMOOTHED:
        return f"label_smoothing={smoothing} changes nothing in {', '.join(options.loss_type)}. Leave it at 0, or choose of {', '.join(sorted(_SMOOTHED))}."
    if options.use_weighting and names & _SORTED:
        return "use_weighting=True weighs pairs, and aot sorts them apart. Set one of them."
    if options.ld_alpha is not None and not 0 <= options.ld_alpha <= 1:
        return f"ld_alpha must lie in [0, 1], got {options.ld_alpha!r}"
    return None
