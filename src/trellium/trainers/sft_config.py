"""The options of supervised fine-tuning, with TRL's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

from trellium.data.prepare import TRUNCATION_MODES
from trellium.errors import ConfigError
from trellium.forest.packing import Strategy
from trellium.trainers.base_config import BaseConfig

LOSS_TYPES = ("nll", "dft")
_DATASET_KWARGS = ("skip_prepare_dataset",)
PACKING_STRATEGIES = get_args(Strategy)


@dataclass
class SFTConfig(BaseConfig):
    """What `SFTTrainer` can be told. `BaseConfig` says which of TRL's options come later."""

    smooths_labels: ClassVar[bool] = True

    learning_rate: float = field(default=2e-5, metadata={"help": "The first learning rate of AdamW."})
    dataset_text_field: str = field(
        default="text", metadata={"help": "The column of a language-modelling dataset that holds the text."}
    )
    dataset_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "As JSON. The one key: skip_prepare_dataset, for rows that have input_ids and labels already."
        },
    )
    truncation_mode: str = field(
        default="keep_start", metadata={"help": "Which end of a longer row stays: keep_start or keep_end."}
    )
    shuffle_dataset: bool = field(default=False, metadata={"help": "Shuffle the prepared dataset once, with the seed."})
    packing: bool = field(
        default=False,
        metadata={"help": "Fill rows of max_length with several sequences each, which do not see each other."},
    )
    packing_strategy: str = field(
        default="bfd",
        metadata={
            "help": "bfd: whole sequences, best fit decreasing, what is longer is cut; bfd_split: what is longer becomes several; wrapped: one behind the "
            "other, cut where a row is full."
        },
    )
    packed_row_length: int | None = field(
        default=None,
        metadata={
            "help": "Tokens of a packed row, which no sequence of up to max_length needs to fill; unset: max_length. Twice as long and half as many a batch "
            "trains as many tokens, with less padding where many sequences are a little longer than half of max_length."
        },
    )
    eval_packing: bool | None = field(default=None, metadata={"help": "Pack the held-out rows. Unset: as packing."})
    padding_free: bool = field(
        default=False,
        metadata={"help": "Ask for batches without padding, which layout=auto gives wherever the model can read them."},
    )
    completion_only_loss: bool | None = field(
        default=None, metadata={"help": "Train completions only. Unset: yes for prompt-completion rows."}
    )
    assistant_only_loss: bool = field(
        default=False, metadata={"help": "Train only what the assistant says in conversations."}
    )
    loss_type: str = field(
        default="nll",
        metadata={"help": "nll, the negative log-likelihood; or dft, each token weighted by its own probability."},
    )

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*BaseConfig._VALID_DICT_FIELDS, "dataset_kwargs"]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_type == "chunked_nll":  # TRL's deprecated name of the same loss
            self.loss_type = "nll"
        if self.loss_type not in LOSS_TYPES:
            raise ConfigError(f"loss_type must be one of {', '.join(LOSS_TYPES)}, got {self.loss_type!r}")
        if self.truncation_mode not in TRUNCATION_MODES:
            raise ConfigError(
                f"truncation_mode must be one of {', '.join(TRUNCATION_MODES)}, got {self.truncation_mode!r}"
            )
        if not 0 <= self.label_smoothing_factor < 1:
            raise ConfigError(f"label_smoothing_factor must lie in [0, 1), got {self.label_smoothing_factor!r}")
        if self.label_smoothing_factor and self.loss_type == "dft":
            raise ConfigError(
                "label_smoothing_factor is of loss_type nll only; dft weighs tokens by their probability."
            )
        if self.packing_strategy not in PACKING_STRATEGIES:
            raise ConfigError(
                f"packing_strategy must be one of {', '.join(PACKING_STRATEGIES)}, got {self.packing_strategy!r}"
            )
        if (self.packing or self.eval_packing) and self.max_length is None:
            raise ConfigError("packing=True fills rows up to max_length, which is unset. Set max_length.")
        self._check_packed_row_length()
        if self.padding_free and self.layout == "padded":
            raise ConfigError("padding_free=True and layout='padded' exclude each other. Leave layout at 'auto'.")
        if isinstance(self.dataset_kwargs, str):
            raise ConfigError(f"dataset_kwargs must be a JSON object, got {self.dataset_kwargs!r}")
        unknown = sorted(set(self.dataset_kwargs or {}) - set(_DATASET_KWARGS))
        if unknown:
            raise ConfigError(
                f"dataset_kwargs has the one key {_DATASET_KWARGS[0]!r}, got {', '.join(map(repr, unknown))}"
            )

    def _check_packed_row_length(self) -> None:
        length = self.packed_row_length
        if length is None:
            return
        if not (self.packing or self.eval_packing):
            raise ConfigError(f"packed_row_length={length}, but rows are not packed. Set packing=True.")
        if self.packing_strategy == "wrapped":
            raise ConfigError(
                f"packed_row_length={length}, but a wrapped row is one sequence of max_length. Set packing_strategy=bfd or bfd_split."
            )
        if self.max_length is not None and length < self.max_length:
            raise ConfigError(
                f"packed_row_length={length} does not hold a sequence of max_length={self.max_length}. Set it to at least that, or leave it unset."
            )

    @property
    def packs_evaluation(self) -> bool:
        """Whether held-out rows are packed."""
        return self.packing if self.eval_packing is None else self.eval_packing

    @property
    def skip_prepare_dataset(self) -> bool:
        """Whether rows come with `input_ids` and `labels` and are taken as they are."""
        options = self.dataset_kwargs if isinstance(self.dataset_kwargs, dict) else {}
        return bool(options.get("skip_prepare_dataset", False))
