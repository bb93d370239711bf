"""Whether a checkpoint is whole, and whether it is one of the model that would go on from it.

Looks at the heads of files, not at their contents: a safetensors file tells the length it must have, a file of `torch.save` ends with its table of
contents, so one that was cut short is known in a millisecond whatever its size. What a checkpoint of DeepSpeed or FSDP holds is not looked at.
"""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from trellium.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

STATE = "trainer_state.json"
"""What is written last, and so makes a checkpoint whole."""

_ADAPTER = "adapter_model.safetensors"
_WAY_OUT = "Resume with the model and the adapter's options of that run, or start anew without resume_from_checkpoint."


def damage(folder: Path) -> str | None:
    """Why a run cannot go on from a checkpoint, as the rest of a sentence that begins with its name; None if it can."""
    return _damaged_state(folder) or (
        None
        if _is_sharded(folder)
        else _damaged_weights(folder) or _damaged_beside(folder) or _damaged_optimizer(folder)
    )


def check_same_model(folder: Path, model: nn.Module) -> None:
    """Hold a checkpoint to the model that would take up its weights.

    Raises:
        ConfigError: an adapter for a whole model or the reverse, an adapter of other modules or rank, or weights of other shapes.
    """
    if _is_sharded(folder):
        return
    adapted = hasattr(model, "peft_config")
    files = sorted(folder.glob(f"**/{_ADAPTER}")) if adapted else sorted(folder.glob("*.safetensors"))
    of_adapter = any(folder.glob(f"**/{_ADAPTER}"))
    if adapted != of_adapter:
        saved, now = ("an adapter", "the whole model") if of_adapter else ("the whole model", "an adapter")
        raise ConfigError(
            f"{folder} is of a run that trained {saved}, and this one trains {now}. "
            "Resume with the options of that run (use_peft, peft_config), or start anew without resume_from_checkpoint."
        )
    _check_architecture(folder, model)
    if len(files) > 1 and adapted:
        return  # several adapters, each in a folder of its own
    saved_shapes = {name: shape for file in files for name, shape in tensor_shapes(file).items()}
    shapes = _adapter_shapes(model) if adapted else {name: tuple(one.shape) for name, one in model.state_dict().items()}
    _compare(folder, saved_shapes, shapes, all_of_them=adapted)


def missing_tensors(folder: Path, model: nn.Module) -> list[str]:
    """Tensors of a whole model that its checkpoint does not have under their own names, not counting those tied to one that it has."""
    saved = {name for file in folder.glob("*.safetensors") for name in tensor_shapes(file)}
    state = model.state_dict()
    there = {state[name].data_ptr() for name in saved if name in state}
    return sorted(name for name, tensor in state.items() if name not in saved and tensor.data_ptr() not in there)


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a safetensors file, by name.

    Raises:
        ValueError: cut short, or no such file.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > size - 8:
            raise ValueError("cut short")
        head = json.loads(stream.read(length))
    head.pop("__metadata__", None)
    if max((entry["data_offsets"][1] for entry in head.values()), default=0) + 8 + length != size:
        raise ValueError("cut short")
    return {name: tuple(entry["shape"]) for name, entry in head.items()}


def _is_sharded(folder: Path) -> bool:
    """Whether a parallel run wrote it in a layout of its own."""
    return any(
        any(folder.glob(pattern)) for pattern in ("global_step*", "pytorch_model_fsdp*", "optimizer_*", "rank*-of-*")
    )


def _damaged_state(folder: Path) -> str | None:
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"has no {STATE}, which is written last: it was cut short"
    except (OSError, ValueError) as error:
        return f"has a {STATE} that cannot be read ({error})"
    return (
        None
        if isinstance(state, dict) and isinstance(state.get("global_step"), int)
        else f"has a {STATE} without its step"
    )


def _damaged_weights(folder: Path) -> str | None:
    files = sorted([*folder.glob("*.safetensors"), *folder.glob(f"*/{_ADAPTER}")])
    for index in folder.glob("*.safetensors.index.json"):
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError) as error:
            return f"has a {index.name} that cannot be read ({error})"
        if lacking := sorted(named - {file.name for file in files}):
            return f"lacks {lacking[0]} of its weights"
    if not files:
        return "has no weights (*.safetensors)"
    return next(
        (f"has damaged weights: {file.name} {what}" for file in files if (what := _damaged_tensors(file))), None
    )


def _damaged_beside(folder: Path) -> str | None:
    """What is kept beside the weights, in a folder each: a reference that moved, a moving average."""
    files = ((file, _damaged_tensors(file)) for file in sorted(folder.glob("*/*.safetensors")))
    return next(
        (f"has a damaged {file.relative_to(folder).as_posix()}: it {what}" for file, what in files if what), None
    )


def _damaged_tensors(file: Path) -> str | None:
    try:
        tensor_shapes(file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"is not a whole safetensors file ({error})"
    return None


def _damaged_optimizer(folder: Path) -> str | None:
    for name in ("optimizer.pt", "scheduler.pt"):
        if not (folder / name).is_file():
            return f"has no {name}, as save_only_model leaves them: a run cannot go on from weights alone"
    for file in sorted([*folder.glob("*.pt"), *folder.glob("*.pth")]):
        if not zipfile.is_zipfile(file):
            return f"has a damaged {file.name}"
    return None


def _check_architecture(folder: Path, model: nn.Module) -> None:
    file = folder / "config.json"  # an adapter's checkpoint has none
    config = getattr(model, "config", None)
    if config is None or not file.is_file():
        return
    saved = json.loads(file.read_text(encoding="utf-8")).get("model_type")
    if saved != config.model_type:
        raise ConfigError(f"{folder} is not of this model: it is a {saved}, this is a {config.model_type}. {_WAY_OUT}")


def _adapter_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    from peft import get_peft_model_state_dict

    return {
        name: tuple(one.shape) for name, one in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }


def _compare(
    folder: Path, saved: dict[str, tuple[int, ...]], shapes: dict[str, tuple[int, ...]], *, all_of_them: bool
) -> None:
    other = next((name for name in shapes if name in saved and saved[name] != shapes[name]), None)
    lacking = sorted(shapes.keys() - saved.keys()) if all_of_them or not shapes.keys() & saved.keys() else []
    if other is not None:
        what = f"{other} is {list(saved[other])} there and {list(shapes[other])} here"
    elif lacking:
        what = f"it has nothing for {lacking[0]}{f' and {len(lacking) - 1} more' if len(lacking) > 1 else ''}"
    else:
        return
    raise ConfigError(f"{folder} is not of this model: {what}. {_WAY_OUT}")
