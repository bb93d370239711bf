"""Reward modelling: one number for a conversation, higher for the better of two answers."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import Tensor, nn

from trellium.data.preferences import PreferenceOptions, prepare_preferences
from trellium.data.samples import ReadWholePairs
from trellium.models.rewards import RewardOutput, install_rewards, load_reward_model
from trellium.monitor.metrics import MetricSink
from trellium.ops.reward import reward_loss, reward_metrics
from trellium.trainers.adapters import is_adapted
from trellium.trainers.base import BaseTrainer
from trellium.trainers.predictions import PredictedRows
from trellium.trainers.reward_config import RewardConfig

logger = logging.getLogger(__name__)


class RewardTrainer(BaseTrainer):
    """Reward modelling, with TRL's signature; the two answers of a pair share their prompt's tokens.

    Args:
        model: a name or path (of a sequence-classification model, or of a language model, which gets a new `score` layer), or such a model with one label.
        args: a `RewardConfig`.
        train_dataset, eval_dataset: rows of `chosen` and `rejected`, with or without `prompt` and `margin`, as `trellium.data.formats` has them.
        **arguments: those of `BaseTrainer`.

    Logged: `loss`, `accuracy`, `margin`, `mean_reward`, `min_reward`, `max_reward` (the least and most of a batch, in the mean), and what every trainer logs.
    """

    config_class = RewardConfig
    method = "reward"
    args: RewardConfig
    needs_terms = True
    row_columns: tuple[str, ...] = ()
    compared_rows = 2

    def prepare_dataset(self, dataset: Any, name: str) -> Any:
        """Rows of preferences to `chosen_ids` and `rejected_ids`, and `margin` where rows have one."""
        options = PreferenceOptions(whole_sequences=True, keep_columns=("margin",), **self.preparation(name))
        prepared = prepare_preferences(dataset, self.processing_class, options)
        if name == "train" and "margin" in (prepared.column_names or ()):
            self.row_columns = ("margin",)
        return prepared

    def row_reader(self, *, evaluation: bool = False) -> ReadWholePairs:
        """Two sequences a row: chosen and rejected."""
        return ReadWholePairs()

    @staticmethod
    def load(name: str | os.PathLike | None, **options: Any) -> nn.Module:
        """From a name to a sequence-classification model with one label."""
        return load_reward_model(name, **options)

    @staticmethod
    def install(model: nn.Module) -> nn.Module:
        """Let a sequence-classification model be called for rewards."""
        return install_rewards(model)

    def run_begins(self) -> None:
        """Say so where an adapter leaves out the layer that makes the reward: a new one would stay random."""
        trained = (name for name, parameter in self.model.named_parameters() if parameter.requires_grad)
        if is_adapted(self.model) and not any(".score." in name for name in trained):
            logger.warning(
                "the score layer is not trained, and the rewards are made by it as it came. Set task_type='SEQ_CLS' in peft_config, "
                "or modules_to_save=['score']."
            )
        super().run_begins()

    def score(self, model: nn.Module, inputs: dict[str, Tensor]) -> RewardOutput:
        """The rewards `[2 B]` of a batch's sequences."""
        fields = ("input_ids", "position_ids", "subtree_end", "sample_position")
        return model(**{name: inputs[name] for name in fields})

    def predictions(self, model: nn.Module, rows: PredictedRows, scores: Any) -> tuple[Tensor, tuple]:
        """The rewards `[2 B, 1]` of a batch's pairs, those of all chosen before those of all rejected; they have no labels."""
        rewards = scores.rewards[: len(rows.input_ids)]
        return rewards[self.order_of_predictions(len(rewards)), None], ()

    def count_items(self, inputs: dict[str, Tensor]) -> Tensor:
        """The pairs of a batch: `[]`."""
        return inputs["row_weight"].sum()

    def compute_scored_loss(self, scores: Any, inputs: dict[str, Tensor], normalizer: Tensor | float) -> Tensor:
        """The mean `[]` over pairs."""
        losses = reward_loss(
            scores.rewards,
            inputs["row_weight"] > 0,
            margin=inputs.get("row_margin"),
            center_rewards_coefficient=self.args.center_rewards_coefficient,
        )
        return losses.sum() / normalizer

    def record(self, sink: MetricSink, scores: Any, inputs: dict[str, Tensor]) -> None:
        """How often and by how much the chosen is better, and how large rewards are."""
        pairs = inputs["row_weight"].sum()
        for name, values in reward_metrics(scores.rewards, inputs["row_weight"] > 0).items():
            sink.add_mean(name, values.sum(), pairs if values.ndim else torch.ones_like(pairs))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        # Whoever loads the model pads, and it finds the last token by the padding token.
        self.model.config.get_text_config().pad_token_id = self.data_collator.pad_token_id
        super()._save(output_dir, state_dict)
