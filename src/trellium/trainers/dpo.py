"""Direct preference optimization: the better of two completions becomes more likely than the worse, as far as a reference allows."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from trellium.data.preferences import PreferenceOptions as PreparationOptions
from trellium.data.preferences import prepare_preferences
from trellium.data.samples import ReadPairs
from trellium.models.scoring import ScoreOutput
from trellium.monitor.metrics import MetricSink
from trellium.ops.preference import preference_loss, preference_metrics
from trellium.ops.preference_options import needed_scores
from trellium.ops.preference_scores import PairScores, pair_scores
from trellium.trainers.dpo_config import DPOConfig
from trellium.trainers.referenced import ReferencedTrainer


class DPOTrainer(ReferencedTrainer):
    """Direct preference optimization, with TRL's signature (Rafailov et al. 2023); the chosen and the rejected completion share their prompt's tokens.

    Args:
        model: a name or path, a causal language model, or one with an adapter.
        ref_model: the reference; None for the model as it is now.
        args: a `DPOConfig`.
        train_dataset, eval_dataset: rows of `prompt`, `chosen` and `rejected`, as `trellium.data.formats` has them; without a prompt, what both begin with.
        **arguments: those of `BaseTrainer`.

    Logged: `loss`, `rewards/{chosen,rejected,accuracies,margins}`, `logps/{chosen,rejected}`, `logits/{chosen,rejected}`, `entropy`,
    `mean_token_accuracy` of the chosen, and what every trainer logs. Losses and rewards are means over all pairs of the step, or of the held-out set.
    """

    config_class = DPOConfig
    method = "dpo"
    args: DPOConfig
    reference_columns = ("ref_chosen_logps", "ref_rejected_logps")
    compared_rows = 2

    def prepare_dataset(self, dataset: Any, name: str) -> Any:
        """Rows of preferences to `prompt_ids`, `chosen_ids` and `rejected_ids`."""
        options = PreparationOptions(
            truncation_mode=self.args.truncation_mode, keep_columns=self.row_columns, **self.preparation(name)
        )
        return prepare_preferences(dataset, self.processing_class, options)

    def row_reader(self, *, evaluation: bool = False) -> ReadPairs:
        """Two sequences a row: chosen and rejected."""
        return ReadPairs()

    @property
    def score_outputs(self) -> tuple[str, ...]:  # type: ignore[override]
        """What is logged needs more of the head than the loss does."""
        logged = ("entropy", "mean_logit", "top1")
        return (*needed_scores(self.args.preference), *logged)

    def count_items(self, inputs: dict[str, Tensor]) -> Tensor:
        """The pairs of a batch, and its chosen tokens: `[2]`."""
        chosen = (inputs["term_sample"] % 2 == 0) & (inputs["term_weight"] > 0)
        return torch.stack([inputs["row_weight"].sum(), chosen.sum().float()])

    @property
    def loss_spans(self) -> Literal["step", "round", "batch"]:
        """Losses that compare the sorted samples of a micro-batch depend on which are in it."""
        compares = any(name.startswith("aot") for name in self.args.loss_type)
        return "batch" if compares else super().loss_spans

    def _pairs(self, scores: Any, inputs: dict[str, Tensor]) -> PairScores:
        edge = inputs["term_edge"]
        if scores.reference_logprob is None:  # asked before the run
            reference: Any = tuple(inputs[f"row_{name}"] for name in self.reference_columns)
        else:
            reference = scores.reference_logprob[edge]
        return pair_scores(
            scores.logprob[edge],
            reference,
            inputs["term_sample"],
            mask=inputs["term_weight"] > 0,
            real=inputs["row_weight"] > 0,
            ld_alpha=self.args.ld_alpha,
            log_sum_p2=None if scores.log_sum_p2 is None else scores.log_sum_p2[edge],
        )

    def compute_scored_loss(self, scores: Any, inputs: dict[str, Tensor], normalizer: Tensor | float) -> Tensor:
        """The weighted sum `[]` of the losses that `loss_type` names."""
        if not isinstance(normalizer, Tensor):  # of a held-out set: a mean over pairs, tokens as this batch has them
            pairs, tokens = self.count_items(inputs).clamp(min=1)
            normalizer = torch.stack([torch.ones_like(pairs), tokens / pairs]) * normalizer
        pairs, tokens = normalizer
        return preference_loss(self._pairs(scores, inputs), self.args.preference, pairs=pairs, chosen_tokens=tokens)

    def record(self, sink: MetricSink, scores: Any, inputs: dict[str, Tensor]) -> None:
        """Rewards of pairs, and what the head says of their tokens."""
        weight = inputs["row_weight"]
        for name, values in preference_metrics(self._pairs(scores, inputs), self.args.preference).items():
            sink.add_mean(name, values.sum(), weight.sum())
        self.record_tokens(sink, scores, inputs, chosen=inputs["term_sample"] % 2 == 0, accuracy_of_chosen=True)

    def reference_values(self, logprob: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The reference's log-probability of both completions, weighed as the policy's."""
        pairs = self._pairs(ScoreOutput(logprob=logprob, reference_logprob=logprob), inputs)
        return dict(zip(self.reference_columns, (pairs.chosen.logprob, pairs.rejected.logprob), strict=True))

    def reference_options(self) -> tuple:
        """Beside rows and weights, the reference's values depend on how longer completions are weighed."""
        return (*super().reference_options(), self.args.ld_alpha)
