"""The shapes of a run: planned from its rows before it starts, compiled before its first step, held to afterwards.

Where the model is compiled and every new shape is a compilation, the rows' lengths are counted, `forest.shapes` chooses the few shapes that cost
the least, and every planned graph (forward and backward, and those of evaluation) is made before step 0, on rows that train nothing. After that
nothing should be compiled; `strict_shapes` makes it an error, which names the shape and the step.

What a shape costs is measured where the ledger knows of compilations in this process, and estimated otherwise: seconds of a product on the host
that computes, times the model's parameters. Cost: a pass over the labels, and a product of two matrices.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from tqdm.auto import tqdm

from trellium.data.sequence import IGNORE_INDEX, Sequence
from trellium.errors import ConfigError, ModelError
from trellium.forest.layout import chains
from trellium.forest.shapes import Feed, PlannedShape, ShapePlan, plan_shapes
from trellium.forest.step_cost import StepCost
from trellium.monitor import ledger
from trellium.trainers.base_config import BaseConfig

if TYPE_CHECKING:
    from trellium.trainers.base import BaseTrainer

logger = logging.getLogger(__name__)

COMPILE_SECONDS = 20.0
"""What a shape is taken to cost to compile, forward and backward, until the ledger knows better: a block on two cores (`benchmarks/regions.py`)."""

KINDS_OF_BLOCKS = 4

FORWARD_SHARE = 1 / 3
"""What a step of evaluation costs of one of training: a backward is two forwards."""


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Per row of a prepared dataset: its tokens, and how many of them are trained."""

    lengths: np.ndarray
    trained: np.ndarray

    @classmethod
    def of(cls, dataset: Dataset) -> RowSizes:
        """Counted without making Python numbers of the tokens."""
        lengths, trained = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for table in dataset.select_columns(["input_ids", "labels"]).with_format("arrow").iter(batch_size=10_000):
            labels = table["labels"].combine_chunks()
            ends = np.cumsum(np.asarray(labels.value_lengths(), dtype=np.int64))
            counted = np.append(0, np.cumsum(np.asarray(labels.flatten()) != IGNORE_INDEX))
            starts = np.append(0, ends)[:-1]
            lengths.append(ends - starts)
            trained.append(counted[ends] - counted[starts])
        return cls(np.concatenate(lengths), np.concatenate(trained))


def plan_run(args: BaseConfig, model: nn.Module, training: Any, evaluation: Any) -> ShapePlan | None:
    """The plan of a run, or None where shapes are not planned: nothing is compiled ahead, or the rows are not known before they come.

    Args:
        args: the run's options; `shapes`, `max_graphs`, `row_multiple`.
        model: whose parameters a step's seconds are estimated from.
        training: the prepared rows.
        evaluation: prepared rows, a mapping of several, or None.

    Raises:
        ConfigError: given row lengths that do not hold the longest row or are for streamed rows, or too few graphs.
    """
    if not args.plans_shapes:
        return None
    sets = [
        part for part in (evaluation.values() if isinstance(evaluation, dict) else (evaluation,)) if part is not None
    ]
    if not all(isinstance(part, Dataset) and len(part) for part in (training, *sets)):
        if not isinstance(args.shapes, str):
            raise ConfigError(
                "shapes cannot be given for rows that are streamed: whether they hold is not known. Set pad_to_multiple_of."
            )
        rounded = f"rounded up to multiples of {args.row_multiple}" if args.row_multiple else "not rounded"
        logger.warning(
            "Shapes are not planned: rows that are streamed are not known before they come. Their lengths are %s.",
            rounded,
        )
        return None
    rows = RowSizes.of(training)
    steps = args.max_steps if args.max_steps > 0 else _steps_of_epochs(args, len(training))
    plan = plan_shapes(
        Feed(
            rows.lengths,
            args.per_device_train_batch_size,
            steps * args.gradient_accumulation_steps,
            step_cost(args, model),
            rows.trained,
        ),
        _evaluation_feed(args, model, [RowSizes.of(part) for part in sets], steps),
        shapes=args.given_shapes,
        step=args.row_multiple or 1,
        max_graphs=args.max_graphs,
    )
    if args.process_index == 0:
        logger.warning("Planned shapes (seconds are estimates for this host):\n%s", plan)
    return plan


def _evaluation_feed(args: BaseConfig, model: nn.Module, sets: list[RowSizes], steps: int) -> Feed | None:
    if not sets:
        return None
    lengths = np.concatenate([rows.lengths for rows in sets])
    every = {"steps": args.eval_steps, "epoch": steps / max(args.num_train_epochs, 1)}.get(args.eval_strategy.value)
    times = (
        2 if not every else 1 + steps / max(every if every >= 1 else every * steps, 1)
    )  # before and after, if nobody says more
    batches = times * sum(
        math.ceil(len(rows.lengths) / (args.per_device_eval_batch_size * args.world_size)) for rows in sets
    )
    trained = np.concatenate([rows.trained for rows in sets])
    return Feed(lengths, args.per_device_eval_batch_size, batches, step_cost(args, model, FORWARD_SHARE), trained)


