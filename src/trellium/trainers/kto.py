"""Kahneman-Tversky optimization: completions that are marked good become more likely, and those marked bad less, as far as a reference allows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trellium.data.samples import ReadCompletions, ReadMismatched, RowReader
from trellium.data.unpaired import UnpairedOptions, prepare_unpaired
from trellium.monitor.metrics import MetricSink
from trellium.ops.segments import per_sample
from trellium.ops.unpaired import UNPAIRED_LOSSES, divergence_estimate
from trellium.trainers.kto_config import KTOConfig
from trellium.trainers.referenced import ReferencedTrainer


class KTOTrainer(ReferencedTrainer):
    """Kahneman-Tversky optimization, with TRL's signature (Ethayarajh et al. 2024).

    The divergence from the reference is estimated from each prompt with the completion of another row; the two share the prompt's tokens. Batches of one row
    and rows in any order will do: the other row is then one of the dataset.

    Args:
        model: a name or path, a causal language model, or one with an adapter.
        ref_model: the reference; None for the model as it is now.
        args: a `KTOConfig`.
        train_dataset, eval_dataset: rows of `prompt`, `completion` and `label`, as `trellium.data.formats` has them, or pairs, which are taken as two.
        **arguments: those of `BaseTrainer`.

    Logged: `loss`, `kl`, `rewards/{chosen,rejected,margins}`, `logps/{chosen,rejected}`, `logits/{chosen,rejected}`, `entropy`, and what every trainer logs.
    """

    config_class = KTOConfig
    method = "kto"
    args: KTOConfig

    @property
    def estimates(self) -> bool:
        """Whether the loss compares with an estimate of the divergence."""
        return self.args.loss_type == "kto"

    @property
    def reference_columns(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("ref_logps", "ref_KL_logps") if self.estimates else ("ref_logps",)

    @property
    def row_columns(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("label", *super().row_columns)

    score_outputs = ("logprob", "entropy", "mean_logit")

    def prepare_dataset(self, dataset: Any, name: str) -> Any:
        """Rows of judged completions to `prompt_ids`, `completion_ids`, `kl_completion_ids` and `label`."""
        options = UnpairedOptions(keep_columns=super().row_columns, **self.preparation(name))
        return prepare_unpaired(dataset, self.processing_class, options)

    def row_reader(self, *, evaluation: bool = False) -> RowReader:
        """A prompt with its own completion, and with that of another row where the divergence is estimated."""
        return ReadMismatched(self.args.max_length) if self.estimates else ReadCompletions()

    def count_items(self, inputs: dict[str, Tensor]) -> Tensor:
        """The rows of a batch: `[]`."""
        return inputs["row_weight"].sum()

    def _sums(self, logprob: Tensor, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """`[B]` each: log-probability of the rows' own completions, and of those of other rows."""
        rows = len(inputs["row_weight"])
        each = 2 if self.estimates else 1
        terms = (inputs["term_sample"], inputs["term_weight"])
        sums = per_sample(logprob[inputs["term_edge"]], *terms, rows * each).view(rows, each)
        return sums[:, 0], sums[:, -1]

    def _compared(self, scores: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability of the own completions `[B]`, that minus the reference's `[B]`, and the divergence `[]`."""
        own, other = self._sums(scores.logprob, inputs)
        if scores.reference_logprob is None:
            reference, reference_other = (inputs[f"row_{name}"] for name in (*self.reference_columns, "ref_logps")[:2])
        else:
            reference, reference_other = self._sums(scores.reference_logprob, inputs)
        total, count = divergence_estimate(other, reference_other, inputs["row_weight"])
        if self.accelerator.num_processes > 1:
            total, count = self.accelerator.reduce(torch.stack([total, count]), reduction="sum").unbind()
        return own, own - reference, (total / count.clamp(min=1)).clamp(min=0)

    def compute_scored_loss(self, scores: Any, inputs: dict[str, Tensor], normalizer: Tensor | float) -> Tensor:
        """The mean `[]` over rows of the loss that `loss_type` names, good and bad ones weighed."""
        _, ratio, divergence = self._compared(scores, inputs)
        desirable = inputs["row_label"] > 0
        losses = UNPAIRED_LOSSES[self.args.loss_type](ratio, desirable, divergence, self.args.beta)
        weight = torch.where(desirable, self.args.desirable_weight, self.args.undesirable_weight)
        return (weight * inputs["row_weight"] * losses).sum() / normalizer

    def record(self, sink: MetricSink, scores: Any, inputs: dict[str, Tensor]) -> None:
        """Rewards of good and of bad rows, and what the head says of their tokens."""
        own, ratio, divergence = self._compared(scores, inputs)
        if self.estimates:
            sink.add_mean("kl", divergence, torch.ones_like(divergence))
        for name, label in (("chosen", 1.0), ("rejected", 0.0)):
            here = inputs["row_weight"] * (inputs["row_label"] == label)
            sink.add_mean(f"rewards/{name}", (self.args.beta * ratio.detach() * here).sum(), here.sum())
            sink.add_mean(f"logps/{name}", (own.detach() * here).sum(), here.sum())
        each = 2 if self.estimates else 1
        row = inputs["term_sample"] // each
        of_own = inputs["term_sample"] % each == 0
        self.record_tokens(sink, scores, inputs, chosen=inputs["row_label"][row] > 0, counted=of_own)

    def finish_metrics(self, means: dict[str, float]) -> None:
        """The margin between the mean rewards of good and of bad rows, where there were both."""
        if {"rewards/chosen", "rewards/rejected"} <= set(means):
            means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]

    def reference_values(self, logprob: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The reference's log-probability of the own completions, and of those of other rows."""
        return dict(zip(self.reference_columns, self._sums(logprob, inputs), strict=False))
