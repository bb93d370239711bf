"""The metrics of a run: on the device until they are logged, counts that survive a resume, and how fast it goes.

A trainer adds each batch to the sums of its mode (`trellium.monitor.metrics`); logging reads them in one transfer. Seconds of evaluation and saving are no
training time (`trellium.monitor.throughput`), and steps in which something was compiled are left out of the steady rate, by the ledger's record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from trellium.monitor import ledger
from trellium.monitor.metrics import MetricSink
from trellium.monitor.throughput import ThroughputMeter
from trellium.trainers.finite_guard import GuardedTrainer
from trellium.trainers.warm_up import ShapeWatch

_COUNTERS = "trellium"
"""The key of our counters in a checkpoint's `trainer_state.json`, among the states of callbacks."""


class MeteredTrainer(GuardedTrainer):
    """`GuardedTrainer` with such metrics; takes its arguments."""

    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        self._shape_watch: ShapeWatch | None = None  # from the warm-up on
        self.throughput = ThroughputMeter(self.args.device)
        self._start_counting({})
        self.add_callback(_StepTimes(self))

    def record(self, sink: MetricSink, scores: Any, inputs: dict[str, Tensor]) -> None:
        """Add the method's own metrics of a batch, on the device; here means over the trained tokens, of which several may share an edge."""
        trained = inputs["edge_weight"]
        for name, values in (("entropy", scores.entropy), ("mean_token_accuracy", scores.top1)):
            if values is not None:
                sink.add_mean(name, (values.detach().float() * trained).sum(), trained.sum())

    def record_tokens(
        self,
        sink: MetricSink,
        scores: Any,
        inputs: dict[str, Tensor],
        *,
        chosen: Tensor,
        counted: Tensor | None = None,
        accuracy_of_chosen: bool = False,
    ) -> None:
        """Means over the terms of samples that are compared: `entropy`, `logits/chosen`, `logits/rejected` and perhaps `mean_token_accuracy`.

        Args:
            chosen: `[T]` bool, whether a term is of a better completion.
            counted: `[T]` bool, which terms count at all; None for all that are no fillers.
        """
        edge, real = inputs["term_edge"], inputs["term_weight"] > 0
        real = real if counted is None else real & counted
        wanted = [("entropy", scores.entropy, real)]
        wanted += [("logits/chosen", scores.mean_logit, real & chosen)]
        wanted += [("logits/rejected", scores.mean_logit, real & ~chosen)]
        if accuracy_of_chosen:
            wanted += [("mean_token_accuracy", scores.top1, real & chosen)]
        for name, values, where in wanted:
            sink.add_mean(name, values.detach().float()[edge].masked_fill(~where, 0.0).sum(), where.sum())

    def finish_metrics(self, means: dict[str, float]) -> None:
        """Add to the means since they were last read what is made of them."""

    def _record(self, mode: str, scores: Any, inputs: dict[str, Tensor]) -> None:
        """Add a batch to the metrics, on the device."""
        sink = self._sinks[mode]
        self.record(sink, scores, inputs)
        if scores.aux_loss is not None:
            sink.add_mean("aux_loss", scores.aux_loss, torch.ones_like(scores.aux_loss))
        forest_tokens = inputs["real_tokens"].sum()
        tokens = inputs.get("data_tokens", inputs["sequence_tokens"])
        sink.add_count("num_tokens", tokens)
        sink.add_mean("packing_ratio", inputs["sequence_tokens"], forest_tokens)
        sink.add_mean("fill", forest_tokens, torch.full_like(forest_tokens, inputs["input_ids"].numel()))
        if mode == "train":
            self._step_tokens.append(tokens)
            sink.add_count("trained_tokens", (inputs["edge_weight"] > 0).sum())
            self.throughput.forwarded(inputs["input_ids"].numel())

    def run_begins(self) -> None:
        """What is to be done before the first step."""

    def _start_counting(self, counts_before: dict[str, int]) -> None:
        self._sinks = {mode: MetricSink(self.args.device) for mode in ("train", "eval")}
        self._counts_before = counts_before
        self._counts_logged = dict(counts_before)
        self._step_tokens: list[Tensor] = []
        self._compiled_before = ledger.mark()
        self.throughput.restart()

    def means_so_far(self) -> dict[str, Tensor]:
        return self._sinks["train"].means()

    def step_refused(self, means_before: dict[str, Tensor]) -> None:
        sink = self._sinks["train"]
        sink.put_back(means_before)
        sink.add_count("skipped_steps", torch.tensor(int(self.accelerator.is_main_process)))

    def step_ended(self) -> None:
        """Count the tokens of an optimizer step that compiled nothing for the steady rate."""
        if self._shape_watch is not None:
            self._shape_watch.check(f"step {self.state.global_step}")
        steady = self.throughput.step_ends()
        tokens, self._step_tokens = self._step_tokens, []
        for count in tokens:
            self._sinks["train"].add_count("steady_tokens", count if steady else torch.zeros_like(count))

    def _reduce(self) -> Callable[[Tensor], Tensor] | None:
        if self.accelerator.num_processes == 1:
            return None
        return lambda sums: self.accelerator.reduce(sums, reduction="sum")

    def _totals(self, counts: dict[str, int]) -> dict[str, int]:
        return {
            name: self._counts_before.get(name, 0) + counts.get(name, 0) for name in (*self._counts_before, *counts)
        }

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; the metrics of the steps since the last time are merged into a training step's."""
        if "loss" in logs:
            means, counts = self._sinks["train"].read(self._reduce())
            self.finish_metrics(means)
            totals = self._totals(counts)
            since = {name: total - self._counts_logged.get(name, 0) for name, total in totals.items()}
            self._counts_logged = totals
            logs.update(means, num_tokens=totals.get("num_tokens", 0))
            if totals.get("skipped_steps"):
                logs["skipped_steps"] = totals["skipped_steps"]
            logs.update(
                self.throughput.read(
                    real=since.get("num_tokens", 0),
                    trained=since.get("trained_tokens", 0),
                    steady=since.get("steady_tokens", 0),
                    processes=self.accelerator.num_processes,
                )
            )
            compiled = ledger.metrics(self._compiled_before)
            if compiled["compile/graphs"]:
                logs.update(compiled)
        super().log(logs, start_time)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """As in `transformers.Trainer`, with one sum over the whole set for every metric, the loss included."""
        with self.throughput.paused():
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
            means, counts = self._sinks["eval"].read(self._reduce())
            self.finish_metrics(means)
            self._sinks["eval"] = MetricSink(self.args.device)  # counts are of this evaluation alone
            means["num_tokens"] = counts.get("num_tokens", 0)
        if self._shape_watch is not None:
            self._shape_watch.check("evaluation")
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in means.items()})
        return output

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        started = super()._init_training_state(*args, **kwargs)
        self._start_counting(dict(self.state.stateful_callbacks.get(_COUNTERS, {})))
        return started

    def keep_counts(self) -> None:
        """Put the counts into the state, which is saved with a checkpoint."""
        self.state.stateful_callbacks[_COUNTERS] = self._totals(self._sinks["train"].counts(self._reduce()))


class _StepTimes(TrainerCallback):
    """Tells the trainer's meter when an optimizer step begins and ends."""

    def __init__(self, trainer: MeteredTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.run_begins()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.throughput.step_begins()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.step_ended()
