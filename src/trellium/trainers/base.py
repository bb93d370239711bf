"""What every trainer shares, on `transformers.Trainer`: model, adapter, data, the scoring call, exact normalisation, metrics, checkpoints.

A trainer is three things: how a row becomes sequences (`prepare_dataset`), which scores it needs (`score_outputs`), and its loss (`compute_scored_loss`).
Everything else is here.

The loss of an optimizer step is one sum divided by one number: what is counted over all of its micro-batches on all processes. So four micro-batches of one
row give the gradient of one batch of four, whatever their lengths. Evaluation is one such sum over the whole held-out set. Logits
are never made, unless `compute_metrics` asks evaluation for them (`trellium.trainers.predictions`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, set_seed
from transformers.trainer_utils import PredictionOutput, TrainOutput

from trellium.capabilities import capabilities
from trellium.data.images import STORED_IMAGES, tokenizer_in
from trellium.data.samples import ReadTokens, RowReader
from trellium.errors import ConfigError, DatasetError
from trellium.forest.collate import ForestCollator
from trellium.forest.shapes import ShapePlan
from trellium.models.blocks import compile_blocks, compile_in_place
from trellium.models.images import text_model
from trellium.models.linears import use_host_products
from trellium.models.loading import load_model
from trellium.models.offloading import offloaded_activations
from trellium.models.reference import disable_dropout
from trellium.models.scoring import install_scores
from trellium.trainers.adapters import is_adapted, wrap_with_adapter
from trellium.trainers.arguments import check_batch, check_collator, forest_fields, refuse_arguments
from trellium.trainers.base_config import BaseConfig
from trellium.trainers.checkpoint_checks import check_same_model
from trellium.trainers.checkpoints import (
    begin_checkpoint,
    drop_pad_collision,
    resumable_checkpoint,
    warn_of_other_runs,
    write_model_card,
)
from trellium.trainers.dealing import Dealing, deal_out
from trellium.trainers.held_out import EvenBatches
from trellium.trainers.images import (
    check_later_rows,
    have_images,
    inputs_of_images,
    refuse_predictions,
    say_what_compiles,
)
from trellium.trainers.layouts import layout_of
from trellium.trainers.mixture import RouterLoss
from trellium.trainers.planned_graphs import PlannedGraphs
from trellium.trainers.predictions import PredictingTrainer
from trellium.trainers.resuming import refused_by_transformers
from trellium.trainers.row_sizes import costs_of, pair_cost
from trellium.trainers.run_plan import plan_run
from trellium.trainers.starting_point import (
    model_of,
    name_of,
    pad_token_id,
    processing_of,
    set_chat_template,
    set_special_tokens,
    token_limits,
)
from trellium.trainers.warm_up import ShapeWatch, warm_up

logger = logging.getLogger(__name__)


class BaseTrainer(PredictingTrainer):
    """The common base; use one of its subclasses.

    Args:
        model: a name or path, a causal language model, or one with an adapter.
        args: the trainer's config, or None for its defaults with an output folder named after the model.
        data_collator: from prepared rows to the tensors of a `ForestBatch`; None for one sequence a row.
        train_dataset: a `Dataset` or `IterableDataset` of raw or prepared rows.
        eval_dataset: one such, or a mapping of several.
        processing_class: the tokenizer, or the processor of a model that reads images; None for the model's own.
        compute_metrics, preprocess_logits_for_metrics: as in `transformers.Trainer`, for evaluation, which makes logits only for them.
        callbacks, optimizers, optimizer_cls_and_kwargs: as in `transformers.Trainer`.
        peft_config: train this adapter instead of the model.
        **others: TRL's arguments that are refused with the reason, and names that are not the trainer's, answered with where they belong.

    Raises:
        ConfigError, DatasetError, ModelError: what came, the rule, and the way out.
    """

    config_class: ClassVar[type[BaseConfig]] = BaseConfig
    method: ClassVar[str] = ""
    score_outputs: ClassVar[tuple[str, ...]] = ("logprob",)
    needs_terms: ClassVar[bool] = False
    """Whether the loss reads each sample's own scores, rather than edges by their weight."""
    row_columns: tuple[str, ...] = ()
    """Columns of numbers that the loss reads, one a row of the dataset."""
    fused_loss: str | None = None
    """The loss, by its name in `trellium.ops.head_nll`, whose gradients are made while it is scored; None where the loss is made of scores."""
    loss_is_scaled_for_ga = True  # transformers: do not divide by the accumulation steps
    data_collator: Any
    resume_point: str | None = None
    """The checkpoint from which the current run would go on: its own last one, or the one it was resumed from."""

    def __init__(
        self,
        model: str | os.PathLike | PreTrainedModel | nn.Module,
        args: BaseConfig | None = None,
        data_collator: Callable[[list], dict[str, Tensor]] | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | Mapping[str, Dataset | IterableDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        compute_metrics: Callable | None = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        optimizer_cls_and_kwargs: tuple | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        peft_config: Any = None,
        **others: Any,
    ) -> None:
        refuse_arguments(type(self).__name__, others, self.config_class)
        args = self._own_args(args, model)
        set_seed(args.seed)  # before an adapter's weights are drawn
        if processing_class is None:
            processing_class = processing_of(model, args)
        model = wrap_with_adapter(self.install(model_of(model, args, self.load)), peft_config, args)
        if getattr(args, "disable_dropout", False):
            disable_dropout(model)
        set_special_tokens(tokenizer_in(processing_class), args)
        set_chat_template(processing_class, args)
        self._check_iterable(train_dataset, args)
        self.processing_class = processing_class
        self.args = args
        self.makes_predictions = compute_metrics is not None or preprocess_logits_for_metrics is not None
        self.token_limits = token_limits(model, args)
        streams = eval_dataset.values() if isinstance(eval_dataset, Mapping) else (eval_dataset,)
        if any(isinstance(part, IterableDataset) for part in streams):
            _keep_batches_apart(args)
        train_dataset = self._prepare(train_dataset, "train")
        eval_dataset = self._prepare(eval_dataset, "eval")
        self.reads_images = have_images(train_dataset, eval_dataset)
        if self.reads_images and self.makes_predictions:
            refuse_predictions()
        self.router_loss = RouterLoss.of(model, getattr(args, "router_aux_loss_coef", 0.0))
        self.plan: ShapePlan | None = None
        self.dealing: Dealing | None = None
        self.graphs: PlannedGraphs | None = None
        if data_collator is None:
            self.data_collator = self._own_collator(model)
            self.dealing = self._dealing(model)
            self.graphs = PlannedGraphs.of(args, model, layout=self.data_collator.layout, method=self.method)
            self.plan = plan_run(args, model, self.collator_for, train_dataset, eval_dataset, self.dealing, self.graphs)
            data_collator = replace(self.data_collator, plan=self.plan)
        else:
            check_collator(data_collator, train_dataset)
        if self.reads_images and args.torch_compile:
            say_what_compiles(blocks=args.compiles_blocks(model))
        with refused_by_transformers("these options"):
            super().__init__(
                model=model,
                args=args,
                data_collator=data_collator,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                callbacks=callbacks,
                optimizers=optimizers,
                optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
                compute_metrics=compute_metrics,
                preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            )
        self.say_what_predictions_cost()
        if self.args.n_gpu > 1:
            raise ConfigError(
                f"{self.args.n_gpu} devices are visible to one process, which would replicate the model in threads and break exact normalisation. "
                "Start one process a device with `accelerate launch` or `torchrun`, or show it one device."
            )
        self.let_run(self.model)

    # ---- what a method defines ----

    @staticmethod
    def load(name: str | os.PathLike | None, **options: Any) -> nn.Module:
        """From a name to the model."""
        return load_model(name, **options)

    @staticmethod
    def install(model: nn.Module) -> nn.Module:
        """Let a model be called for the scores that the method needs."""
        return install_scores(model)

    def prepare_dataset(self, dataset: Dataset | IterableDataset, name: str) -> Dataset | IterableDataset:
        """Raw rows to the columns that the collator reads."""
        raise NotImplementedError

    def row_reader(self, *, evaluation: bool = False) -> RowReader:
        """How a prepared row of training or evaluation becomes sequences; here one, of `input_ids` and `labels`."""
        return ReadTokens()

    def compute_scored_loss(self, scores: Any, inputs: dict[str, Tensor], normalizer: Tensor | float) -> Tensor:
        """The loss `[]` of a batch from its scores: a sum divided by `normalizer`."""
        raise NotImplementedError

    def count_items(self, inputs: dict[str, Tensor]) -> Tensor:
        """What a batch adds to the number its step's loss is divided by: `[]`, here the weights of the trained tokens. Where a loss needs more such
        numbers it is a list of them, of which the first counts what a mean over a held-out set is over."""
        return inputs["edge_weight"].sum()

    @property
    def loss_spans(self) -> Literal["step", "round", "batch"]:
        """What else the loss of a row depends on, beside their number in its optimizer step: on none of them (`step`), on those of its micro-batch in all
        processes (`round`), or in its own (`batch`). Rows change places only where that does not change the loss."""
        own_count = self.args.world_size > 1 and not self.args.average_tokens_across_devices
        return "batch" if own_count or self.router_loss.coefficient else "step"

    # ---- construction ----

    def preparation(self, name: str) -> dict[str, Any]:
        """How a dataset is prepared, whatever the method."""
        return {
            "max_length": self.args.max_length,
            "eos_token": self.args.eos_token,
            "num_proc": self.args.dataset_num_proc,
            "limits": self.token_limits,
            "name": name,
        }

    def _own_args(self, args: BaseConfig | None, model: Any) -> BaseConfig:
        if args is None:
            name = str(name_of(model) or "model").rstrip("/").split("/")[-1]
            return self.config_class(output_dir=f"{name}-{self.method.upper()}")
        if not isinstance(args, self.config_class):
            raise ConfigError(f"args must be a {self.config_class.__name__}, got {type(args).__name__}")
        return args

    @staticmethod
    def _check_iterable(dataset: Any, args: BaseConfig) -> None:
        if not isinstance(dataset, IterableDataset):
            return
        if args.max_steps <= 0:
            raise ConfigError("an IterableDataset has no length, so the run's end is not known. Set max_steps.")
        _keep_batches_apart(args)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        settings = super()._build_accelerator_args(**kwargs)
        if self.args.torch_compile:  # else it would compile once more, around what is compiled in place
            settings["dynamo_plugin"] = TorchDynamoPlugin(backend=DynamoBackend.NO)
        return settings

    def let_run(self, model: nn.Module) -> None:
        """Let `model` multiply as the host does fastest, and run compiled where `torch_compile` is on: block by block or as one region, as
        `compile_regions` says. In place, so that training, evaluation and the reference run what was compiled, whatever the model is wrapped in."""
        args = self.args
        if args.device.type == "cpu":
            use_host_products(model)
        if not args.torch_compile:
            return
        blocks = args.compiles_blocks(model)
        compile_region = compile_blocks if blocks else compile_in_place
        compile_region(
            text_model(model) if blocks else model,  # images are as many as there are: what reads them is not compiled
            backend=args.torch_compile_backend,
            mode=args.torch_compile_mode,
            dynamic=False if capabilities(args.device).static_shapes else None,
        )

    def _prepare(self, dataset: Any, name: str) -> Any:
        if dataset is None:
            return None
        if isinstance(dataset, Mapping) and not isinstance(dataset, Dataset | IterableDataset):
            if name == "train":
                raise DatasetError(
                    f"train_dataset must be one dataset, got a mapping of {', '.join(map(repr, dataset)) or 'none'}. Choose one: train_dataset=dataset['train']."
                )
            return {key: self._prepare(part, f"{name} {key}") for key, part in dataset.items()}
        if not isinstance(dataset, Dataset | IterableDataset):
            raise DatasetError(
                f"{name}: expected a datasets.Dataset or IterableDataset, got {type(dataset).__name__}. "
                "Dataset.from_list(rows) makes one of a list of dicts."
            )
        with self.args.main_process_first(desc=f"{name} dataset preparation"):
            prepared = self.prepare_dataset(dataset, name)
        check_later_rows(prepared, name, getattr(self, "reads_images", True))
        return prepared

    def _own_collator(self, model: nn.Module) -> ForestCollator:
        """From prepared rows to batches, in the layout that the model reads."""
        args, read = self.args, self.row_reader()
        takes, images = None, None
        if self.reads_images:
            takes, images = inputs_of_images(model, self.processing_class, args)
        return ForestCollator(
            pad_token_id(tokenizer_in(self.processing_class)),
            args.row_multiple,
            layout=layout_of(model, args.layout, packed_rows="seq_lengths" in read.columns, images=takes),
            images=images,
            read=read,
            terms=self.needs_terms,
            columns=self.row_columns,
            batch_rows=args.per_device_train_batch_size if args.row_multiple or args.plans_shapes else None,
        )

    def collator_for(self, *, evaluation: bool) -> ForestCollator:
        """The trainer's collator for batches of training or of evaluation, whose planned shapes are others."""
        collator, args = self.data_collator, self.args
        if not evaluation:
            return collator
        return replace(
            collator,
            evaluation=True,
            layout="padded" if self.makes_predictions else collator.layout,
            strict=args.strict_shapes,
            read=self.row_reader(evaluation=True),
            batch_rows=collator.batch_rows and args.per_device_eval_batch_size,
        )

    def _dealing(self, model: nn.Module) -> Dealing | None:
        """How the rows of a step are dealt to what shares it, by what they cost; None for in order: nothing shares it, or it would not be the same step."""
        args, collator = self.args, self.data_collator
        together = {"step": args.gradient_accumulation_steps, "round": 1, "batch": 0}[self.loss_spans]
        helps = collator.layout != "padded" and (args.world_size > 1 or (collator.one_row and together > 1))
        return (
            Dealing(args.world_size, together, pair_cost(model))
            if args.balance_batches and together and helps
            else None
        )

    def _set_signature_columns_if_needed(self) -> None:
        readers = (self.row_reader(), self.row_reader(evaluation=True))
        columns = dict.fromkeys(name for read in readers for name in self.columns_of(read))
        self._signature_columns = [*self.row_columns, *columns]

    def columns_of(self, read: RowReader) -> list[str]:
        """The columns that a batch is made of, but for those of numbers."""
        return [*read.columns, *([STORED_IMAGES] if self.reads_images else [])]

    # ---- the step ----

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Tensor | None:
        """What the loss of the whole accumulated batch is divided by, over all processes where they average."""
        if not batch_samples:
            return None
        check_batch(batch_samples[0])
        count = torch.stack([self.count_items(batch).to(device) for batch in batch_samples]).sum(0)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            count = self.accelerator.reduce(count, reduction="sum")
        return count

    def offloading(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Where a step's passes run: with `activation_offloading`, what the backward pass reads waits on the host."""
        if not self.args.activation_offloading or self.args.device.type == "cpu":
            return nullcontext()
        return offloaded_activations(model, exact_strides=self.args.torch_compile)

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """As in `transformers.Trainer`, with `activation_offloading`."""
        with self.offloading(model):
            return super().training_step(model, *args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """The share that a micro-batch has in its step's loss, `[]`; see `transformers.Trainer.compute_loss`."""
        scores = self.score(model, inputs)
        count = self.count_items(inputs) if num_items_in_batch is None else num_items_in_batch
        loss = self.compute_scored_loss(scores, inputs, count.clamp(min=1))
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over processes, the count was summed
        if scores.aux_loss is not None:
            steps = self.current_gradient_accumulation_steps if num_items_in_batch is not None else 1
            loss = loss + self.router_loss.coefficient * scores.aux_loss / steps
        self._record("train" if model.training else "eval", scores, inputs)
        return (loss, scores) if return_outputs else loss

    def score(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """The scores of a batch that the method needs; here a `ScoreOutput` of its edges."""
        fields = forest_fields(inputs)
        smoothing = self.args.label_smoothing_factor or None
        fused = self.fused_loss if torch.is_grad_enabled() or smoothing else None
        return model(**fields, score_outputs=self.score_outputs, fused_loss=fused, label_smoothing=smoothing)

    # ---- metrics ----

    def run_begins(self) -> None:
        """Compile what is planned, before the first step."""
        if self.plan is not None and self.args.torch_compile:
            warm_up(self, self.plan)
            self._shape_watch = ShapeWatch(strict=self.args.strict_shapes)

    def _get_dataloader(self, dataset: Any, *args: Any, is_training: bool = False, **kwargs: Any) -> Any:
        collator, accelerator = self.data_collator, self.accelerator
        ours = isinstance(collator, ForestCollator)
        spread = ours and not is_training and accelerator.num_processes > 1 and isinstance(dataset, Dataset)
        if ours:
            self.data_collator = self.collator_for(evaluation=not is_training)
        evened = accelerator.even_batches
        accelerator.even_batches = evened and not spread
        try:
            loader = super()._get_dataloader(dataset, *args, is_training=is_training, **kwargs)
            if spread:
                return EvenBatches(loader, self.data_collator, accelerator.num_processes)
        finally:
            self.data_collator, accelerator.even_batches = collator, evened
        if is_training and self.dealing is not None and isinstance(loader.dataset, Dataset):
            deal_out(loader, costs_of(loader.dataset, collator, self.dealing.pair), self.dealing)
        return loader

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Held-out metrics; `eval_dataset` may be raw rows, prepared ones, a mapping of several, or the name of one given to the trainer."""
        if eval_dataset is not None and not isinstance(eval_dataset, str | Mapping):
            eval_dataset = self._prepare(eval_dataset, metric_key_prefix)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """The metrics of a held-out set, which may be raw rows or prepared ones; its `predictions` are None unless `compute_metrics` or its like was given."""
        return super().predict(self._prepare(test_dataset, metric_key_prefix), ignore_keys, metric_key_prefix)

    # ---- checkpoints ----

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        """Train; `resume_from_checkpoint` is a checkpoint's folder, or True for the last in the output folder."""
        checkpoint = resumable_checkpoint(resume_from_checkpoint, self.args.output_dir)
        if self.train_dataset is None:
            raise ConfigError("there is nothing to train on: give the trainer a train_dataset.")
        if self.args.max_steps <= 0 and self.args.num_train_epochs <= 0:
            raise ConfigError(
                "num_train_epochs is 0 and max_steps is not set, so there is no step to train. Set one of them."
            )
        if checkpoint is not None:
            check_same_model(Path(checkpoint), self.model)
        if self.args.should_save and self.args.save_strategy != "no":
            warn_of_other_runs(self.args.output_dir, checkpoint)
        self.resume_point = checkpoint
        return super().train(resume_from_checkpoint=checkpoint, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if not self.may_save():
            return
        with self.throughput.paused():
            begin_checkpoint(self.args.output_dir, self.state.global_step)
            self.keep_counts()
            super()._save_checkpoint(model, trial)
        if not self.args.save_only_model:
            self.resume_point = os.path.join(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        drop_pad_collision(self.model)
        with self.router_loss.out_of_sight():
            super()._save(output_dir, state_dict)
        if self.args.should_save:
            self.create_model_card(output_dir=output_dir)

    def create_model_card(self, *args: Any, output_dir: str | None = None, **kwargs: Any) -> None:
        """Write a short README.md beside the weights: from what, by which method, how to load it."""
        folder = output_dir or self.args.output_dir
        adapter, vision = is_adapted(self.model), self.reads_images
        write_model_card(folder, self.method, name_of(self.model), adapter=adapter, vision=vision)


def _keep_batches_apart(args: BaseConfig) -> None:
    if args.accelerator_config.dispatch_batches is None:
        args.accelerator_config.dispatch_batches = False  # every process reads its own; batches differ in shape
