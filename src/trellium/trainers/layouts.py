"""Which layout a run's batches have: what was asked for, and what its model can read.

Sequences that begin alike share those tokens wherever that is exact; else they lie one behind the other; a model whose layers cannot tell them apart
gets one a row. What is less than sharing is said, with the reason.
"""

from __future__ import annotations

import logging
from typing import get_args

from torch import nn

from trellium.errors import ConfigError
from trellium.forest.collate import Layout
from trellium.models.attention import let_read_forests
from trellium.models.images import ImageArguments

logger = logging.getLogger(__name__)

LAYOUTS = ("auto", *get_args(Layout))


def layout_of(
    model: nn.Module, asked: str, *, packed_rows: bool = False, images: ImageArguments | None = None
) -> Layout:
    """The layout of batches for `model`, which is changed to read it.

    Args:
        model: the language model, before it is wrapped or compiled.
        asked: `auto` for the best that is exact, or a layout.
        packed_rows: whether rows of the dataset hold several sequences each.
        images: what the model is given of images, where rows have any.

    Raises:
        ConfigError: the model cannot have what was asked for; says why.
    """
    if images is not None and images.one_row_because and asked != "padded":
        return _padded_for_images(model, asked, images)
    if asked == "padded":
        if packed_rows:
            raise ConfigError(
                "packing=True, but layout='padded' gives every sequence a row of its own. Set layout='auto'."
            )
        return "padded"
    support = let_read_forests(model)
    name = type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__
    if support.reading == "chains":
        if packed_rows or asked != "auto":
            what = "packing=True" if packed_rows else f"layout={asked!r}"
            raise ConfigError(
                f"{what}, but {name} reads one sequence a row: {support.reason}. Set packing=False and layout='auto'."
            )
        return "padded"
    if asked == "shared" and not support.shares:
        raise ConfigError(
            f"layout='shared', but sequences of {name} cannot share tokens exactly: {support.reason}. Set layout='packed'."
        )
    return "shared" if support.shares and asked != "packed" else "packed"


def _padded_for_images(model: nn.Module, asked: str, images: ImageArguments) -> Layout:
    name = type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__
    why = f"with images {name} reads one sequence a row: {images.one_row_because}"
    if asked != "auto":
        raise ConfigError(f"layout={asked!r}, but {why}. Set layout='auto'.")
    logger.warning("%s, so batches are padded.", why[0].upper() + why[1:])
    return "padded"
