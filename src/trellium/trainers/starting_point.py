"""What a run starts from: the model, its tokenizer, and what a row may hold."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from trellium.data.images import tokenizer_in
from trellium.data.token_checks import TokenLimits
from trellium.errors import ConfigError, ModelError
from trellium.models.loading import load_model, load_processing, load_tokenizer
from trellium.models.positions import learned_positions
from trellium.trainers.adapters import is_adapted
from trellium.trainers.base_config import BaseConfig


def model_of(model: Any, args: BaseConfig, load: Callable[..., nn.Module] = load_model) -> nn.Module:
    """The model itself, loaded by `load` if it is given by name or path.

    Raises:
        ConfigError, ModelError: options for a model that is loaded already, or no model.
    """
    options = args.model_options
    if isinstance(model, nn.Module):
        if options:
            raise ConfigError(
                "model_init_kwargs are for a model given by name; this one is loaded already. Load it with them, or give its name."
            )
        return model
    if model is None or isinstance(model, str | os.PathLike):
        return load(model, **{"trust_remote_code": args.trust_remote_code, **options})
    raise ModelError(f"model must be a name, a path or a model, got {type(model).__name__}")


def processing_of(model: Any, args: BaseConfig) -> Any:
    """The tokenizer that the model came with, or the processor of one that reads images.

    Raises:
        ConfigError: the model does not say where it came from.
    """
    name = name_of(model)
    if not name and isinstance(model, nn.Module):
        raise ConfigError(
            "the model does not say where it came from, so its tokenizer (or processor) is not known. Give it as processing_class."
        )
    options = {key: value for key, value in args.model_options.items() if key in ("revision", "token")}
    return load_processing(name or None, trust_remote_code=args.trust_remote_code, **options)


def set_special_tokens(tokenizer: PreTrainedTokenizerBase, args: BaseConfig) -> None:
    """Give a tokenizer the end and padding tokens that the options name.

    Raises:
        ConfigError: one is not in its vocabulary.
    """
    for field in ("eos_token", "pad_token"):
        token = getattr(args, field, None)
        if token is None:
            continue
        if token not in tokenizer.get_vocab():
            raise ConfigError(
                f"{field}={token!r} is not in the tokenizer's vocabulary. Name one of its tokens, or leave it unset."
            )
        setattr(tokenizer, field, token)


def set_chat_template(processing: Any, args: BaseConfig) -> None:
    """Give a tokenizer, or a processor and its tokenizer, the chat template that `chat_template_path` names: a .jinja or .j2 file, or another model's.

    Raises:
        ConfigError: no such file; no template there; one that writes special tokens which the tokenizer does not have, so the model has no embeddings of them.
    """
    path = args.chat_template_path
    if path is None:
        return
    tokenizer = tokenizer_in(processing)
    if path.endswith((".jinja", ".j2")):
        if not os.path.isfile(path):
            raise ConfigError(f"chat_template_path: there is no file {path}")
        tokenizer.chat_template = processing.chat_template = Path(path).read_text(encoding="utf-8")
        return
    other = load_tokenizer(path, trust_remote_code=args.trust_remote_code)
    if not other.chat_template:
        raise ConfigError(f"chat_template_path: the tokenizer of {path} has no chat template")
    vocabulary = tokenizer.get_vocab()
    written = {str(token) for token in other.added_tokens_decoder.values() if str(token) in str(other.chat_template)}
    if missing := sorted(written - set(vocabulary)):
        raise ConfigError(
            f"chat_template_path: the template of {path} writes {', '.join(missing)}, which this tokenizer does not have. Add them to the tokenizer and the "
            "model (add_special_tokens, resize_token_embeddings) and give both, or take a template that the model knows."
        )
    tokenizer.chat_template = processing.chat_template = other.chat_template


def token_limits(model: nn.Module, args: BaseConfig) -> TokenLimits:
    """What a row may hold: tokens with an embedding, and no more of them, padding included, than there are positions.

    Raises:
        ConfigError: rows are padded beyond the table of positions.
    """
    positions, multiple = learned_positions(model), args.row_multiple or 1
    if positions is not None and positions < multiple:
        raise ConfigError(
            f"rows are padded to a multiple of {multiple}, but the model has a table of {positions} positions. Set pad_to_multiple_of to a smaller number."
        )
    reach = None if positions is None else positions // multiple * multiple
    return TokenLimits(model.get_input_embeddings().weight.shape[0], reach)


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token to pad with."""
    # Padding is known by its place, never by its token, so any token will do and none is made the tokenizer's for it.
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return token_id
    return 0


def name_of(model: Any) -> str:
    """The name or path a model was given by or loaded from; empty if it was made in the program."""
    if not isinstance(model, nn.Module):
        return "" if model is None else str(model)
    base = model.get_base_model() if is_adapted(model) else model
    return getattr(getattr(base, "config", None), "_name_or_path", "") or ""
