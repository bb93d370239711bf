"""The shapes of a run, planned from its rows before it starts.

Where the model is compiled and every new shape is a compilation, the rows' lengths are counted and `forest.shapes` chooses the few shapes that cost
the least; `trainers.warm_up` compiles them.

What a shape costs is measured where the ledger knows of compilations in this process, and estimated otherwise: seconds of a product on the host
that computes, times the model's parameters. Cost: a pass over the labels, and a product of two matrices.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn

from trellium.data.sequence import IGNORE_INDEX
from trellium.errors import ConfigError
from trellium.forest.shapes import Feed, ShapePlan, plan_shapes
from trellium.forest.step_cost import StepCost
from trellium.monitor import ledger
from trellium.trainers.base_config import BaseConfig

logger = logging.getLogger(__name__)

COMPILE_SECONDS = 20.0
"""What a shape is taken to cost to compile, forward and backward, until the ledger knows better: a block on two cores (`benchmarks/regions.py`)."""

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
    cost = step_cost(args, model)
    steps = args.max_steps if args.max_steps > 0 else _steps_of_epochs(args, len(training))
    batches = steps * args.gradient_accumulation_steps
    plan = plan_shapes(
        Feed(rows.lengths, args.per_device_train_batch_size, batches, cost, rows.trained),
        _evaluation_feed(args, cost, [RowSizes.of(part) for part in sets], steps),
        shapes=args.given_shapes,
        step=args.row_multiple or 1,
        max_graphs=args.max_graphs,
    )
    if args.process_index == 0:
        logger.warning("Planned shapes (seconds are estimates for this host):\n%s", plan)
    return plan


def _evaluation_feed(args: BaseConfig, cost: StepCost, sets: list[RowSizes], steps: int) -> Feed | None:
    if not sets:
        return None
    rows = args.per_device_eval_batch_size
    batches = sum(math.ceil(len(part.lengths) / (rows * args.world_size)) for part in sets)
    cheaper = replace(cost, token=cost.token * FORWARD_SHARE, compile_seconds=cost.compile_seconds * FORWARD_SHARE)
    return Feed(
        np.concatenate([part.lengths for part in sets]),
        rows,
        _evaluations(args, steps) * batches,
        cheaper,
        np.concatenate([part.trained for part in sets]),
    )


def _evaluations(args: BaseConfig, steps: int) -> float:
    """How often the run evaluates, and once more at its end; before and after, if nobody says more."""
    strategy = args.eval_strategy.value
    if strategy == "epoch":
        return 1 + args.num_train_epochs
    if strategy == "steps" and args.eval_steps:
        return 1 + (steps / args.eval_steps if args.eval_steps >= 1 else 1 / args.eval_steps)
    return 2


def _steps_of_epochs(args: BaseConfig, rows: int) -> int:
    together = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
    return math.ceil(args.num_train_epochs * math.ceil(rows / together))


def step_cost(args: BaseConfig, model: nn.Module) -> StepCost:
    """Seconds of a training shape on the hardware that computes here.

    The estimate: two operations a parameter and token forward, and twice that backward, for trained parameters; as often as the hardware
    multiplies matrices in a second. Compile seconds are the mean of the cold compilations of this process, or `COMPILE_SECONDS`.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    seconds = (4 * parameters + 2 * trained) / _operations_a_second(args.device)
    return StepCost(token=seconds, compile_seconds=_compile_seconds())


def _compile_seconds() -> float:
    cold = [record for record in ledger.records() if record.warmth == "cold" and not record.failure]
    graphs = sum(record.kind != "backward" for record in cold)
    return sum(record.seconds for record in cold) / graphs if graphs else COMPILE_SECONDS


def _operations_a_second(device: torch.device, size: int = 512) -> float:
    matrix = torch.ones(size, size, device=device)
    best = math.inf
    for _ in range(4):
        began = time.perf_counter()
        (matrix @ matrix)[0, 0].item()  # waits for it
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best
