"""What a training script is told beside its trainer's config, with TRL's names: which rows, which model, which adapter.

Plain dataclasses for `trellium.TrlParser`, which the `trellium` command reads its flags with too. Imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from trellium.errors import ConfigError
from trellium.trainers.known_options import KnownOptions, NotYet

if TYPE_CHECKING:
    from peft import LoraConfig

TASK_TYPES = ("CAUSAL_LM", "SEQ_CLS")
"""What an adapter is for: a language model, or a reward model, whose new `score` layer is then trained whole beside it."""

DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")
"""What weights can be loaded in; `auto` is what they were saved in."""

_UNQUANTIZED = "Quantized base models are not supported yet; dtype bfloat16 halves the weights."


@dataclass
class ScriptArguments(metaclass=KnownOptions):
    """Which rows."""

    not_yet: ClassVar[dict[str, NotYet]] = {
        "ignore_bias_buffers": NotYet(False, "It changes nothing here: leave it out."),
    }

    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "A .jsonl, .json, .csv, .parquet or .txt file, a folder of them, a Hub name, or python-docs: the docstrings of this Python."
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "The configuration of a Hub dataset."})
    dataset_train_split: str = field(
        default="train", metadata={"help": "The split to train on, or a part of one: train[:5000]."}
    )
    dataset_test_split: str = field(
        default="test", metadata={"help": "The split to evaluate on, where eval_strategy asks for it."}
    )
    dataset_streaming: bool = field(
        default=False,
        metadata={
            "help": "Read rows as they are trained: a Hub dataset while it downloads, a file while it is prepared. Needs max_steps."
        },
    )


@dataclass
class ModelConfig(metaclass=KnownOptions):
    """Which model, and which adapter.

    Raises:
        ConfigError: a `dtype` that weights cannot be loaded in, or a `lora_task_type` that is not trained here.
    """

    not_yet: ClassVar[dict[str, NotYet]] = {
        "load_in_8bit": NotYet(False, _UNQUANTIZED),
        "load_in_4bit": NotYet(False, _UNQUANTIZED),
        "bnb_4bit_quant_type": NotYet("nf4", _UNQUANTIZED),
        "use_bnb_nested_quant": NotYet(False, _UNQUANTIZED),
        "bnb_4bit_quant_storage": NotYet(None, _UNQUANTIZED),
    }

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "A folder, a Hub name, or unset for the bundled smollm2-135m-instruct."}
    )
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of a Hub model."})
    dtype: str | None = field(
        default="float32", metadata={"help": f"What the weights are loaded in: {', '.join(DTYPES)}."}
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "Attention of transformers: sdpa, eager, flex_attention…"}
    )
    use_peft: bool = field(default=False, metadata={"help": "Train a LoRA adapter instead of the model."})
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapter."})
    lora_alpha: int = field(default=32, metadata={"help": "Its scale is lora_alpha / lora_r."})
    lora_dropout: float = field(default=0.05, metadata={"help": "Dropout before the adapter."})
    lora_target_modules: list[str] | None = field(
        default=None,
        metadata={"help": "Modules that get one, or all-linear. Unset: PEFT's choice for the architecture."},
    )
    lora_target_parameters: list[str] | None = field(
        default=None, metadata={"help": "Parameters, e.g. of experts, that get one."}
    )
    lora_modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Modules trained whole beside the adapter."}
    )
    lora_task_type: str = field(
        default="CAUSAL_LM",
        metadata={"help": "CAUSAL_LM; for a reward model SEQ_CLS, which trains its score layer beside the adapter."},
    )
    use_rslora: bool = field(default=False, metadata={"help": "Scale by lora_alpha / sqrt(lora_r)."})
    use_dora: bool = field(default=False, metadata={"help": "Train magnitude and direction apart."})

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.lora_task_type not in TASK_TYPES:
            raise ConfigError(f"lora_task_type must be one of {', '.join(TASK_TYPES)}, got {self.lora_task_type!r}")


def get_peft_config(model_args: ModelConfig) -> LoraConfig | None:
    """The adapter that the options describe, or None without `use_peft`."""
    if not model_args.use_peft:
        return None
    from peft import LoraConfig

    targets: Any = model_args.lora_target_modules
    return LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=targets[0] if targets and len(targets) == 1 else targets,
        target_parameters=model_args.lora_target_parameters,
        modules_to_save=model_args.lora_modules_to_save,
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
    )
