"""What rows with images ask of a trainer: inputs of its model, processes that allow for rows without any, and a word on what is compiled."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from trellium.data.images import STORED_IMAGES, ImageInputs, ImageProcessor
from trellium.errors import ConfigError
from trellium.models.images import ImageArguments, image_arguments

logger = logging.getLogger(__name__)


def have_images(*datasets: Any) -> bool:
    """Whether prepared rows, or those of a mapping of several datasets, have images."""
    parts = [part for each in datasets for part in (each.values() if isinstance(each, Mapping) else (each,))]
    return any(part is not None and STORED_IMAGES in (part.column_names or ()) for part in parts)


def inputs_of_images(model: nn.Module, processing: Any, args: Any) -> tuple[ImageArguments, ImageInputs]:
    """What a model takes of images, and what makes it of a batch's; `args` are made to fit.

    Args:
        model: a vision-language model.
        processing: its processor.
        args: the run's options.

    Raises:
        ConfigError: a model that reads no images.
    """
    takes = image_arguments(model)
    reentrant = (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")  # which cannot be with what follows
    if args.ddp_find_unused_parameters is None and not reentrant:
        args.ddp_find_unused_parameters = True  # a batch without an image gives what reads images no gradient
    return takes, ImageInputs(ImageProcessor(processing), takes.names, takes.types)


def check_later_rows(prepared: Any, name: str, reads_images: bool) -> None:
    """Hold rows that come after a trainer was made to what it was made for.

    Raises:
        ConfigError: the first rows with images.
    """
    if have_images(prepared) and not reads_images:
        raise ConfigError(
            f"{name}: the rows have images, and none of those that the trainer was made with had any. Give it such rows when it is made."
        )


def refuse_predictions() -> None:
    """Raises ConfigError: predictions are made by a second forward over the tokens, which has no images."""
    raise ConfigError(
        "compute_metrics and preprocess_logits_for_metrics read logits of rows without images, and these have some. "
        "Leave them out: the held-out loss, entropy and mean_token_accuracy are logged without them."
    )


def say_what_compiles(*, blocks: bool) -> None:
    """Tell what compiling does to what reads images, of which a batch has as many as its rows bring."""
    if blocks:
        logger.warning(
            "What reads images is not compiled: batches differ in how many they have. The blocks that read tokens are."
        )
    else:
        logger.warning(
            "Each number of images in a batch compiles anew what reads them. compile_regions='blocks' compiles what reads tokens alone."
        )
