"""Held-out predictions for `compute_metrics`: the one place where logits are made, and only where they are asked for.

Without `compute_metrics` (and `preprocess_logits_for_metrics`) an evaluation is sums on the device. With it, held-out rows lie one sequence a row, padded on
the right, and each batch is forwarded a second time by the model's own forward, uncompiled, since its metrics are the user's. What it then costs: a second
forward, and `4 · V` bytes a token of a batch, or, since `transformers.Trainer` holds predictions until the evaluation ends, of the whole held-out set:
100 rows of 512 tokens with a vocabulary of 152k are 31 GB. `preprocess_logits_for_metrics` shrinks a batch's before they are held
(`logits.argmax(-1)`: 8 bytes a token), `batch_eval_metrics` and `eval_accumulation_steps` are transformers' own.

Predictions and labels are TRL's, row by row, with two differences: the last batch is whole where rows are compared (TRL's loses half of it), and a row's first
token, which nothing predicts, is labelled -100.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn
from transformers.trainer_utils import EvalLoopOutput

from trellium.data.sequence import IGNORE_INDEX
from trellium.errors import ConfigError
from trellium.trainers.metered import MeteredTrainer
from trellium.trainers.starting_point import pad_token_id

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PredictedRows:
    """The sequences of a batch, one a row, as long as the longest.

    Attributes:
        input_ids: `[N, L]` int64, padded on the right.
        attention_mask: `[N, L]` int64, 1 for tokens.
        labels: `[N, L]` int64, the tokens that are trained, -100 elsewhere; not shifted.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor


def predicted_rows(inputs: dict[str, Tensor], pad_token_id: int) -> PredictedRows:
    """The sequences of a batch that has one a row, without the rows that fill it up.

    Raises:
        ConfigError: its rows hold more than one.
    """
    real, ids = inputs["real_tokens"], inputs["input_ids"]
    place = torch.arange(ids.shape[1], device=ids.device)
    is_token = place < real[:, None]
    if not torch.equal(inputs["position_ids"].where(is_token, 0), place.expand_as(ids).where(is_token, 0)):
        raise ConfigError(
            "compute_metrics reads one sequence a row, and the data collator laid several into one. Leave data_collator out, or give layout='padded'."
        )
    labels = torch.full_like(ids, IGNORE_INDEX)
    trained = inputs["edge_weight"] > 0
    labels.view(-1)[inputs["edge_position"][trained] + 1] = inputs["edge_target"][trained]
    count, longest = int((real > 0).sum()), int(real.max())
    rows = PredictedRows(ids.masked_fill(~is_token, pad_token_id), is_token.long(), labels)
    return PredictedRows(*(part[:count, :longest] for part in (rows.input_ids, rows.attention_mask, rows.labels)))


class PredictingTrainer(MeteredTrainer):
    """`MeteredTrainer`, whose evaluation gives predictions where somebody reads them.

    Attributes:
        makes_predictions: whether `compute_metrics` or `preprocess_logits_for_metrics` was given.
    """

    compared_rows: ClassVar[int] = 1
    """Rows of predictions that a row of the dataset gives: those of all chosen of a batch stand before those of all rejected."""
    makes_predictions: bool = False
    gather_function: Callable

    def score(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """The scores of a batch that the method needs."""
        raise NotImplementedError

    def predictions(self, model: nn.Module, rows: PredictedRows, scores: Any) -> tuple[Tensor, Any]:
        """What a batch predicts and what it should have: logits `[N, L, V]` and labels `[N, L]`."""
        with torch.compiler.set_stance("force_eager"):
            outputs = model(input_ids=rows.input_ids, attention_mask=rows.attention_mask, use_cache=False)
        return outputs.logits, rows.labels

    def order_of_predictions(self, sequences: int) -> Tensor:
        """`[N]`, which of the sequences of a batch its predictions are of."""
        return torch.arange(sequences, device=self.args.device).view(-1, self.compared_rows).T.flatten()

    def say_what_predictions_cost(self) -> None:
        """Say once, before the run, that evaluation makes logits."""
        head = self.model.get_output_embeddings() if self.makes_predictions else None  # a reward model has none
        if head is not None:
            logger.warning(
                "compute_metrics: evaluation makes logits, in a second forward over rows of one sequence each: %d bytes a token%s.",
                4 * head.weight.shape[0],
                ""
                if self.preprocess_logits_for_metrics
                else ", held for the whole held-out set unless preprocess_logits_for_metrics shrinks them",
            )

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Add a held-out batch to the sums of the evaluation; with `compute_metrics` its mean loss, predictions and labels, else nothing."""
        if self.compute_metrics is not None and not self.makes_predictions:
            raise ConfigError(
                "compute_metrics was set on the trainer, whose held-out rows may be packed already. Give it when the trainer is made."
            )
        batch = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            scores = self.score(model, batch)
            loss, count = self.compute_scored_loss(scores, batch, 1.0), self.count_items(batch).flatten()[0]
            self._sinks["eval"].add_mean("loss", loss, count)
            self._record("eval", scores, batch)
            if prediction_loss_only or not self.makes_predictions:
                return None, None, None
            rows = self._rows_to_predict(batch)
            inputs["input_ids"] = rows.input_ids  # what include_for_metrics=["inputs"] shows
            predictions, labels = self.predictions(model, rows, scores)
        return loss / count.clamp(min=1), predictions, labels

    def _rows_to_predict(self, batch: dict[str, Tensor]) -> PredictedRows:
        rows = predicted_rows(batch, pad_token_id(self.processing_class))
        order = self.order_of_predictions(len(rows.input_ids))
        return PredictedRows(*(part[order] for part in (rows.input_ids, rows.attention_mask, rows.labels)))

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As in `transformers.Trainer`, which at the end of a set drops what is beyond its number of rows: here rows of the dataset, not of predictions."""
        gather = self.gather_function  # reset by the loop
        if self.compared_rows > 1:
            self.gather_function = functools.partial(recursively_apply, functools.partial(self._gather, gather))
        return super().evaluation_loop(*args, **kwargs)

    def _gather(self, gather: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        if len(rows) % self.compared_rows:
            return gather(rows)
        pairs = gather(rows.unflatten(0, (self.compared_rows, -1)).transpose(0, 1).contiguous())
        return pairs.transpose(0, 1).flatten(0, 1)
