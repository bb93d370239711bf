"""Steps that are not finite are refused: the rows are named, the weights stay, and nothing poisoned is saved.

Between the gradient norm, which `transformers.Trainer` makes anyway, and the optimizer, the losses of the step's micro-batches and that norm go to the host
together. If one is not a finite number, the step is not taken:

- weights, optimizer state and learning-rate schedule stay as they were. `global_step` goes on, because the rows are spent, so a schedule ends as many steps
  short as were refused: what a `GradScaler` does to it too;
- it is counted (`skipped_steps`), left out of the logged means, and told with the beginnings of its rows: those of the micro-batches whose loss is not
  finite, or of all if only the gradient is not;
- a checkpoint that is due waits for the next step that is taken, or for the end of the run, but for one of the best evaluation, whose weights are those
  that were evaluated;
- `max_nonfinite_steps` refusals in a row stop the run.

The losses are the same on the host of every process, because they are summed first: all refuse, or none. Under fp16 a gradient that overflows is no fault but
how the `GradScaler` finds its scale, which skips that step itself; it is one once the scale is below 1, where it cannot be the scale, or where the loss
itself is not finite. DeepSpeed and LOMO take their steps while they go backward, before anyone can look: there, only what is saved is guarded.

Cost: one wait for the device in an optimizer step, none in a micro-batch; the weights are read once a save.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.trainer_utils import TrainOutput

from trellium.errors import ModelError
from trellium.trainers.base_config import BaseConfig
from trellium.trainers.resuming import ResumingTrainer

logger = logging.getLogger(__name__)

ROWS_TOLD = 8
"""How many sequences of a refused step are told at most."""

TOKENS_TOLD = 16
"""Tokens at the beginning of a sequence by which it is told."""


@dataclass(slots=True)
class _Step:
    """What is known of an optimizer step until it is taken or refused."""

    batches: list[Mapping[str, Tensor]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    """`[]` of each micro-batch."""
    loss_before: Tensor | None = None
    """`[]`, the trainer's sum of the losses since the last log."""
    means_before: dict[str, Tensor] = field(default_factory=dict)