def _steps_of_epochs(args: BaseConfig, rows: int) -> int:
    together = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
    return math.ceil(args.num_train_epochs * math.ceil(rows / together))


def step_cost(args: BaseConfig, model: nn.Module, share: float = 1.0) -> StepCost:
    """Seconds of a shape on the hardware that computes here.

    Args:
        share: of a training step's seconds.

    The estimate: two operations a parameter and token forward, and twice that backward, for trained parameters; as often as the hardware
    multiplies matrices in a second. Compile seconds are the mean of the cold compilations of this process, or `COMPILE_SECONDS`.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    seconds = (4 * parameters + 2 * trained) / _operations_a_second(args.device)
    return StepCost(token=share * seconds, compile_seconds=_compile_seconds() * share)


def _compile_seconds() -> float:
    cold = [record.seconds for record in ledger.records() if record.warmth == "cold" and not record.failure]
    graphs = sum(
        record.kind != "backward" for record in ledger.records() if record.warmth == "cold" and not record.failure
    )
    return sum(cold) / graphs if graphs else COMPILE_SECONDS


def _operations_a_second(device: torch.device, size: int = 512) -> float:
    matrix = torch.ones(size, size, device=device)
    best = math.inf
    for _ in range(4):
        began = time.perf_counter()
        (matrix @ matrix)[0, 0].item()  # waits for it
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


# ---- before step 0


def warm_up(trainer: BaseTrainer, plan: ShapePlan) -> None:
    """Compile every planned graph: a forward (and backward) over rows that train nothing. Weights, gradients and random numbers stay as they were."""
    model = trainer.model_wrapped
    make_room(plan)
    bar = tqdm(plan.planned, disable=trainer.args.disable_tqdm or not trainer.is_local_process_zero(), unit="graph")
    devices = [trainer.args.device] if trainer.args.device.type != "cpu" else []
    kind = trainer.args.device.type if devices else "cuda"
    was_training = model.training
    with torch.random.fork_rng(devices=devices, device_type=kind):
        for planned in bar:
            bar.set_description(f"Compiling {planned.shape} for {'evaluation' if planned.evaluation else 'training'}")
            began = time.perf_counter()
            _run(trainer, model, planned)
            bar.set_postfix_str(f"{time.perf_counter() - began:.1f} s")
    model.train(was_training)


def make_room(plan: ShapePlan) -> None:
    """Let Dynamo keep as many graphs of a frame as the plan needs; it would stop at its limit, which is for code whose shapes nobody planned.

    A frame has a graph for each planned shape, and for each kind of block that shares its code: `KINDS_OF_BLOCKS` at most, among the models known.
    """
    needed = KINDS_OF_BLOCKS * len(plan.planned)
    from torch._dynamo import config  # a second, only where something is compiled

    config.recompile_limit = max(config.recompile_limit, needed)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4 * needed)


def _run(trainer: BaseTrainer, model: nn.Module, planned: PlannedShape) -> None:
    inputs = trainer._prepare_inputs(idle_batch(planned, trainer.data_collator.pad_token_id))
    model.train(not planned.evaluation)
    with torch.set_grad_enabled(not planned.evaluation), trainer.compute_loss_context_manager():
        scores = trainer._score(model, inputs)
        loss = trainer.compute_scored_loss(scores, inputs, 1.0)
        if scores.aux_loss is not None:
            loss = loss + 0.0 * scores.aux_loss
    if not planned.evaluation:
        trainer.accelerator.backward(loss)
        model.zero_grad(set_to_none=True)


def idle_batch(planned: PlannedShape, pad_token_id: int) -> dict[str, Tensor]:
    """A batch of a planned shape with one token, which is not trained."""
    sequence = Sequence(np.asarray([pad_token_id]), np.zeros(1, dtype=bool))
    return chains([sequence], pad_token_id=pad_token_id, shape=planned.shape).tensors()


# ---- after it


class ShapeWatch:
    """Counts what is compiled after the warm-up; with `strict`, refuses it.

    Args:
        strict: raise at the end of a step in which something was compiled.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._mark = ledger.mark()

    def check(self, where: str) -> None:
        """Look at what was compiled since the last time.

        Raises:
            ModelError: something was, and `strict`; names the graph, what was new about it, and where in the run.
        """
        new = ledger.records()[self._mark.records :]
        self._mark = ledger.mark()
        if new and self._strict:
            raise ModelError(
                f"{len(new)} graphs were compiled after the warm-up, in {where}: {new[0]} ({new[0].frame}). strict_shapes=True allows "
                "none: plan that shape (shapes, max_graphs), or leave strict_shapes off to have it compiled and counted in the log."
            )
