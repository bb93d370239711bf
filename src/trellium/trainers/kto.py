"""Kahneman-Tversky optimization: completions that are marked good become more likely, and those marked bad less, as far as a reference allows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from datasets import Dataset
from torch import Tensor

from trellium.data.samples import ReadCompletions, ReadMismatched, RowReader
from trellium.data.unpaired import UnpairedOptions, prepare_unpaired
from trellium.monitor.metrics import MetricSink
from trellium.ops.segments import SampleScores, per_sample, sample_scores
from trellium.ops.unpaired import mismatched_kl, reference_point, unpaired_loss, unpaired_metrics
from trellium.trainers.kto_config import KTOConfig
from trellium.trainers.referenced import ReferencedTrainer


class KTOTrainer(ReferencedTrainer):
    """Kahneman-Tversky optimization, with TRL's signature (Ethayarajh et al. 2024).

    The divergence from the reference is estimated from each prompt with the completion of another row, which is one of the same batch where rows come in order;
    the two share the prompt's tokens. Batches of one row and rows in any order will do. Mismatched completions learn nothing, but lie in the policy's batch: a
    forward of their own would save their backward and cost every prompt once more, which is dearer where prompts are the longer part.

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
        return self.args.unpaired.needs_kl

    @property
    def _each(self) -> int:
        """Sequences of a row."""
        return 2 if self.estimates else 1

    @property
    def reference_columns(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("ref_logps", "ref_KL_logps") if self.estimates else ("ref_logps",)

    @property
    def row_columns(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("label", *super().row_columns)

    score_outputs = ("logprob", "entropy", "mean_logit")

    def prepare_dataset(self, dataset: Any, name: str) -> Any:
        """Rows of judged completions to `prompt_ids`, `completion_ids`, `kl_completion_ids` and `label`."""
        together = self.args.per_device_train_batch_size
        options = UnpairedOptions(together=together, keep_columns=super().row_columns, **self.preparation(name))
        prepared = prepare_unpaired(dataset, self.processing_class, options)
        if name == "train" and isinstance(prepared, Dataset):
            labels = prepared.with_format("numpy")["label"][:]
            self.args.warn_of_imbalance(int(labels.sum()), int((~labels).sum()))
        return prepared

    def row_reader(self, *, evaluation: bool = False) -> RowReader:
        """A prompt with its own completion, and with that of another row where the divergence is estimated."""
        return ReadMismatched() if self.estimates else ReadCompletions()

    def count_items(self, inputs: dict[str, Tensor]) -> Tensor:
        """The rows of a batch: `[]`."""
        return inputs["row_weight"].sum()

    @property
    def loss_spans(self) -> Literal["step", "round", "batch"]:
        """An estimate of the divergence is one of a micro-batch in all processes."""
        return "round" if self.estimates and super().loss_spans == "step" else super().loss_spans

    def _compared(self, scores: Any, inputs: dict[str, Tensor]) -> tuple[SampleScores, Tensor | None]:
        """Policy and reference on the rows' own completions `[B]`, and the estimate of the divergence `[]`."""
        real, edge = inputs["row_weight"] > 0, inputs["term_edge"]
        samples = len(real) * self._each
        mask = inputs["term_weight"] > 0
        precomputed = scores.reference_logprob is None
        logprob = scores.logprob[edge]
        reference = torch.zeros_like(logprob) if precomputed else scores.reference_logprob[edge]
        every = sample_scores(logprob, reference, inputs["term_sample"], samples, mask=mask)
        if precomputed:
            sums = torch.stack([inputs[f"row_{name}"] for name in self.reference_columns], dim=1).flatten()
            every = replace(every, reference_logprob=sums, log_ratio=every.logprob - sums)
        fields = (every.logprob, every.reference_logprob, every.log_ratio, every.tokens)
        own = SampleScores(*(field[:: self._each] for field in fields))
        if not self.estimates:
            return own, None
        parts = torch.stack(mismatched_kl(every.log_ratio[1::2], real))
        if self.accelerator.num_processes > 1:
            parts = self.accelerator.reduce(parts, reduction="sum")
        return own, reference_point(*parts)

    def compute_scored_loss(self, scores: Any, inputs: dict[str, Tensor], normalizer: Tensor | float) -> Tensor:
        """The mean `[]` over rows of the loss that `loss_type` names, good and bad ones weighed."""
        own, divergence = self._compared(scores, inputs)
        desirable, real = inputs["row_label"] > 0, inputs["row_weight"] > 0
        return unpaired_loss(own, desirable, real, self.args.unpaired, divergence).sum() / normalizer

    def record(self, sink: MetricSink, scores: Any, inputs: dict[str, Tensor]) -> None:
        """Rewards of good and of bad rows, and what the head says of their tokens."""
        own, divergence = self._compared(scores, inputs)
        desirable, real = inputs["row_label"] > 0, inputs["row_weight"] > 0
        if divergence is not None:
            sink.add_mean("kl", divergence, torch.ones_like(divergence))
        for name, (total, count) in unpaired_metrics(own, desirable, real, self.args.unpaired).items():
            sink.add_mean(name, total, count)
        sample = inputs["term_sample"]
        self.record_tokens(
            sink, scores, inputs, chosen=desirable[sample // self._each], counted=sample % self._each == 0
        )

    def order_of_predictions(self, sequences: int) -> Tensor:
        """Predictions are of the rows' own completions."""
        return torch.arange(0, sequences, self._each, device=self.args.device)

    def finish_metrics(self, means: dict[str, float]) -> None:
        """The margin between the mean rewards of good and of bad rows, where there were both."""
        if {"rewards/chosen", "rewards/rejected"} <= set(means):
            means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]

    def reference_values(self, logprob: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The reference's log-probability of the own completions, and of those of other rows."""
        samples = len(inputs["row_weight"]) * self._each
        sums = per_sample(logprob[inputs["term_edge"]], inputs["term_sample"], samples, inputs["term_weight"] > 0)
        return dict(zip(self.reference_columns, sums.view(-1, self._each).unbind(1), strict=True))
