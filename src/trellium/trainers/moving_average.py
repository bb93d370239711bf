"""A bias-corrected moving average of the weights (BEMA), saved beside the model it is of.

After every `update_freq` steps, with θ₀ the weights after `update_after` steps and θ those now:

    ema ← (1 - β) · ema + β · θ        β = max((lag + multiplier · step)^-ema_power, min_ema_multiplier)
    bema = ema + α · (θ - θ₀)          α = (lag + multiplier · step)^-bias_power

Cost: three copies of the trained weights on `device`, and one transfer of them an update. With an adapter that is the adapter. They are saved with each checkpoint, so that a
resumed run goes on with them.

Source: Block & Zhang 2025, EMA Without the Lag: Bias-Corrected Iterate Averaging Schemes, algorithm 1.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerState, TrainingArguments

from trellium.errors import ConfigError

logger = logging.getLogger(__name__)

STATE_FILE = os.path.join("bema", "average.safetensors")
"""In a checkpoint: `start/…`, `ema/…` and `bema/…` of every trained weight."""


class BEMACallback(TrainerCallback):
    """Averages the trained weights as training goes, and saves the model with the average to `bema` in the output folder when it ends.

    Args:
        update_freq: steps between updates.
        ema_power: how fast the average's memory grows; 0 for no average.
        bias_power: how fast the correction fades; 0 for one that does not.
        lag: steps that the run is taken to have behind it at its start.
        update_after: after how many steps the average begins.
        multiplier: how much a step counts.
        min_ema_multiplier: the least weight of the newest weights.
        device: where the copies are; the host by default, so that they take none of the accelerator's memory.

    Raises:
        ConfigError: numbers that cannot be; when training begins, weights that are sharded over processes.
    """

    def __init__(
        self,
        update_freq: int = 400,
        ema_power: float = 0.5,
        bias_power: float = 0.2,
        lag: int = 10,
        update_after: int = 0,
        multiplier: float = 1.0,
        min_ema_multiplier: float = 0.0,
        device: str | torch.device = "cpu",
    ) -> None:
        for name, value, least in (("update_freq", update_freq, 1), ("lag", lag, 1), ("update_after", update_after, 0)):
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value!r}")
        self.update_freq = update_freq
        self.ema_power = ema_power
        self.bias_power = bias_power
        self.lag = lag
        self.update_after = update_after
        self.multiplier = multiplier
        self.min_ema_multiplier = min_ema_multiplier
        self.device = torch.device(device)
        self._trained: dict[str, nn.Parameter] = {}
        self._start: dict[str, Tensor] = {}
        self._ema: dict[str, Tensor] = {}
        self._bema: dict[str, Tensor] = {}
        self._updates = 0

    @torch.no_grad()
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Begin from the weights as they are, or, where a run is resumed, go on with its checkpoint's."""
        self._trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        if args.deepspeed or any(isinstance(weight, DTensor) for weight in self._trained.values()):
            raise ConfigError(
                "BEMACallback: the weights are sharded over processes, and no process has all of them to average. Average checkpoints after the run."
            )
        self._begin()
        self._bema = {name: tensor.clone() for name, tensor in self._start.items()}
        self._updates = 0
        if state.global_step:
            self._resume(Path(args.output_dir or ".") / f"checkpoint-{state.global_step}" / STATE_FILE)

    def _begin(self) -> None:
        self._start = {name: weight.detach().to(self.device, copy=True) for name, weight in self._trained.items()}
        self._ema = {name: tensor.clone() for name, tensor in self._start.items()}

    def _resume(self, file: Path) -> None:
        if not file.is_file():
            logger.warning(
                "BEMACallback: %s is missing, so the average begins anew from the checkpoint's weights.", file
            )
            return
        saved = load_file(str(file), device=str(self.device))
        for kind, tensors in (("start", self._start), ("ema", self._ema), ("bema", self._bema)):
            for name in tensors:
                tensors[name] = saved[f"{kind}/{name}"]

    @torch.no_grad()
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Begin or update the average, where it is time to."""
        since = state.global_step - self.update_after
        if since == 0:
            self._begin()
        elif since > 0 and since % self.update_freq == 0:
            self._update(state.global_step)

    def _update(self, step: int) -> None:
        age = self.lag + self.multiplier * step
        beta, alpha = max(age**-self.ema_power, self.min_ema_multiplier), age**-self.bias_power
        for name, weight in self._trained.items():
            now, ema = weight.detach().to(self.device), self._ema[name]
            ema.mul_(1 - beta).add_(now, alpha=beta)
            self._bema[name] = ema + alpha * (now - self._start[name])
        self._updates += 1

    def on_save(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Keep the average with a checkpoint."""
        folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            kinds = {"start": self._start, "ema": self._ema, "bema": self._bema}
            tensors = {f"{kind}/{name}": one for kind, part in kinds.items() for name, one in part.items()}
            file = folder / STATE_FILE
            file.parent.mkdir(exist_ok=True)
            unfinished = file.with_suffix(".unfinished")
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(unfinished))
            unfinished.replace(file)  # the checkpoint is whole already, and stays so if this is interrupted

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: Any,
        model: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        """Save the model, or its adapter, with the averaged weights."""
        if not state.is_world_process_zero:
            return
        if not self._updates:
            logger.warning(
                "BEMACallback: %d steps were fewer than update_after=%d and update_freq=%d, so bema holds the weights that training began with.",
                state.global_step,
                self.update_after,
                self.update_freq,
            )
        folder = str(Path(args.output_dir or ".") / "bema")
        with self._put_in():
            model.save_pretrained(folder)
        if processing_class is not None:
            processing_class.save_pretrained(folder)

    @contextlib.contextmanager
    def _put_in(self) -> Iterator[None]:
        """The averaged weights in the model's place, while it is saved."""
        trained = {name: weight.data for name, weight in self._trained.items()}
        try:
            for name, weight in self._trained.items():
                weight.data = self._bema[name].to(weight.device)
            yield
        finally:
            for name, weight in self._trained.items():
                weight.data = trained[name]
