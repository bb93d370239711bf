"""The losses of direct preference optimisation as pure functions of a batch's pairs.

Each loss gives a value per pair, `[pairs]`, and `preference_sums` adds them up; the caller divides by counts over its whole optimizer step:

- The pair losses by the number of real pairs. A step then has the same loss and gradients however it was cut into micro-batches and processes.
- `sft` by the number of trained tokens of chosen samples. TRL averages tokens in each micro-batch and then averages micro-batches, so that its
  weight of a token depends on how long the others of its micro-batch are; with one micro-batch a step the two agree.
- `aot` and `aot_unpaired` compare the sorted samples of one micro-batch with each other. Their values are over pairs like the rest, but what they
  are depends on which pairs came together, on every process and in every micro-batch: this belongs to the method.

`bco_pair` has no running mean of rewards (the δ of its paper), as TRL's has none, and is therefore exact like the other pair losses.

In the formulas below r is the log-ratio log π/π_ref of a sample and s its score: f'(π/π_ref) for the f-divergence asked for, r itself for the reverse KL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from trellium.ops.preference_options import LOSS_TRAITS, PreferenceOptions
from trellium.ops.preference_scores import PairScores

_LARGEST_EXPONENT = 40.0
"""Where a power divergence would score a sample by more than e⁴⁰ it scores it so: the square of a score must remain finite in float32."""


@dataclass(frozen=True, slots=True)
class PreferenceSums:
    """What a batch adds to its step's loss, before division.

    Attributes:
        pairs: `[]`, to be divided by the real pairs of the step.
        chosen_tokens: `[]`, to be divided by the trained tokens of the step's chosen samples; None where no loss is over tokens.
    """

    pairs: Tensor
    chosen_tokens: Tensor | None


def preference_sums(scores: PairScores, options: PreferenceOptions) -> PreferenceSums:
    """Σ over losses and pairs of loss weight · pair weight · value. A pair that fills up adds nothing, also to gradients.

    Raises:
        ValueError: pairs are to be weighted, but `scores` came without `log_sum_p2`.
    """
    total = {"pairs": scores.chosen_nll.new_zeros(())}
    for name, factor in options.weighted_losses():
        values = PREFERENCE_LOSSES[name](scores, options)
        if options.use_weighting:
            if scores.weight is None:
                raise ValueError("use_weighting needs the weights of the pairs: give log_sum_p2 to pair_scores")
            values = values * scores.weight
        over = LOSS_TRAITS[name].over
        total[over] = total.get(over, 0.0) + factor * values.masked_fill(~scores.real, 0.0).sum()
    return PreferenceSums(total["pairs"], total.get("chosen_tokens"))


def preference_loss(
    scores: PairScores, options: PreferenceOptions, *, pairs: Tensor | float, chosen_tokens: Tensor | float
) -> Tensor:
    """The share `[]` that a batch has in its step's loss.

    Args:
        scores: of the batch.
        options: which losses, and how.
        pairs: real pairs of the whole optimizer step.
        chosen_tokens: trained tokens of the step's chosen samples; only `sft` reads it.
    """
    sums = preference_sums(scores, options)
    loss = sums.pairs / pairs
    return loss if sums.chosen_tokens is None else loss + sums.chosen_tokens / chosen_tokens


def preference_metrics(scores: PairScores, options: PreferenceOptions) -> dict[str, Tensor]:
    """TRL's metrics by its names, each `[pairs]` and constant; 0 for a pair that fills up. Their mean is the sum over the number of real pairs.

    The implicit reward is β · r whatever the f-divergence, and under LD-DPO everything is of the weighted sums.
    """
    chosen, rejected = (options.beta * side.log_ratio.detach() for side in (scores.chosen, scores.rejected))
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).to(chosen.dtype),
        "rewards/margins": chosen - rejected,
        "logps/chosen": scores.chosen.logprob.detach(),
        "logps/rejected": scores.rejected.logprob.detach(),
    }


def divergence_score(log_ratio: Tensor, options: PreferenceOptions) -> Tensor:
    """s = f'(u) at u = π/π_ref, from log u.

    Reverse KL: log u. α-divergence: (u^(α-1) - 1) / (α - 1), which is log u at α = 1. Forward KL: 1 - 1/u, the α-divergence of α = 0.
    Jensen-Shannon: log 2u/(1 + u). The coefficient counts as TRL counts it: 1 minus the paper's α. Reverse KL goes without its constant, 1.

    Source: Wang et al. 2023, "Beyond Reverse KL" (arXiv:2309.16240), table 1.
    """
    kind = options.f_divergence_type
    if kind == "js_divergence":
        return math.log(2.0) + F.logsigmoid(log_ratio)
    alpha = {"reverse_kl": 1.0, "forward_kl": 0.0, "alpha_divergence": options.f_alpha_divergence_coef}[kind]
    power = alpha - 1.0
    if abs(power) < 1e-6:
        return log_ratio
    return torch.expm1((power * log_ratio).clamp(max=_LARGEST_EXPONENT)) / power


def sigmoid(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """-log σ(β (s_c - s_r)). Rafailov et al. 2023, DPO (arXiv:2305.18290), eq. 7."""
    return -F.logsigmoid(_margin(scores, options))


def hinge(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """max(0, 1 - β (s_c - s_r)). Zhao et al. 2023, SLiC (arXiv:2305.10425); with a reference, Liu et al. 2023, RSO (arXiv:2309.06657)."""
    return torch.relu(1 - _margin(scores, options))


def ipo(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """(s_c/|c| - s_r/|r| - 1/(2β))². Azar et al. 2023, IPO (arXiv:2310.12036), eq. 17 with τ = β and scores averaged over their tokens."""
    return (_mean_score_difference(scores, options) - 1 / (2 * options.beta)) ** 2


def exo_pair(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """KL((p, 1 - p) ‖ (1 - ε, ε)), p = σ(β (s_c - s_r)). Ji et al. 2024, EXO (arXiv:2402.00856), eq. 16 for two responses."""
    margin, epsilon = _margin(scores, options), options.label_smoothing
    preferred = torch.sigmoid(margin) * (F.logsigmoid(margin) - math.log1p(-epsilon))
    return preferred + torch.sigmoid(-margin) * (F.logsigmoid(-margin) - math.log(epsilon))


def nca_pair(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """-log σ(β r_c) - ½ log σ(-β r_c) - ½ log σ(-β r_r). Chen et al. 2024, NCA (arXiv:2402.05369), for two responses."""
    chosen, rejected = _rewards(scores, options)
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def robust(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """(-(1 - ε) log σ(m) + ε log σ(-m)) / (1 - 2ε), m = β (s_c - s_r). Chowdhury et al. 2024, robust DPO (arXiv:2403.00409)."""
    margin, epsilon = _margin(scores, options), options.label_smoothing
    return (epsilon * F.logsigmoid(-margin) - (1 - epsilon) * F.logsigmoid(margin)) / (1 - 2 * epsilon)


def bco_pair(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """-log σ(β r_c) - log σ(-β r_r). Jung et al. 2024, BCO (arXiv:2404.04656), without its shift δ of the rewards."""
    chosen, rejected = _rewards(scores, options)
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


def sppo_hard(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """(r_c - 1/(2β))² + (r_r + 1/(2β))². Wu et al. 2024, SPPO (arXiv:2405.00675), eq. 4.7 with win probabilities of 1 and 0."""
    half = 0.5 / options.beta
    return (scores.chosen.log_ratio - half) ** 2 + (scores.rejected.log_ratio + half) ** 2


def aot(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """Smoothed -log σ(β δ), δ between quantiles of log π(c)/π(r) and of log π_ref(c)/π_ref(r). Melnyk et al. 2024, AOT (arXiv:2406.05882), paired.

    Over the batch: it depends on which pairs came together.
    """
    policy = scores.chosen.logprob - scores.rejected.logprob
    reference = scores.chosen.reference_logprob - scores.rejected.reference_logprob
    return _smoothed_sigmoid(policy - _same_quantile(policy, reference, scores.real), options)


def aot_unpaired(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """Smoothed -log σ(β δ), δ between quantiles of r_c and of r_r. Melnyk et al. 2024, AOT (arXiv:2406.05882), unpaired.

    Over the batch: it depends on which pairs came together.
    """
    chosen, rejected = scores.chosen.log_ratio, scores.rejected.log_ratio
    return _smoothed_sigmoid(chosen - _same_quantile(chosen, rejected, scores.real), options)


def apo_zero(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """σ(-β r_c) + σ(β r_r). D'Oosterlinck et al. 2024, APO (arXiv:2408.06266), eq. 7: for chosen samples better than the model's own."""
    chosen, rejected = _rewards(scores, options)
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


def apo_down(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """σ(β r_c) + σ(-β (r_c - r_r)). D'Oosterlinck et al. 2024, APO (arXiv:2408.06266), eq. 8: for chosen samples worse than the model's own."""
    chosen, rejected = _rewards(scores, options)
    return torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)


def discopop(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """-(1 - w) log σ(m) + w exp(-m), w = σ(m/τ), m = β (s_c - s_r). Lu et al. 2024, DiscoPOP (arXiv:2406.08414), eq. 5.

    The second product is made of one exponent: its factors alone overflow and vanish where a pair is far on the wrong side.
    """
    margin = _margin(scores, options)
    scaled = margin / options.discopop_tau
    return torch.exp(F.logsigmoid(scaled) - margin) - torch.sigmoid(-scaled) * F.logsigmoid(margin)


def sft(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """-log π(c), summed over tokens: to be divided by tokens. The generation term of MPO, Wang et al. 2024 (arXiv:2411.10442)."""
    return scores.chosen_nll


def sigmoid_norm(scores: PairScores, options: PreferenceOptions) -> Tensor:
    """-log σ(β (s_c/|c| - s_r/|r|)). Length-normalised DPO, Lambert et al. 2024, Tülu 3 (arXiv:2411.15124)."""
    return -F.logsigmoid(options.beta * _mean_score_difference(scores, options))


PREFERENCE_LOSSES: Mapping[str, Callable[[PairScores, PreferenceOptions], Tensor]] = MappingProxyType(
    {
        loss.__name__: loss
        for loss in (
            *(sigmoid, hinge, ipo, exo_pair, nca_pair, robust, bco_pair, sppo_hard),
            *(aot, aot_unpaired, apo_zero, apo_down, discopop, sft, sigmoid_norm),
        )
    }
)
"""The formula of each loss, by the name it has in `PreferenceOptions.loss_type`: pairs and options in, `[pairs]` out."""


def _rewards(scores: PairScores, options: PreferenceOptions) -> tuple[Tensor, Tensor]:
    return options.beta * scores.chosen.log_ratio, options.beta * scores.rejected.log_ratio


def _margin(scores: PairScores, options: PreferenceOptions) -> Tensor:
    chosen, rejected = (divergence_score(side.log_ratio, options) for side in (scores.chosen, scores.rejected))
    return options.beta * (chosen - rejected)


def _mean_score_difference(scores: PairScores, options: PreferenceOptions) -> Tensor:
    chosen, rejected = (
        divergence_score(side.log_ratio, options) / side.tokens.clamp(min=1.0)
        for side in (scores.chosen, scores.rejected)
    )
    return chosen - rejected


def _smoothed_sigmoid(difference: Tensor, options: PreferenceOptions) -> Tensor:
    margin, epsilon = options.beta * difference, options.label_smoothing
    return -(1 - epsilon) * F.logsigmoid(margin) - epsilon * F.logsigmoid(-margin)


def _same_quantile(values: Tensor, others: Tensor, real: Tensor) -> Tensor:
    """For each of `values` `[pairs]` the one of `others` that has its rank, both among the real pairs; 0 where a pair fills up.

    This is the optimal transport between two samples on the line. Ranks come from `topk` over everything, because devices of fixed shapes have
    no sort; what fills up is put last in both and so meets only itself.
    """
    order = values.detach().masked_fill(~real, torch.inf).topk(len(values), largest=False).indices
    ranked = others.masked_fill(~real, torch.inf).topk(len(others), largest=False).values
    return torch.zeros_like(others).index_add(0, order, ranked).masked_fill(~real, 0.0)
