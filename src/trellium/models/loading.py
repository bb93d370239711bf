"""Load a causal language model and its tokenizer by name: a folder, a Hub name, or the bundled model.

Only safetensors are read (a pickle can run any code when it is opened) and no code of a repository is run, unless asked. Weights are float32 unless
asked otherwise. What goes wrong with a name is a `ModelError` that says what was looked for and what to do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HUB_OFFLINE
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trellium.errors import ModelError
from trellium.models.bundled import BUNDLED_MODEL, bundled_model_folder

_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "consolidated*.bin")


def load_model(name_or_path: str | os.PathLike | None = None, **init_kwargs: Any) -> PreTrainedModel:
    """A causal language model, in training form on the CPU.

    Args:
        name_or_path: a folder, a Hub name, or None for the bundled model (also by the name `smollm2-135m-instruct`).
        init_kwargs: those of `from_pretrained`; `dtype` is float32, `trust_remote_code` False unless given.

    Raises:
        ModelError: nothing there, nothing that can be read, or only weights in pickles.
    """
    where = _resolve(name_or_path)
    options = {"dtype": "float32", "trust_remote_code": False, "use_safetensors": True, **init_kwargs}
    with _explained(where):
        return AutoModelForCausalLM.from_pretrained(where, **options)


def load_tokenizer(name_or_path: str | os.PathLike | None = None, **init_kwargs: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; arguments and errors as in `load_model`."""
    where = _resolve(name_or_path, weights=False)
    with _explained(where):
        return AutoTokenizer.from_pretrained(where, **{"trust_remote_code": False, **init_kwargs})


def _resolve(name_or_path: str | os.PathLike | None, *, weights: bool = True) -> str:
    name = "" if name_or_path is None else os.fspath(name_or_path)
    if name in ("", BUNDLED_MODEL):
        return str(bundled_model_folder())
    folder = Path(name).expanduser()
    if folder.is_dir():
        _check_folder(folder, weights=weights)
        return str(folder)
    if folder.is_file():
        raise ModelError(
            f"{name} is a file; a model is a folder with config.json and its safetensors. Give the folder."
        )
    if _looks_like_a_path(name):
        raise ModelError(
            f"there is no folder {name} (looked for {folder.absolute()}). Give a folder with a saved model, a Hub name like 'owner/model', or leave "
            f"the model out for the bundled {BUNDLED_MODEL}."
        )
    return name


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "~", os.sep)) or name.count("/") > 1 or (os.sep != "/" and os.sep in name)


def _check_folder(folder: Path, *, weights: bool) -> None:
    if not weights:
        return
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


@contextmanager
def _explained(where: str) -> Iterator[None]:
    """What transformers says of a name that cannot be loaded, in our terms."""
    try:
        yield
    except ModelError:
        raise
    except OSError as error:
        if Path(where).is_dir():
            raise ModelError(f"{where} cannot be loaded: {error}") from error
        offline = HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", "")
        why = (
            "HF_HUB_OFFLINE is set and it is not in the local cache. Unset that, download it first, or give a folder"
            if offline
            else "it is neither a folder here nor could it be had from the Hub. Check the name and the network, log in if it is private, or give a folder"
        )
        raise ModelError(
            f"model {where!r} was not found: {why}. Without a model the bundled {BUNDLED_MODEL} is used."
        ) from error
    except ValueError as error:
        text = str(error)
        if "trust_remote_code" in text:
            raise ModelError(
                f"{where} needs Python code of its own repository to be loaded. Read it, and if you trust it set trust_remote_code."
            ) from error
        raise ModelError(f"{where} cannot be loaded: {text}") from error
