"""The shapes of a run, planned from its rows before it starts.

Where the model is compiled and every new shape is a compilation, the rows' lengths are counted and `forest.shapes` chooses the few shapes that cost
the least; `trainers.warm_up` compiles them. Where all sequences of a batch lie in one row, batches are drawn as the sampler would, and dealt out as the
trainer does, to see how long they get; one more shape holds the longest that could ever come.

What a shape costs is measured where the ledger knows of compilations in this process, and estimated otherwise: seconds of a product on the host
that computes, times the model's parameters. One whose graphs the device's cache has is only loaded. Cost: a pass over the labels, a few hundred batches, and a product of two matrices.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn

from trellium.data.samples import RowSizes
from trellium.errors import ConfigError
from trellium.forest.balance import deal
from trellium.forest.collate import ForestCollator
from trellium.forest.shapes import Feed, ShapePlan, plan_shapes
from trellium.forest.step_cost import StepCost
from trellium.monitor import ledger
from trellium.trainers.base_config import BaseConfig
from trellium.trainers.dealing import Dealing
from trellium.trainers.planned_graphs import PlannedGraphs
from trellium.trainers.row_sizes import costs_of, sizes_of

logger = logging.getLogger(__name__)

COMPILE_SECONDS = 20.0
"""What a shape is taken to cost to compile, forward and backward, until the ledger knows better: a block on two cores (`benchmarks/regions.py`)."""

LOAD_SHARE = 1 / 20
"""What loading a graph from the cache is taken to cost of compiling it, until the ledger knows better."""

DRAWN_BATCHES = 256
"""How many batches are drawn to see how long they get, where a batch is one row."""

FORWARD_SHARE = 1 / 3
"""What a step of evaluation costs of one of training: a backward is two forwards."""


def plan_run(
    args: BaseConfig,
    model: nn.Module,
    collator_for: Callable[..., ForestCollator],
    training: Any,
    evaluation: Any,
    dealing: Dealing | None = None,
    graphs: PlannedGraphs | None = None,
) -> ShapePlan | None:
    """The plan of a run, or None where shapes are not planned: nothing is compiled ahead, or the rows are not known before they come.

    Args:
        args: the run's options; `shapes`, `max_graphs`, `row_multiple`.
        model: whose parameters a step's seconds are estimated from.
        collator_for: how rows become batches, of `evaluation` or not.
        training: the prepared rows.
        evaluation: prepared rows, a mapping of several, or None.
        dealing: how the rows of a step are dealt to its batches; None for in order.
        graphs: those that may be in the device's cache; None for a device without one.

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
    cost = step_cost(args, model)
    steps = args.max_steps if args.max_steps > 0 else _steps_of_epochs(args, len(training))
    in_order = args.train_sampling_strategy == "sequential"
    batches = steps * args.gradient_accumulation_steps
    drawn = _Drawn(args.per_device_train_batch_size, batches, in_order, args.seed, dealing)
    feeds = [
        _feed(
            collator_for(evaluation=False),
            [training],
            drawn,
            replace(cost, in_cache=graphs.cached(evaluation=False) if graphs else None),
        )
    ]
    if sets:
        rows = args.per_device_eval_batch_size
        batches = sum(math.ceil(len(part) / (rows * args.world_size)) for part in sets)
        cheaper = replace(
            cost,
            token=cost.token * FORWARD_SHARE,
            compile_seconds=cost.compile_seconds * FORWARD_SHARE,
            in_cache=graphs.cached(evaluation=True) if graphs else None,
        )
        drawn = _Drawn(rows, _evaluations(args, steps) * batches, True, 0)
        feeds.append(_feed(collator_for(evaluation=True), sets, drawn, cheaper))
    if any(feed.shape_rows == 1 for feed in feeds) and not isinstance(args.given_shapes, str):
        _check_given(args.given_shapes, feeds)
    plan = plan_shapes(*feeds, shapes=args.given_shapes, step=args.row_multiple or 1, max_graphs=args.max_graphs)
    if args.process_index == 0:
        logger.warning("Planned shapes (seconds are estimates for this host):\n%s", plan)
    return plan


@dataclass(frozen=True, slots=True)
class _Drawn:
    """How rows are drawn for batches: how many for one, how many batches, in order or not, and dealt to how many at a time."""

    rows: int
    batches: float
    in_order: bool
    seed: int
    dealing: Dealing | None = None


