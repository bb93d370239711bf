"""Callbacks under TRL's names: progress with the metrics of the last step in view, and completions of held-out prompts written down as training goes.

A callback is given to a trainer as in transformers. Neither changes a run: completions are generated with the random numbers put back after.
"""

from __future__ import annotations

import atexit
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import GenerationConfig, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from trellium.data.images import tokenizer_in
from trellium.data.sequence import IGNORE_INDEX
from trellium.errors import ConfigError
from trellium.trainers.base import BaseTrainer

COMPLETIONS_FILE = "completions.jsonl"
"""In the output folder: a row a completion, of `step`, `prompt` and `completion`."""


class RichProgressCallback(TrainerCallback):
    """Bars of training and evaluation with the last logged metrics below them, in place of lines that scroll by. Set `disable_tqdm=True` beside it."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._progress: Progress | None = None
        self._training: TaskID | None = None
        self._evaluation: TaskID | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Show the bar of training, on the first process."""
        if not state.is_world_process_zero:
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns)
        self._training = self._progress.add_task("Training", total=state.max_steps, completed=state.global_step)
        self._live = Live(self._progress, console=Console())
        self._live.start()
        atexit.register(self._stop)  # of a run that an error ends, nobody is told the end

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Move the bar."""
        if self._progress is not None and self._training is not None:
            self._progress.update(self._training, completed=state.global_step)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Show and move the bar of an evaluation."""
        if self._progress is None:
            return
        if self._evaluation is None:
            total = len(eval_dataloader) if has_length(eval_dataloader) else None
            self._evaluation = self._progress.add_task("Evaluation", total=total)
        self._progress.advance(self._evaluation)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Take the bar of the evaluation away."""
        if self._progress is not None and self._evaluation is not None:
            self._progress.remove_task(self._evaluation)
            self._evaluation = None

    on_predict = on_evaluate

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: Any,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show the metrics."""
        if self._live is not None and self._progress is not None and logs:
            self._live.update(Group(self._progress, metrics_table(logs, state.global_step)), refresh=True)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Leave bar and metrics as they are."""
        self._stop()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            atexit.unregister(self._stop)
        self._live = self._progress = self._training = self._evaluation = None


def metrics_table(logs: dict[str, Any], step: int) -> Table:
    """Metrics with four digits, those that share the part before a slash in a row: `rewards  chosen 0.5   rejected -0.1`."""
    groups: dict[str, list[str]] = {}
    for name, value in logs.items():
        group, _, rest = name.rpartition("/")
        number = f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)
        groups.setdefault(group, []).append(f"{rest} {number}")
    table = Table(title=f"step {step}", title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for group, metrics in groups.items():
        table.add_row(group, "   ".join(metrics))
    return table


class LogCompletionsCallback(TrainerCallback):
    """Lets the policy complete held-out prompts every few steps, and writes what it says to `COMPLETIONS_FILE`.

    Prompts are completed in batches of `per_device_eval_batch_size`, by the first process.

    Args:
        trainer: of a language model, with an `eval_dataset` of rows that have a prompt.
        generation_config: how completions are drawn; None for the model's own.
        num_prompts: how many of the held-out prompts, from the first; None for all.
        freq: after how many steps each; None for the trainer's `eval_steps`.

    Raises:
        ConfigError: no prompts to complete, or a trainer whose model cannot complete them.
    """

    def __init__(
        self,
        trainer: BaseTrainer,
        generation_config: GenerationConfig | None = None,
        num_prompts: int | None = None,
        freq: int | None = None,
    ) -> None:
        _check_generates(trainer)
        if freq is None and trainer.args.eval_steps is None:
            raise ConfigError("freq is not given, and the trainer has no eval_steps to take for it. Give freq.")
        for name, value in (("freq", freq), ("num_prompts", num_prompts)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value!r}")
        self._trainer = trainer
        self._generation_config = generation_config
        self._prompts = held_out_prompts(trainer.eval_dataset, num_prompts)
        self._freq = freq

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Begin the file, or, where a run is resumed, go on behind the step it is resumed from."""
        if not state.is_world_process_zero:
            return
        file = Path(args.output_dir or ".") / COMPLETIONS_FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        kept = [line for line in lines if json.loads(line)["step"] <= state.global_step] if state.global_step else []
        file.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Complete the prompts, where it is time to."""
        every = self._freq or max(1, int(state.eval_steps))
        if not state.is_world_process_zero or state.global_step % every:
            return
        completions = generate_completions(
            self._trainer, self._prompts, self._generation_config, batch_size=args.per_device_eval_batch_size
        )
        decode = self._trainer.processing_class.decode
        with (Path(args.output_dir or ".") / COMPLETIONS_FILE).open("a", encoding="utf-8") as file:
            for prompt, completion in zip(self._prompts, completions, strict=True):
                row = {
                    "step": state.global_step,
                    "prompt": decode(prompt),
                    "completion": decode(completion, skip_special_tokens=True),
                }
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _check_generates(trainer: BaseTrainer) -> None:
    if not isinstance(trainer, BaseTrainer):
        raise ConfigError(
            f"trainer must be one of Trellium's, got {type(trainer).__name__}. Take TRL's callback for TRL's."
        )
    if trainer.method == "reward":
        raise ConfigError("a reward model says how good a completion is and writes none, so there is nothing to log.")
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ConfigError(
            "the weights are sharded over processes, and completions are generated by one. Generate from a checkpoint."
        )
    if trainer.args.torch_compile:
        raise ConfigError(
            "torch_compile=True: every token that is generated would be a shape to compile. Generate from a checkpoint, or set it to False."
        )


def held_out_prompts(dataset: Any, count: int | None) -> list[list[int]]:
    """The prompts of a prepared dataset, in tokens.

    Args:
        dataset: with `prompt_ids`; or with `labels`, of which what stands before the first target is the prompt.
        count: how many, from the first; None for all.

    Raises:
        ConfigError: no dataset of rows that can be counted, or a row without a prompt.
    """
    if not isinstance(dataset, Dataset):
        kind = "none" if dataset is None else type(dataset).__name__
        raise ConfigError(
            f"completions are of one eval_dataset's prompts, and the trainer has {kind}. Give it a Dataset."
        )
    rows = dataset if count is None else dataset.select(range(min(count, len(dataset))))
    if "prompt_ids" in rows.column_names:
        return [list(prompt) for prompt in rows["prompt_ids"]]
    prompts = []
    for at, row in enumerate(rows):
        first = int(np.argmax(np.asarray(row["labels"]) != IGNORE_INDEX))
        if first == 0 or "seq_lengths" in row:
            raise ConfigError(
                f"row {at} of eval_dataset has no prompt to complete: it is text that is trained from its start, or packed. "
                "Give rows with 'prompt' and 'completion', and set eval_packing=False."
            )
        prompts.append(list(row["input_ids"][:first]))
    return prompts


@torch.no_grad()
def generate_completions(
    trainer: BaseTrainer,
    prompts: Sequence[Sequence[int]],
    generation_config: GenerationConfig | None = None,
    *,
    batch_size: int,
) -> list[list[int]]:
    """What a trainer's model says to prompts, in tokens; dropout off, and the run's random numbers as before."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    tokenizer, device = tokenizer_in(trainer.processing_class), trainer.args.device
    completions: list[list[int]] = []
    with _unchanged(model, device), trainer.compute_loss_context_manager():
        for begin in range(0, len(prompts), batch_size):
            rows = {"input_ids": [list(prompt) for prompt in prompts[begin : begin + batch_size]]}
            batch = tokenizer.pad(rows, padding_side="left", return_tensors="pt").to(device)
            written = model.generate(**batch, generation_config=generation_config)
            completions += written[:, batch["input_ids"].shape[1] :].tolist()
    return completions


@contextlib.contextmanager
def _unchanged(model: Any, device: torch.device) -> Iterator[None]:
    """Modes of modules and random numbers are after this what they were before."""
    modes = [module for module in model.modules() if module.training]
    others = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type  # of no devices the name does not matter, but must be one
    model.eval()
    try:
        with torch.random.fork_rng(devices=others, device_type=kind):
            yield
    finally:
        for module in modes:
            module.training = True
