"""Every planned graph compiled before step 0, and nothing after it.

A forward and a backward, or a forward of evaluation, over rows that train nothing, for each planned shape. What is compiled later is told, or refused where
shapes are strict. Cost: the compilations, and a step of each shape.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

import torch
from torch import nn
from tqdm.auto import tqdm

from trellium.errors import ModelError
from trellium.forest.shapes import PlannedShape, ShapePlan
from trellium.monitor import ledger

if TYPE_CHECKING:
    from trellium.trainers.base import BaseTrainer

logger = logging.getLogger(__name__)

KINDS_OF_BLOCKS = 4
"""How many kinds of blocks share the code of one frame at most, and so multiply its graphs: sliding or full attention, dense or sparse."""


def warm_up(trainer: BaseTrainer, plan: ShapePlan) -> None:
    """Compile every planned graph: a forward (and backward) over rows that train nothing. Weights, gradients and random numbers stay as they were."""
    training, evaluating = trainer.model_wrapped, trainer.model
    make_room(plan)
    bar = tqdm(plan.planned, disable=trainer.args.disable_tqdm or not trainer.is_local_process_zero(), unit="graph")
    device = trainer.args.device
    was_training = training.training
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type):
        for planned in bar:
            bar.set_description(f"Compiling {planned.shape} for {'evaluation' if planned.evaluation else 'training'}")
            began = time.perf_counter()
            with _labelled(trainer, planned):
                _run(trainer, evaluating if planned.evaluation else training, planned)
            bar.set_postfix_str(f"{time.perf_counter() - began:.1f} s")
    training.train(was_training)


def _labelled(trainer: BaseTrainer, planned: PlannedShape) -> contextlib.AbstractContextManager[None]:
    """What is compiled inside is known by the shape to the next run's plan."""
    graphs = trainer.graphs
    return contextlib.nullcontext() if graphs is None else graphs.labelled(planned.shape, evaluation=planned.evaluation)


def make_room(plan: ShapePlan) -> None:
    """Let Dynamo keep as many graphs of a frame as the plan needs; it would stop at its limit, which is for code whose shapes nobody planned.

    A frame has a graph for each planned shape, and for each kind of block.
    """
    needed = KINDS_OF_BLOCKS * len(plan.planned)
    from torch._dynamo import config  # a second, only where something is compiled

    config.recompile_limit = max(config.recompile_limit, needed)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4 * needed)


def _run(trainer: BaseTrainer, model: nn.Module, planned: PlannedShape) -> None:
    collator = trainer.collator_for(evaluation=planned.evaluation)
    inputs = trainer._prepare_inputs(collator.idle(planned.shape))
    model.train(not planned.evaluation)
    with trainer.offloading(model):  # a run that fits only with it warms up with it
        with torch.set_grad_enabled(not planned.evaluation), trainer.compute_loss_context_manager():
            scores = trainer.score(model, inputs)
            loss = trainer.compute_scored_loss(scores, inputs, 1.0)
            if scores.aux_loss is not None:
                loss = loss + 0.0 * scores.aux_loss
        if not planned.evaluation:
            trainer.accelerator.backward(loss)
            model.zero_grad(set_to_none=True)


# ---- after it


class ShapeWatch:
    """Tells of what is compiled after the warm-up.

    Args:
        strict: whether it is an error.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._mark = ledger.mark()

    def check(self, where: str) -> None:
        """Look at what was compiled since the last time, and tell or refuse it: which graph, what was new about it, and where in the run.

        Raises:
            ModelError: something was, and shapes are strict.
        """
        new = ledger.records()[self._mark.records :]
        self._mark = ledger.mark()
        if not new:
            return
        told = f"{len(new)} graphs were compiled after the warm-up, in {where}: {new[0]} ({new[0].frame})."
        if self._strict:
            raise ModelError(
                f"{told} strict_shapes=True allows none: plan that shape (shapes, max_graphs), or leave strict_shapes off to have it compiled and told."
            )
        logger.warning("%s", told)