def _feed(collator: ForestCollator, sets: list[Dataset], drawn: _Drawn, cost: StepCost) -> Feed:
    """What is fed to one kind of graph. Where a batch is one row, its lengths are those of batches drawn as the sampler draws, and the most that any can have."""
    sizes = RowSizes.together([sizes_of(part, collator) for part in sets])
    if not collator.one_row:
        rows = drawn.rows * (collator.read.samples_per_row or 1)
        terms = sizes.trained if collator.terms else None
        return Feed(sizes.longest, drawn.rows, drawn.batches, cost, sizes.trained, terms, rows)
    tokens = sizes.forest_tokens if collator.layout == "shared" else sizes.tokens
    lengths = [collator.sizes_of(rows).length for part in sets for rows in _batches(part, collator, drawn)]
    lengths.append(max(_most(tokens, drawn.rows), max(lengths)))
    trained = np.full(len(lengths), _most(sizes.trained, drawn.rows))
    return Feed(lengths, 1, drawn.batches, cost, trained, np.maximum(trained, 1) if collator.terms else None, 1)


def _batches(dataset: Dataset, collator: ForestCollator, drawn: _Drawn) -> Iterator[list[dict]]:
    """Up to `DRAWN_BATCHES` batches as a run would draw them."""
    columns = dataset.select_columns(list(collator.read.columns))
    order = np.arange(len(dataset)) if drawn.in_order else np.random.default_rng(drawn.seed).permutation(len(dataset))
    for batch in islice(_spread(order, drawn, dataset, collator), DRAWN_BATCHES):
        chosen = columns[batch]
        yield [dict(zip(chosen, row, strict=True)) for row in zip(*chosen.values(), strict=True)]


def _spread(order: np.ndarray, drawn: _Drawn, dataset: Dataset, collator: ForestCollator) -> Iterator[np.ndarray]:
    """The rows of batches from all over `order`."""
    dealing = drawn.dealing or Dealing(1, 1, 0.0)
    costs = costs_of(dataset, collator, dealing.pair)
    batches = dealing.ranks * dealing.micro_batches
    steps = math.ceil(len(order) / (drawn.rows * batches))
    for index in np.linspace(0, steps - 1, min(math.ceil(DRAWN_BATCHES / batches), steps)).astype(np.int64):
        step = order[index * drawn.rows * batches : (index + 1) * drawn.rows * batches]
        dealt = deal(step, costs, batch=drawn.rows, ranks=dealing.ranks)
        yield from (dealt[begin : begin + drawn.rows] for begin in range(0, len(dealt), drawn.rows))


def _most(counts: np.ndarray, rows: int) -> int:
    """What `rows` rows have at most together."""
    return int(np.sort(counts)[-rows:].sum())


def _check_given(lengths: list[int], feeds: list[Feed]) -> None:
    most = max(int(max(feed.lengths)) for feed in feeds if feed.shape_rows == 1)
    if max(lengths) < most:
        raise ConfigError(
            f"a batch may have {most} tokens in its one row, the longest given shape {max(lengths)}. Give one of at least {most} (shapes), smaller "
            "batches, or layout=padded for a row a sequence."
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
    multiplies matrices in a second. Seconds to compile and to load are means over the cold and the warm compilations of this process, where there were any.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    seconds = (4 * parameters + 2 * trained) / _operations_a_second(args.device)
    compiling = _seconds_of("cold") or COMPILE_SECONDS
    return StepCost(
        token=seconds,
        compile_seconds=compiling,
        load_seconds=min(_seconds_of("warm") or LOAD_SHARE * compiling, compiling),
    )


def _seconds_of(warmth: str) -> float | None:
    """The mean of a graph and its backward in this process; None if there was none."""
    made = [record for record in ledger.records() if record.warmth == warmth and not record.failure]
    graphs = sum(record.kind != "backward" for record in made)
    return sum(record.seconds for record in made) / graphs if graphs else None


def _operations_a_second(device: torch.device, size: int = 512) -> float:
    matrix = torch.ones(size, size, device=device)
    best = math.inf
    for _ in range(4):
        began = time.perf_counter()
        (matrix @ matrix)[0, 0].item()  # waits for it
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best
