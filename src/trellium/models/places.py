"""Whether a model's name can be one, before anything that could load it is imported."""

from __future__ import annotations

import os
from pathlib import Path

from trellium.errors import ModelError

BUNDLED_MODEL = "smollm2-135m-instruct"
"""The name of the model that needs no network; also what is used where no model is named."""

_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "consolidated*.bin")


def model_place(name_or_path: str | os.PathLike | None, *, weights: bool = True) -> str:
    """A model's folder or its name on the Hub; empty for the bundled model, which is somewhere else on every machine.

    Args:
        name_or_path: what the user calls it.
        weights: whether a folder must hold a configuration and weights.

    Raises:
        ModelError: a path at which there is nothing, or nothing that can be loaded.
    """
    name = "" if name_or_path is None else os.fspath(name_or_path)
    if name in ("", BUNDLED_MODEL):
        return ""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if weights:
            _check_folder(folder)
        return str(folder)
    if folder.is_file():
        raise ModelError(
            f"{name} is a file; a model is a folder with config.json and its safetensors. Give the folder."
        )
    if name.startswith((".", "~", os.sep)) or name.count("/") > 1 or (os.sep != "/" and os.sep in name):
        raise ModelError(
            f"there is no folder {name} (looked for {folder.absolute()}). Give a folder with a saved model, a Hub name like 'owner/model', or leave "
            f"the model out for the bundled {BUNDLED_MODEL}."
        )
    return name


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise ModelError(
                f"{folder} is an adapter, not a model. Load both with peft.AutoPeftModelForCausalLM.from_pretrained(…, is_trainable=True) and "
                "give the trainer the result."
            )
        checkpoints = sorted(path.name for path in folder.glob("checkpoint-*") if (path / "config.json").is_file())
        hint = f" It has the checkpoints {', '.join(checkpoints)}: give one of them." if checkpoints else ""
        raise ModelError(f"{folder} has no config.json, so it is not a saved model.{hint}")
    if not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        if pickles:
            raise ModelError(
                f"{folder} has its weights in a pickle ({pickles[0]}), which can run any code when it is opened, and none in safetensors. "
                "If you trust it, convert it once: AutoModelForCausalLM.from_pretrained(folder, use_safetensors=False).save_pretrained(other)."
            )
        raise ModelError(
            f"{folder} has a config.json but no *.safetensors, so no weights. Was the download or the copy cut short?"
        )
