"""Load a language model, which may read images, and its tokenizer or processor by name: a folder, a Hub name, or the bundled model.

Only safetensors are read (a pickle can run any code when it is opened) and no code of a repository is run, unless asked. Weights are float32 unless
asked otherwise. What goes wrong with a name is a `ModelError` that says what was looked for and what to do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HUB_OFFLINE
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from trellium.errors import ConfigError, ModelError
from trellium.models.bundled import bundled_model_folder
from trellium.models.places import BUNDLED_MODEL, model_place


def load_model(name_or_path: str | os.PathLike | None = None, **init_kwargs: Any) -> PreTrainedModel:
    """A causal language model, or the vision-language model that a configuration names, in training form on the CPU.

    Args:
        name_or_path: a folder, a Hub name, or None for the bundled model (also by the name `smollm2-135m-instruct`).
        init_kwargs: those of `from_pretrained`; `dtype` is float32, `trust_remote_code` False unless given.

    Raises:
        ModelError: nothing there, nothing that can be read, only weights in pickles, or weights without a tensor that the model needs.
    """
    where = _resolve(name_or_path)
    return load_with(
        AutoModelForImageTextToText if _reads_images(where, init_kwargs) else AutoModelForCausalLM,
        name_or_path,
        **init_kwargs,
    )


def _reads_images(where: str, init_kwargs: dict[str, Any]) -> bool:
    """Whether the configuration at a place is one of a vision-language model, and its weights are of the whole."""
    options = {key: init_kwargs[key] for key in ("trust_remote_code", "revision", "token") if key in init_kwargs}
    with _explained(where):
        config = AutoConfig.from_pretrained(where, **{"trust_remote_code": False, **options})
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    classes = whole if isinstance(whole, tuple) else (whole,)
    return bool(set(config.architectures or ()) & {each.__name__ for each in classes if each is not None})


def load_with(
    auto_class: Any, name_or_path: str | os.PathLike | None, *, new: str | None = None, **init_kwargs: Any
) -> PreTrainedModel:
    """A model of one of transformers' auto classes; otherwise as `load_model`.

    Args:
        new: how the names of tensors begin that need not be in the weights, and are then drawn anew.
    """
    where = _resolve(name_or_path)
    options = {"dtype": "float32", "trust_remote_code": False, "use_safetensors": True, **init_kwargs}
    _check_dtype(options["dtype"])
    with _explained(where):
        # Sizes are compared below, by name; transformers prints a report and raises without any.
        asked = {**options, "ignore_mismatched_sizes": True, "output_loading_info": True}
        model, found = auto_class.from_pretrained(where, **asked)
    found["missing_keys"] = [name for name in found["missing_keys"] if new is None or not name.startswith(new)]
    _check_complete(where, model, found, other_sizes=bool(init_kwargs.get("ignore_mismatched_sizes")))
    return model


def _check_complete(where: str, model: PreTrainedModel, found: dict[str, Any], *, other_sizes: bool) -> None:
    """Raise unless every tensor of a model was in its weights, in its size where `other_sizes` does not allow for others."""
    missing = sorted(found["missing_keys"])
    if missing:
        raise ModelError(
            f"{where} has no weights for {len(missing)} of the tensors of {type(model).__name__}: {', '.join(missing[:4])}{' …' if len(missing) > 4 else ''}. "
            "They would be trained from random numbers. Was the download or the copy cut short, or is it another kind of model?"
        )
    different = sorted(found["mismatched_keys"])
    if different and not other_sizes:
        name, there, here = different[0]
        raise ModelError(
            f"{where} has weights of other sizes than its configuration says: {name} is {list(there)} in the file and {list(here)} in the model. "
            "Its config.json is of another model, or was changed."
        )


def _check_dtype(dtype: Any) -> None:
    known = dtype in (None, "auto") or isinstance(
        getattr(torch, dtype, None) if isinstance(dtype, str) else dtype, torch.dtype
    )
    if not known:
        raise ConfigError(f"dtype must be one of torch's, such as 'float32' or 'bfloat16', or 'auto', got {dtype!r}")


def load_tokenizer(name_or_path: str | os.PathLike | None = None, **init_kwargs: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; arguments and errors as in `load_model`."""
    where = _resolve(name_or_path, weights=False)
    with _explained(where):
        return AutoTokenizer.from_pretrained(where, **{"trust_remote_code": False, **init_kwargs})


def load_processing(name_or_path: str | os.PathLike | None = None, **init_kwargs: Any) -> Any:
    """What makes a model's inputs: the processor of one that reads images, else its tokenizer; arguments and errors as in `load_model`."""
    where = _resolve(name_or_path, weights=False)
    alone = Path(where).is_dir() and not (Path(where) / "config.json").is_file()  # a tokenizer without a model
    if alone or not _reads_images(where, init_kwargs):
        return load_tokenizer(name_or_path, **init_kwargs)
    with _explained(where):
        return AutoProcessor.from_pretrained(where, **{"trust_remote_code": False, **init_kwargs})


def _resolve(name_or_path: str | os.PathLike | None, *, weights: bool = True) -> str:
    return model_place(name_or_path, weights=weights) or str(bundled_model_folder())


@contextmanager
def _explained(where: str) -> Iterator[None]:
    """What transformers says of a name that cannot be loaded, in our terms."""
    try:
        yield
    except ModelError:
        raise
    except OSError as error:
        if Path(where).is_dir():
            raise ModelError(f"{where} cannot be loaded: {' '.join(str(error).split())}") from error
        offline = HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", "")
        why = (
            "HF_HUB_OFFLINE is set and it is not in the local cache. Unset that, download it first, or give a folder"
            if offline
            else "it is neither a folder here nor could it be had from the Hub. Check the name and the network, log in if it is private, or give a folder"
        )
        raise ModelError(
            f"model {where!r} was not found: {why}. Without a model the bundled {BUNDLED_MODEL} is used."
        ) from error
    except ImportError as error:  # an attention or a tokenizer whose package is missing
        raise ModelError(f"{where} cannot be loaded: {' '.join(str(error).split())}") from error
    except SafetensorError as error:
        raise ModelError(f"{where} has damaged weights ({error}). Was the download or the copy cut short?") from error
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise ModelError(f"{where} cannot be loaded with these model_init_kwargs: {error}") from error
    except ValueError as error:
        text = " ".join(str(error).split())
        if "trust_remote_code" in text:
            raise ModelError(
                f"{where} needs Python code of its own repository to be loaded. Read it, and if you trust it set trust_remote_code."
            ) from error
        raise ModelError(f"{where} cannot be loaded: {text}") from error
