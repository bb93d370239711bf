"""Trainers that compare the policy with a reference: where its scores come from, and when it moves.

The reference is the model at the moment training starts, or one that is given; it scores each batch before the policy does, or the whole dataset before
the run (`precompute_ref_log_probs`), which is cached under a hash of its weights and the rows. One that moves (`sync_ref_model`) is saved with each checkpoint.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from datasets import Dataset, IterableDataset, concatenate_datasets
from datasets.fingerprint import Hasher
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import TrainerCallback

from trellium.errors import ConfigError
from trellium.models.attention import let_read_forests
from trellium.models.reference import ReferencePolicy
from trellium.models.scoring import ScoreOutput
from trellium.trainers.adapters import is_adapted
from trellium.trainers.arguments import forest_fields
from trellium.trainers.base import BaseTrainer
from trellium.trainers.predictions import PredictedRows
from trellium.trainers.reference_config import ReferenceConfig
from trellium.trainers.starting_point import model_of

logger = logging.getLogger(__name__)

_MOVED = os.path.join("reference", "weights.safetensors")
"""Where a checkpoint keeps a reference that moves."""


class ReferencedTrainer(BaseTrainer):
    """A base for such trainers.

    Args:
        model: as for `BaseTrainer`.
        ref_model: the reference, by name or as a model; None for `model` as it comes.
        args: a `ReferenceConfig`.
        **arguments: those of `BaseTrainer`.
    """

    args: Any
    train_dataset: Any
    eval_dataset: Any
    needs_terms = True
    reference_columns: ClassVar[tuple[str, ...]] = ()
    """What the reference says of a row, where it is asked before the run."""
    reference: ReferencePolicy | None = None

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: ReferenceConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **arguments: Any,
    ) -> None:
        if ref_model is not None and ref_model is model:
            raise ConfigError(
                "ref_model is the model itself, which would move with it. Leave ref_model out: the reference is the model as it is now."
            )
        datasets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        super().__init__(
            model, args, data_collator=data_collator, processing_class=processing_class, **datasets, **arguments
        )
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if sharded and ref_model is None and not self.args.precompute_ref_log_probs:
            raise ConfigError(
                "the weights are sharded over processes, so the reference cannot be kept beside them. Give ref_model, or set "
                "precompute_ref_log_probs=True."
            )
        given = None if ref_model is None else self._ready(ref_model)
        self.reference = ReferencePolicy(self.model, given)
        if self.args.precompute_ref_log_probs:
            self.train_dataset = self._with_reference(self.train_dataset, "train")
            self.eval_dataset = self._with_reference(self.eval_dataset, "eval")
            scored = [self.train_dataset, *_parts(self.eval_dataset)]
            if given is None and not (
                is_adapted(self.model) or any(isinstance(part, IterableDataset) for part in scored)
            ):
                self.reference = None
        if self.args.sync_ref_model:
            self.add_callback(_MoveReference(self))

    def predictions(self, model: nn.Module, rows: PredictedRows, scores: Any) -> tuple[Tensor, Tensor]:
        """Logits `[N, L, V]`; the labels are all tokens `[N, L]`, as TRL has them, those of prompts too."""
        logits, _ = super().predictions(model, rows, scores)
        return logits, rows.input_ids

    def reference_values(self, logprob: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """`reference_columns` `[B]` of a batch, from the reference's `[E]` log-probabilities."""
        raise NotImplementedError

    def _ready(self, ref_model: Any) -> nn.Module:
        """A given reference, on the device, reading the layout that the policy reads."""
        reference = self.install(model_of(ref_model, self.args, self.load)).to(self.args.device)
        if self.data_collator.layout != "padded":
            support = let_read_forests(reference)
            if support.reading == "chains":
                raise ConfigError(
                    f"the reference reads one sequence a row, and the model rows of several: {support.reason}. Set layout=padded."
                )
        self.let_run(reference)
        return reference

    @property
    def row_columns(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.reference_columns if self.args.precompute_ref_log_probs else ()

    def score(self, model: nn.Module, inputs: dict[str, Any]) -> ScoreOutput:
        """The policy's scores, with the reference's where it was not asked before the run."""
        reference = None
        if not self.args.precompute_ref_log_probs:
            assert self.reference is not None
            reference = self.reference.logprob(model, forest_fields(inputs))
        scores = super().score(model, inputs)
        scores.reference_logprob = reference
        return scores

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.sync_ref_model and self.args.should_save:
            assert self.reference is not None
            weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.reference.weights.items()}
            os.makedirs(os.path.dirname(os.path.join(output_dir, _MOVED)), exist_ok=True)
            save_file(weights, os.path.join(output_dir, _MOVED))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not self.args.sync_ref_model:
            return
        assert self.reference is not None
        saved = os.path.join(checkpoint, _MOVED)
        if not os.path.exists(saved):
            logger.warning(
                "%s has no %s: the reference goes on from where it stood before the run.", checkpoint, _MOVED
            )
            return
        moved = load_file(saved)
        for name, weights in self.reference.weights.items():
            weights.copy_(moved[name])

    # ---- before the run

    def _prepare(self, dataset: Any, name: str) -> Any:
        prepared = super()._prepare(dataset, name)
        constructed = self.reference is not None or getattr(self, "model", None) is not None
        return self._with_reference(prepared, name) if constructed and self.args.precompute_ref_log_probs else prepared

    def _with_reference(self, dataset: Any, name: str) -> Any:
        """The dataset with `reference_columns`."""
        if isinstance(dataset, dict):
            return {key: self._with_reference(part, f"{name} {key}") for key, part in dataset.items()}
        if dataset is None or set(self.reference_columns) <= set(dataset.column_names or ()):
            return dataset
        if self.reference is None:
            raise ConfigError(
                f"{name}: precompute_ref_log_probs=True kept no reference to score new rows with. Give them to the trainer as eval_dataset, or give ref_model."
            )
        self.model_wrapped = self.model
        if isinstance(dataset, IterableDataset):
            score = partial(self._score_rows, evaluation=name != "train")
            return dataset.map(score, batched=True, batch_size=self._reference_batch_size(name))
        fingerprint = Hasher.hash((dataset._fingerprint, self.reference.fingerprint(), self.reference_options()))
        cache = dataset._get_cache_file_path(fingerprint)
        if not (dataset.cache_files and os.path.exists(cache)):
            columns: dict[str, list[float]] = {key: [] for key in self.reference_columns}
            for part in self._reference_batches(dataset, name):
                for key, values in part.items():
                    columns[key] += values
            scored = Dataset.from_dict(columns)
            if not dataset.cache_files:  # rows in memory are not cached
                return concatenate_datasets([dataset, scored], axis=1)
            with self.args.main_process_first(desc=f"{name} reference scores"):
                if not os.path.exists(cache):
                    scored.map(cache_file_name=cache, new_fingerprint=fingerprint)
        return concatenate_datasets([dataset, Dataset.from_file(cache)], axis=1)

    def reference_options(self) -> tuple:
        """What the values depend on beside rows and weights."""
        return (self.reference_columns,)

    def _reference_batches(self, dataset: Dataset, name: str) -> Iterator[dict[str, list[float]]]:
        read = dataset.select_columns(self.columns_of(self.row_reader()))
        bar = tqdm(total=len(dataset), disable=self.args.disable_tqdm, desc=f"Reference scores of {name}", unit="row")
        with bar:
            for rows in read.iter(batch_size=self._reference_batch_size(name)):
                yield self._score_rows(rows, evaluation=name != "train")
                bar.update(len(next(iter(rows.values()))))

    def _reference_batch_size(self, name: str) -> int:
        """As many rows as the shapes that are planned for the dataset hold, unless something else was asked for."""
        args = self.args
        planned = args.per_device_train_batch_size if name == "train" else args.per_device_eval_batch_size
        return args.precompute_ref_batch_size or planned

    @torch.no_grad()
    def _score_rows(self, rows: dict[str, list], *, evaluation: bool) -> dict[str, list[float]]:
        """`reference_columns` of a batch of rows, in the shapes planned for training or for evaluation."""
        assert self.reference is not None
        collate = replace(self.collator_for(evaluation=evaluation), columns=(), strict=False)
        batch = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
        inputs = self._prepare_inputs(collate(batch))
        with self.compute_loss_context_manager():
            logprob = self.reference.logprob(self.model, forest_fields(inputs))
        values = self.reference_values(logprob, inputs)
        return {name: value[: len(batch)].tolist() for name, value in values.items()}


def _parts(dataset: Any) -> list:
    return list(dataset.values()) if isinstance(dataset, dict) else [dataset]


class _MoveReference(TrainerCallback):
    """Moves the reference towards the policy every few steps."""

    def __init__(self, trainer: ReferencedTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % args.ref_model_sync_steps == 0:
            assert self._trainer.reference is not None
            self._trainer.reference.mix_in(args.ref_model_mixup_alpha)
