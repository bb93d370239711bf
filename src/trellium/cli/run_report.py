"""What a run is going to do, said before its first step, and what it did, said after its last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainerState, TrainingArguments

if TYPE_CHECKING:
    from torch import nn

    from trellium.trainers.base import BaseTrainer


class PlanPrinter(TrainerCallback):
    """Prints the plan of a run when it begins: device, types, model, rows, steps, output. Given to the trainer when it is made, it speaks before
    what the trainer does first, such as compiling.

    Args:
        model: what the user calls the model.
        data: what the user calls the dataset.
        device: a sentence about what computes.
    """

    def __init__(self, *, model: str, data: str, device: str) -> None:
        self._model, self._data, self._device = model, data, device

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: Any,
        *,
        model: nn.Module,
        train_dataloader: Any,
        **kwargs: Any,
    ) -> None:
        """Print it once, on the first process."""
        if not state.is_world_process_zero:
            return
        rows = {
            "device": self._device,
            "dtype": _dtypes(args, model),
            "model": f"{self._model}, {_parameters(model)}",
            "data": f"{self._data}, {_rows(train_dataloader.dataset)}",
            "steps": _steps(args, state),
            "mode": f"torch_compile, backend {args.torch_compile_backend}" if args.torch_compile else "eager",
            "output": f"{args.output_dir}, {_saves(args)}",
        }
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows.items():
            table.add_row(name, value)
        Console(highlight=False, markup=False).print(table)


def _dtypes(args: TrainingArguments, model: nn.Module) -> str:
    weights = str(next(model.parameters()).dtype).removeprefix("torch.")
    computing = "bfloat16" if args.bf16 else "float16" if args.fp16 else weights
    return weights if computing == weights else f"{weights}, computing in {computing}"


def _parameters(model: nn.Module) -> str:
    parameters = list(model.parameters())
    trained = sum(one.numel() for one in parameters if one.requires_grad)
    total = sum(one.numel() for one in parameters)
    if trained == total:
        return f"{total:,} parameters, all trained"
    return f"{trained:,} of {total:,} parameters trained ({100 * trained / total:.3g} %)"


def _rows(dataset: Any) -> str:
    return "rows as they come" if isinstance(dataset, IterableDataset) else f"{len(dataset):,} rows"


def _steps(args: TrainingArguments, state: TrainerState) -> str:
    rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    done = f", {state.global_step} of them done" if state.global_step else ""
    return f"{state.max_steps:,}, {rows} row{'' if rows == 1 else 's'} each{done}"


def _saves(args: TrainingArguments) -> str:
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    if strategy == "no":
        return "saved at the end"
    every = f"{args.save_steps:g} steps" if strategy == "steps" else strategy
    return f"a checkpoint every {every}" if strategy != "best" else "a checkpoint when the metric is best"


def rate(per_second: float) -> str:
    """Tokens per second with three digits, as many as such a measurement has: `0.0421`, `3.27`, `1,234`."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def print_summary(trainer: BaseTrainer, metrics: dict[str, float], seconds: float, names: Sequence[str]) -> None:
    """What the run did, in a few lines.

    Args:
        trainer: after its training.
        metrics: what `train` returned.
        seconds: since it began.
        names: the method's own metrics, as they are logged.
    """
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    table = Table(title="Run summary", show_header=False)
    table.add_row("steps", f"{trainer.state.global_step}")
    table.add_row("seconds (host)", f"{seconds:.1f}")
    table.add_row("mean training loss", f"{metrics['train_loss']:.4f}")
    if steps:
        for name in ("loss", *names):
            logged = [entry[name] for entry in steps if name in entry]
            if logged:
                table.add_row(f"{name}, first and last logged", f"{logged[0]:.4f} → {logged[-1]:.4f}")
        table.add_row("tokens", f"{steps[-1]['num_tokens']:,}")
        table.add_row("tokens per second, last logged", rate(steps[-1]["tokens_per_second"]))
        table.add_row("peak memory", f"{steps[-1]['peak_memory_gib']:.2f} GiB ({trainer.args.device})")
    if evaluations:
        for name in ("loss", *names):
            if (held_out := evaluations[-1].get(f"eval_{name}")) is not None:
                table.add_row(f"held-out {name}", f"{held_out:.4f}")
    table.add_row("saved in", str(trainer.args.output_dir))
    Console().print(table)