class GuardedTrainer(ResumingTrainer):
    """`transformers.Trainer`, whose steps are taken only if they are finite."""

    args: BaseConfig
    optimizer: Any
    resume_point: str | None
    _total_loss_scalar: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._step = _Step()
        self._streak = 0
        self._save_waits = False
        self._refused_in_run = self._refused_since_log = self._logged_at = 0

    # ---- what a subclass says ----

    def means_so_far(self) -> dict[str, Tensor]:
        """The metrics summed since the last log, which a refused step must not be in."""
        return {}

    def step_refused(self, means_before: dict[str, Tensor]) -> None:
        """Count a refused step, and put the metrics back to what `means_so_far` gave before it."""

    # ---- the step ----

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, Tensor | int | None]:
        """As in `transformers.Trainer`; here an optimizer step begins."""
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._step = _Step(batches, [], self._tr_loss.clone(), self.means_so_far())
        return batches, count

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """As in `transformers.Trainer`; the loss is kept until the step is looked at."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._step.losses.append(loss)
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        if self.is_deepspeed_enabled:
            return norm
        self._mark_skipped(False)
        losses, norm_seen, finite = self._look(norm)
        if finite:
            self._streak = 0
            self.control.should_save |= self._save_waits
            self._save_waits = False
        elif not self._is_overflow(losses):
            self._refuse(model, losses, norm_seen)
        return norm

    def _look(self, norm: Any) -> tuple[list[float], float, bool]:
        """The losses of this process, the gradient norm, and whether they are finite in all processes. One transfer."""
        norm = torch.as_tensor(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        seen = torch.stack([part.detach().to(self.args.device, torch.float32) for part in (*self._step.losses, norm)])
        total = seen.sum()  # of finite numbers and others it is no finite number
        if self.accelerator.num_processes > 1:
            total = cast(Tensor, self.accelerator.reduce(total, reduction="sum"))
        *losses, norm_seen, whole = torch.cat([seen, total[None]]).tolist()
        return losses, norm_seen, math.isfinite(whole)

    def _is_overflow(self, losses: list[float]) -> bool:
        """Whether a `GradScaler` looks for its scale, and skips the step by itself."""
        scaler = self.accelerator.scaler
        return scaler is not None and all(map(math.isfinite, losses)) and scaler.get_scale() >= 1

    def _refuse(self, model: nn.Module, losses: list[float], norm: float) -> None:
        step = self._step
        self._streak += 1
        self._refused_in_run += 1
        self._refused_since_log += 1
        if step.loss_before is not None:
            self._tr_loss.copy_(step.loss_before)
        self.step_refused(step.means_before)
        told = (
            f"step {self.state.global_step + 1} is not finite: loss {sum(losses):.4g}, gradient norm {norm:.4g}. "
            f"It is refused, {self._streak} in a row. {self._rows_of(losses)}"
        )
        if self._streak >= self.args.max_nonfinite_steps:
            model.zero_grad()
            raise ModelError(f"{told}\n{self._way_out()}")
        logger.warning("%s", told)
        self.optimizer = _NotTaken(self)

    def _rows_of(self, losses: list[float]) -> str:
        """The rows to blame: of micro-batches whose loss is not finite, or of all if each is."""
        blamed = [place for place, loss in enumerate(losses) if not math.isfinite(loss)] or range(len(losses))
        rows = (
            f"\n  micro-batch {place}, {row}"
            for place in blamed
            for row in openings(self._step.batches[place], self._decode)
        )
        told = list(islice(rows, ROWS_TOLD))
        more = sum(1 for _ in rows)
        return f"Its sequences begin:{''.join(told)}" + (f"\n  and {more} more" if more else "")

    def _decode(self, ids: list[int]) -> str:
        decode = getattr(self.processing_class, "decode", None)
        return str(ids) if decode is None else repr(decode(ids))

    def _way_out(self) -> str:
        kept = f" The last checkpoint is {self.resume_point}." if self.resume_point else ""
        return (
            f"max_nonfinite_steps={self.args.max_nonfinite_steps} stops the run here. The weights are those before these {self._streak} steps, and "
            f"no checkpoint was written since.{kept} If it is always the same rows, look at them and leave them out; if it is all rows, the "
            "weights have grown too far: go on from an earlier checkpoint with a lower learning_rate or max_grad_norm, or with bf16 instead of fp16."
        )

    def _mark_skipped(self, skipped: bool) -> None:
        """Tell accelerate whether a step was taken, which is whether `Trainer` moves the schedule on."""
        self.optimizer._is_overflow = skipped

    # ---- logs ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As in `transformers.Trainer`; the mean loss is of the steps that were taken."""
        if "loss" in logs:
            steps = self.state.global_step - max(self._logged_at, self._initial_global_step)
            logs["loss"] = _mean_of_taken(logs["loss"], steps, self._refused_since_log)
            self._refused_since_log, self._logged_at = 0, self.state.global_step
        super().log(logs, start_time)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        started = super()._init_training_state(*args, **kwargs)
        self._streak, self._save_waits = 0, False
        self._refused_in_run = self._refused_since_log = self._logged_at = 0
        return started

    def _finalize_training(self, trial: Any, *args: Any, **kwargs: Any) -> TrainOutput:
        if self._save_waits:
            # No step follows for it to wait for; the weights are those of the last that was taken.
            self._streak, self._save_waits = 0, False
            self._save_checkpoint(self.model_wrapped, trial)
            self.callback_handler.on_save(self.args, self.state, self.control)
        if self._refused_in_run:
            steps = self.state.global_step - self._initial_global_step
            total = self._total_loss_scalar + self._tr_loss.item()
            self._total_loss_scalar = _mean_of_taken(total, steps, self._refused_in_run)
            self._tr_loss.zero_()
        return super()._finalize_training(trial, *args, **kwargs)

    # ---- what is saved ----

    def may_save(self) -> bool:
        """Whether a checkpoint may be written now; else it waits for the next step that is taken.

        Raises:
            ModelError: a trained weight is not finite; names the first.
        """
        if self._streak and self.state.best_global_step != self.state.global_step:
            self._save_waits = True
            logger.warning(
                "No checkpoint is written after step %d, which was refused: it waits for the next step that is taken, or the end of the run.",
                self.state.global_step,
            )
            return False
        self._refuse_poisoned()
        return True

    def _refuse_poisoned(self) -> None:
        """Hold the trained weights to be finite, in all processes, before they are saved.

        Raises:
            ModelError: one is not; names the first.
        """
        trained = [(name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad]
        if not trained:
            return
        poisoned = torch.stack([_is_poisoned(weight.detach()).to(self.args.device) for _, weight in trained]).float()
        if self.accelerator.num_processes > 1:
            poisoned = cast(Tensor, self.accelerator.reduce(poisoned, reduction="sum"))
        names = [name for (name, _), here in zip(trained, poisoned.tolist(), strict=True) if here]
        if names:
            kept = f"Go on from {self.resume_point}" if self.resume_point else "Start again"
            raise ModelError(
                f"no checkpoint is written after step {self.state.global_step}: {len(names)} of {len(trained)} trained weights are not finite, the first {names[0]}. "
                f"The steps were finite, so what they added was too much. {kept}, with a lower learning_rate."
            )


class _NotTaken:
    """Stands in for the optimizer for the one step that is refused."""

    def __init__(self, trainer: GuardedTrainer) -> None:
        self._trainer = trainer
        self._optimizer = trainer.optimizer

    def step(self, *_: Any, **__: Any) -> None:
        trainer = self._trainer
        trainer.optimizer = self._optimizer
        if trainer.accelerator.scaler is not None:
            trainer.accelerator.scaler.update()  # it has unscaled these gradients, and expects to be told of their end
        trainer._mark_skipped(True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def openings(batch: Mapping[str, Tensor], decode: Any) -> Iterator[str]:
    """Where in a batch each sequence, or tree of them, starts, and how.

    Args:
        batch: the tensors of a `ForestBatch`.
        decode: from token ids to what is shown.
    """
    rows = zip(batch["input_ids"].tolist(), batch["position_ids"].tolist(), batch["real_tokens"].tolist(), strict=True)
    for row, (ids, positions, real) in enumerate(rows):
        starts = [place for place in range(real) if positions[place] == 0]
        for start, end in pairwise([*starts, real]):
            place = f", token {start}" if len(starts) > 1 else ""
            yield f"row {row}{place}: {decode(ids[start : min(end, start + TOKENS_TOLD)])}"


def _mean_of_taken(mean: float, steps: int, refused: int) -> float:
    """A mean over steps of which the refused added nothing, as that of the others."""
    if not refused:
        return mean
    return mean * steps / (steps - refused) if steps > refused else math.nan


def _is_poisoned(weight: Tensor) -> Tensor:
    """`[]` bool, whether this process's part of a weight has a number that is not finite."""
    part = weight.to_local() if hasattr(weight, "to_local") else weight
    return ~torch.isfinite(part).all()
