"""What a trainer is given, and cannot take: refused when it is made, with the reason and the way out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from datasets import Dataset

from trellium.errors import ConfigError

FOREST_FIELDS = (
    "input_ids",
    "position_ids",
    "subtree_end",
    "edge_position",
    "edge_target",
    "edge_weight",
    "real_tokens",
)
"""What a batch must hold, and the model is called with: tensors of a `trellium.forest.batch.ForestBatch`."""

_REFUSED = {
    "compute_loss_func": "it works on full logits, which are never made here. Choose loss_type, or subclass the trainer and override compute_scored_loss",
    "quantization_config": "quantized base models are not supported yet. model_init_kwargs={'dtype': 'bfloat16'} halves the weights",
}
_RENAMED = {"tokenizer": "processing_class", "config": "args", "training_args": "args", "dataset": "train_dataset"}


def refuse_arguments(trainer: str, given: dict[str, Any], config_class: type) -> None:
    """Raise for the first argument that a trainer has no use for.

    Args:
        trainer: its class's name.
        given: arguments beside those it takes; None stands for one that was not given.
        config_class: the class of its `args`, where an option may belong.

    Raises:
        ConfigError: one of TRL's that is not possible here.
        TypeError: a name it does not have; says where it belongs.
    """
    for name, value in given.items():
        if name in _REFUSED:
            if value is not None:
                raise ConfigError(f"{name} cannot be given: {_REFUSED[name]}.")
            continue
        hint = ""
        if name in _RENAMED:
            hint = f" It is called {_RENAMED[name]!r}."
        elif name in {entry.name for entry in fields(config_class)}:
            hint = f" It is an option of {config_class.__name__}: give it there, as args={config_class.__name__}({name}=…)."
        raise TypeError(f"{trainer} has no argument {name!r}.{hint}")


def check_collator(collator: Callable[[list], Any], train_dataset: Any) -> None:
    """Hold a data collator to the batch that a trainer needs: it is tried on the first row, where there is one.

    Raises:
        ConfigError: it is not ours and makes another batch.
    """
    made_by = collator if hasattr(collator, "__name__") else type(collator)
    if made_by.__module__.partition(".")[0] in ("transformers", "trl"):
        raise ConfigError(_wants_forest(f"data_collator is {made_by.__name__} of {made_by.__module__}"))
    if isinstance(train_dataset, Dataset):
        check_batch(
            collator([{name: train_dataset[0][name] for name in ("input_ids", "labels") if name in train_dataset[0]}])
        )


def check_batch(batch: Any) -> None:
    """Raise a `ConfigError` unless a batch is one of a forest."""
    missing = [name for name in FOREST_FIELDS if not isinstance(batch, Mapping) or name not in batch]
    if missing:
        raise ConfigError(_wants_forest(f"the data collator's batch lacks {', '.join(missing)}"))


def forest_fields(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a batch that a model is called with, and what else it is given (`model_inputs`).

    Raises:
        ConfigError: it is not one of a forest.
    """
    check_batch(batch)
    return {name: batch[name] for name in FOREST_FIELDS} | dict(batch.get("model_inputs", {}))


def _wants_forest(what: str) -> str:
    return (
        f"{what}. It must return the tensors of a trellium.forest.batch.ForestBatch; leave data_collator out for the one that does, "
        "trellium.forest.collate.ForestCollator."
    )
