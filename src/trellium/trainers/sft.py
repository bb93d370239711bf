"""Supervised fine-tuning: the model learns to say what the rows say."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from datasets import Dataset, IterableDataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from trellium.data.formats import IMAGE_COLUMNS
from trellium.data.prepare import PrepareOptions, prepare_dataset
from trellium.data.samples import ReadTokens
from trellium.errors import ConfigError
from trellium.forest.packed_rows import pack_rows
from trellium.models.scoring import ScoreOutput
from trellium.ops import losses
from trellium.trainers.base import BaseTrainer
from trellium.trainers.sft_config import SFTConfig

_LOSSES = {"nll": losses.nll, "dft": losses.dft}


class SFTTrainer(BaseTrainer):
    """Supervised fine-tuning, with TRL's signature.

    Args:
        model: a name or path, a causal language model, or one with an adapter.
        args: an `SFTConfig`.
        data_collator: from prepared rows to the tensors of a `ForestBatch`; None for one sequence a row.
        train_dataset, eval_dataset: rows of any kind that `trellium.data.rows` accepts: text, messages, prompt and completion, or tokens; with
            `image` or `images` for a model that reads them.
        processing_class: the tokenizer, or the processor of a model that reads images; None for the model's own.
        peft_config: train this adapter, e.g. a `peft.LoraConfig`, instead of the model.
        formatting_func: from a row to its text.
        compute_metrics, preprocess_logits_for_metrics: as in `transformers.Trainer`; held-out rows are then not packed (`trellium.trainers.predictions`).
        compute_loss_func, quantization_config: TRL's, refused with the reason.
        **others: names that are not arguments, answered with what they are called or where they belong.

    Logged: `loss`, `entropy` and `mean_token_accuracy` over trained tokens, `num_tokens` since the run began (it survives a resume), `aux_loss`
    of mixtures of experts, tokens per second and peak memory. In evaluation the same with `eval_`; its loss is the mean over all held-out tokens that
    are targets, and its `num_tokens` how many tokens the held-out set has.
    """

    config_class = SFTConfig
    method = "sft"
    score_outputs = ("logprob", "entropy", "top1")

    def __init__(
        self,
        model: str | os.PathLike | PreTrainedModel,
        args: SFTConfig | None = None,
        data_collator: Callable[[list], dict[str, Tensor]] | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | Mapping[str, Dataset | IterableDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable | None = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        optimizer_cls_and_kwargs: tuple | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[[dict], str] | None = None,
        **others: Any,
    ) -> None:
        self._formatting_func = formatting_func
        datasets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        super().__init__(
            model,
            args,
            data_collator=data_collator,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            peft_config=peft_config,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            quantization_config=quantization_config,
            **datasets,
            **others,
        )

    def prepare_dataset(self, dataset: Dataset | IterableDataset, name: str) -> Dataset | IterableDataset:
        """Rows of any accepted kind to `input_ids` and `labels`."""
        args = self.args
        packs = args.packing if name == "train" else self._packs_evaluation
        images = [column for column in IMAGE_COLUMNS if column in (dataset.column_names or ())]
        if packs and images:
            raise ConfigError(
                f"packing=True, but {name} has images ('{images[0]}'), and rows with images are not packed. Set packing=False (layout='auto' forwards no "
                f"padding where the model allows it), or leave them out: dataset.remove_columns(['{images[0]}'])."
            )
        cuts = not packs or args.packing_strategy == "bfd"  # the others split what is longer
        packed = "seq_lengths" in (dataset.column_names or ())
        if packed and not packs:
            raise ConfigError(
                f"{name}: the rows are packed already (they have seq_lengths), but packing is off. Set packing=True to train them as they are, or give the "
                "rows before they were packed."
            )
        common = self.preparation(name)
        if not cuts:
            common |= {"max_length": None, "limits": replace(self.token_limits, positions=None)}
        options = PrepareOptions(
            truncation_mode=args.truncation_mode,
            completion_only_loss=args.completion_only_loss,
            assistant_only_loss=args.assistant_only_loss,
            dataset_text_field=args.dataset_text_field,
            formatting_func=self._formatting_func,
            skip_prepare=packed or args.skip_prepare_dataset,
            **common,
        )
        prepared = prepare_dataset(dataset, self.processing_class, options)
        if packs and not packed:
            if args.shuffle_dataset:
                prepared = prepared.shuffle(seed=args.seed)
            capacity = args.packed_row_length or args.max_length
            prepared = pack_rows(prepared, capacity, args.packing_strategy, name=name, longest=args.max_length)
        return prepared.shuffle(seed=args.seed) if args.shuffle_dataset else prepared

    @property
    def _packs_evaluation(self) -> bool:
        return self.args.packs_evaluation and not self.makes_predictions

    def row_reader(self, *, evaluation: bool = False) -> ReadTokens:
        """One sequence a row, or as many as were packed into it."""
        return ReadTokens(packed=self._packs_evaluation if evaluation else self.args.packing)

    @property
    def fused_loss(self) -> str | None:  # type: ignore[override]
        """The loss is linear in the log-probabilities, so its gradients are made while they are scored."""
        return self.args.loss_type

    def compute_scored_loss(self, scores: ScoreOutput, inputs: dict[str, Tensor], normalizer: Tensor | float) -> Tensor:
        """The loss `[]` that `loss_type` names."""
        if scores.loss_sum is not None:
            return scores.loss_sum / normalizer
        return _LOSSES[self.args.loss_type](scores.logprob, inputs["edge_weight"], normalizer)
