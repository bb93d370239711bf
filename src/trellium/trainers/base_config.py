"""The options that every trainer shares: `transformers.TrainingArguments` with the field's defaults for post-training.

A field that does nothing does not exist. Options of TRL 1.16 that Trellium does not have yet are known by name: asking for what happens
anyway (`packing=False`) is allowed, asking for more raises a `ConfigError` that says so, and a name nobody knows is answered with the nearest.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

import torch
from huggingface_hub.constants import HF_HUB_OFFLINE
from torch import nn
from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from trellium.capabilities import capabilities
from trellium.errors import ConfigError, unknown_name
from trellium.models.blocks import repeated_blocks
from trellium.trainers.known_options import KnownOptions, NotYet
from trellium.trainers.layouts import LAYOUTS

logger = logging.getLogger(__name__)

STATIC_SHAPE_MULTIPLE = 128
"""Row lengths and edges are rounded up to this where every new shape costs a compilation."""


COMPILE_REGIONS = ("auto", "model", "blocks")
KNOWN_SHAPES = ("auto", "multiple", "exact")


@dataclass
class BaseConfig(TrainingArguments, metaclass=KnownOptions):
    """What every trainer can be told, beside `transformers.TrainingArguments`.

    Defaults that differ from `TrainingArguments`: `learning_rate` (each trainer's own), `logging_steps` 10, `gradient_checkpointing` True, `bf16`
    where the hardware computes in it, `logging_nan_inf_filter` False (a loss that is not finite is logged as it is, and no micro-batch waits for
    the host to look at it).

    `use_liger_kernel` of `TrainingArguments` is refused, and `label_smoothing_factor` where the loss is not of tokens.
    """

    not_yet: ClassVar[dict[str, NotYet]] = {}
    """Refused options of this config, by name."""
    smooths_labels: ClassVar[bool] = False
    """Whether `label_smoothing_factor` means something to the loss."""

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]

    logging_steps: float = field(
        default=10,
        metadata={"help": "Log every so many optimizer steps; below 1, this share of all steps."},
    )
    gradient_checkpointing: bool = field(
        default=True,
        metadata={
            "help": "Recompute activations in the backward pass instead of keeping them: about a third more time, far less memory."
        },
    )
    activation_offloading: bool = field(
        default=False,
        metadata={
            "help": "Keep activations in the host's memory between forward and backward: less of the device's, and the time of two copies of each."
        },
    )
    bf16: bool | None = field(
        default=None,
        metadata={
            "help": "Compute in bfloat16 with float32 weights. Unset: where an accelerator does natively, unless fp16 is set."
        },
    )
    logging_nan_inf_filter: bool = field(
        default=False,
        metadata={
            "help": "Hide losses that are not finite from the log. Costs a wait for the device in every micro-batch."
        },
    )
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": 'Arguments of from_pretrained for a model given by name, as JSON: \'{"dtype": "bfloat16"}\'.'
        },
    )
    trust_remote_code: bool = field(
        default=False,
        metadata={"help": "Let a model's or tokenizer's repository run its own Python code while it is loaded."},
    )
    router_aux_loss_coef: float | None = field(
        default=None,
        metadata={
            "help": "Weight of a mixture of experts' load-balancing loss. Unset: what the model's configuration says; 0: none."
        },
    )
    max_length: int | None = field(
        default=1024, metadata={"help": "Cut longer rows to so many tokens; null (in a YAML file) leaves them whole."}
    )
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Processes that tokenize the dataset."})
    chat_template_path: str | None = field(
        default=None,
        metadata={
            "help": "A .jinja file, or a model whose chat template to take, for conversations. Unset: the model's own."
        },
    )
    eos_token: str | None = field(
        default=None, metadata={"help": "The token that ends a text. Unset: the tokenizer's."}
    )
    pad_token: str | None = field(
        default=None,
        metadata={"help": "The token that pads. Unset: the tokenizer's; which one it is never changes the loss."},
    )
    pad_to_multiple_of: int | str | None = field(
        default="auto",
        metadata={
            "help": "Round row lengths up to a multiple: a number, 'none', or 'auto' for 128 where every new shape is compiled, else none."
        },
    )

    layout: str = field(
        default="auto",
        metadata={
            "help": "How the sequences of a batch lie: 'padded', one a row; 'packed', one behind the other; 'shared', those that begin alike share tokens; "
            "'auto': shared where that is exact for the model. It never changes the loss."
        },
    )

    balance_batches: bool = field(
        default=True,
        metadata={
            "help": "Deal the rows of an optimizer step to its processes and micro-batches by what they cost, where several sequences share a row. The step has "
            "the same rows and, up to the order of its sum, the same loss; where a loss depends on more than that, rows stay in order."
        },
    )

    compile_regions: str = field(
        default="auto",
        metadata={
            "help": "What torch_compile compiles: 'model', or 'blocks' for the repeated block once, so that compile time does not grow with depth; "
            "'auto': blocks where every new shape is compiled and the model has them, else the model."
        },
    )

    shapes: str | list[str] = field(
        default_factory=lambda: "auto",  # a command line's parser drops the plain default of what may be a list
        metadata={
            "help": "Which row lengths a compiled run may use: 'auto' plans the cheapest few from the rows, 'multiple' is every multiple of "
            "pad_to_multiple_of, 'exact' every length, or name the lengths."
        },
    )
    max_graphs: int = field(
        default=8, metadata={"help": "How many shapes 'auto' may plan, those of training and of evaluation together."}
    )
    strict_shapes: bool = field(
        default=False, metadata={"help": "Make it an error if anything is compiled after the planned shapes were."}
    )
    max_nonfinite_steps: int = field(
        default=5,
        metadata={
            "help": "Stop the run when so many steps in a row have a loss or gradient that is not finite. Each is refused: it changes no weight."
        },
    )

    def __post_init__(self) -> None:
        if isinstance(self.shapes, list) and len(self.shapes) == 1 and self.shapes[0] in KNOWN_SHAPES:
            self.shapes = self.shapes[0]  # as a command line gives it
        self._refuse_inherited()
        self._check_numbers()
        self.use_cpu: bool = self.use_cpu or not torch.accelerator.is_available()
        if self.bf16 is None:
            accelerator = None if self.use_cpu else torch.accelerator.current_accelerator()
            self.bf16 = not self.fp16 and accelerator is not None and capabilities(accelerator).native_bfloat16
            if not (self.bf16 or self.fp16):
                why = (
                    "no accelerator is in use"
                    if accelerator is None
                    else f"the hardware that computes for {accelerator.type} has no bfloat16 arithmetic of its own"
                )
                _say_once(f"Training in float32: {why}. bf16=True asks for bfloat16 all the same.")
        if self.activation_offloading and self.use_cpu:
            _say_once(
                "activation_offloading=True does nothing here: no accelerator is in use, so activations are in the host's memory as they are."
            )
        # TrainingArguments renamed these; saying the new name keeps it from warning about the old, which is TRL's.
        for old, new in (
            ("gradient_checkpointing", "activation_checkpointing"),
            ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
        ):
            if hasattr(self, new) and getattr(self, new) is None:
                setattr(self, new, getattr(self, old))
        super().__post_init__()
        self._check_preparation()
        self._check_reports()
        self._check_checkpointing()
        self._check_backend()
        if self.strict_shapes and not (self.torch_compile and self.plans_shapes):
            raise ConfigError(
                "strict_shapes=True, but no shapes are compiled before the run: that takes torch_compile=True, and a device that compiles each shape or "
                "the row lengths given (shapes)."
            )
        if self.push_to_hub and HF_HUB_OFFLINE:
            raise ConfigError("push_to_hub=True, but HF_HUB_OFFLINE is set. Unset one of them.")
        if isinstance(self.model_init_kwargs, str):
            raise ConfigError(
                f'model_init_kwargs must be a JSON object like \'{{"dtype": "bfloat16"}}\', got {self.model_init_kwargs!r}'
            )
        self.pad_to_multiple_of = self._multiple(self.pad_to_multiple_of)

    @property
    def row_multiple(self) -> int | None:
        """What `pad_to_multiple_of` came to: a number, or None for no rounding."""
        return self._multiple(self.pad_to_multiple_of)

    @property
    def model_options(self) -> dict[str, Any]:
        """`model_init_kwargs` as a mapping, empty where unset."""
        return dict(self.model_init_kwargs) if isinstance(self.model_init_kwargs, dict) else {}

    def _check_numbers(self) -> None:
        lowest = {
            "per_device_train_batch_size": 1,
            "per_device_eval_batch_size": 1,
            "gradient_accumulation_steps": 1,
            "dataloader_num_workers": 0,
            "seed": 0,
            "learning_rate": 0,
            "num_train_epochs": 0,
            "weight_decay": 0,
            "max_grad_norm": 0,
            "max_graphs": 1,
            "max_nonfinite_steps": 1,
        }
        for name, least in lowest.items():
            value = getattr(self, name)
            if not isinstance(value, int | float) or not least <= value < 2**32:
                raise ConfigError(f"{name} must be a number from {least}, got {value!r}")
        if not isinstance(self.max_steps, int):
            raise ConfigError(f"max_steps must be a whole number, -1 for none, got {self.max_steps!r}")
        for name, strategy in (
            ("logging_steps", "logging_strategy"),
            ("save_steps", "save_strategy"),
            ("eval_steps", "eval_strategy"),
        ):
            every = getattr(self, name)
            by_steps = str(getattr(getattr(self, strategy), "value", getattr(self, strategy))) == "steps"
            if by_steps and every is not None and not every > 0:
                raise ConfigError(f"{name} must be above 0, got {every!r}. {strategy}=no leaves it out.")
        noise = self.neftune_noise_alpha
        if noise is not None and not (isinstance(noise, int | float) and 0 <= noise < 2**32):
            raise ConfigError(f"neftune_noise_alpha must be a number from 0, or unset for no noise, got {noise!r}")

    def _check_preparation(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(
                f"max_length must be at least 2, one token to predict from and one to predict; got {self.max_length}"
            )
        if self.dataset_num_proc is not None and self.dataset_num_proc < 1:
            raise ConfigError(
                f"dataset_num_proc must be at least 1, or unset for one process, got {self.dataset_num_proc}"
            )

    def _check_checkpointing(self) -> None:
        known = {"use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state"}
        for name in self.gradient_checkpointing_kwargs or ():
            if name not in known:
                raise ConfigError(
                    f"{unknown_name('gradient_checkpointing_kwargs: torch.utils.checkpoint has no option', name, known)}"
                )

    def _check_backend(self) -> None:
        """Hold `torch_compile_backend` to the backends that torch has, once it is known that something is compiled."""
        if not self.torch_compile:
            return
        known = torch._dynamo.list_backends(exclude_tags=())
        if self.torch_compile_backend not in known:
            raise ConfigError(
                f"{unknown_name('torch_compile_backend: torch has no backend', str(self.torch_compile_backend), known)} It has {', '.join(known)}."
            )

    def _check_reports(self) -> None:
        """Hold `report_to` to what transformers can report to here; `TrainingArguments` has made a list of it."""
        for name in self.report_to or ():
            if name not in INTEGRATION_TO_CALLBACK:
                known = sorted({*INTEGRATION_TO_CALLBACK, "all", "none"})
                raise ConfigError(
                    f"{unknown_name('report_to knows no', name, known)} It takes {', '.join(known)}, or several."
                )
            if name not in get_available_reporting_integrations():
                raise ConfigError(
                    f"report_to={name!r} needs its package, which is not installed. Install it, or set report_to=none."
                )

    @property
    def given_shapes(self) -> Literal["auto", "multiple", "exact"] | list[int]:
        """`shapes` as what it came to."""
        return cast(Any, self.shapes) if isinstance(self.shapes, str) else [int(length) for length in self.shapes]

    @property
    def plans_shapes(self) -> bool:
        """Whether the run's shapes are chosen before it starts: where each is compiled ahead of time, or when their lengths are given."""
        if not isinstance(self.shapes, str):
            return True
        return self.torch_compile and capabilities(self.device).static_shapes

    def compiles_blocks(self, model: nn.Module) -> bool:
        """Whether `model` is compiled block by block: `compile_regions`, where `torch_compile` is on.

        Raises:
            ConfigError: it is compiled as one, and `activation_offloading` wants activations moved while it runs.
        """
        if not self.torch_compile:
            return False
        automatic = self.compile_regions == "auto" and capabilities(self.device).static_shapes
        blocks = self.compile_regions == "blocks" or (automatic and bool(repeated_blocks(model)))
        if self.activation_offloading and not blocks and not self.use_cpu:
            raise ConfigError(
                "activation_offloading=True, but torch_compile makes one graph of the whole model, which holds all activations until it ends. "
                "Set compile_regions=blocks, or one of the two options alone."
            )
        return blocks

    def _refuse_inherited(self) -> None:
        if self.use_liger_kernel:
            raise ConfigError(
                "use_liger_kernel=True: logits are never made here, so there is nothing for it to fuse. Leave it unset."
            )
        if self.label_smoothing_factor != 0 and not self.smooths_labels:
            raise ConfigError(
                f"label_smoothing_factor={self.label_smoothing_factor}, but the loss is not of tokens, so there is nothing to smooth. Leave it at 0."
            )
        if (problem := unknown_shapes(self.shapes)) is not None:
            raise ConfigError(problem)
        if self.layout not in LAYOUTS:
            raise ConfigError(f"layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}")
        if self.compile_regions not in COMPILE_REGIONS:
            raise ConfigError(
                f"compile_regions must be one of {', '.join(COMPILE_REGIONS)}, got {self.compile_regions!r}"
            )
        if self.fp16 and self.bf16:
            raise ConfigError("fp16=True and bf16=True exclude each other. Set one.")

    def _multiple(self, given: int | str | None) -> int | None:
        text = str(given).strip().lower()
        if text in ("none", "null", ""):
            return None
        if text == "auto":
            return STATIC_SHAPE_MULTIPLE if capabilities(self.device).static_shapes else None
        if not text.isdigit() or int(text) < 1:
            raise ConfigError(f"pad_to_multiple_of must be a number from 1, 'none' or 'auto', got {given!r}")
        return int(text)


def unknown_shapes(shapes: Any) -> str | None:
    """What is wrong with a value of `shapes`, or None."""
    if isinstance(shapes, str):
        known = shapes in KNOWN_SHAPES
    else:
        known = bool(shapes) and all(str(length).isdigit() and int(length) > 0 for length in shapes)
    return None if known else f"shapes must be one of {', '.join(KNOWN_SHAPES)}, or row lengths; got {shapes!r}"


_said: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        logger.warning(message)
