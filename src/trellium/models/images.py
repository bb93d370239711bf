"""Which inputs a vision-language model takes beside its text, and what they ask of a batch's layout.

Read from the signature of the module below the head: whatever it takes that is not of text may be given to a scoring call. Where features of images
take the place of placeholder tokens and nothing else, images are no different from words, and rows of trees are exact; so they are where a model only
places an image's tokens otherwise (`trellium.models.image_positions`). Another model that must be told which tokens are of images gives these an
attention of their own, which it can only make for one sequence a row.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from trellium.errors import ConfigError

_OF_TEXT = frozenset(
    [
        "input_ids",
        "attention_mask",
        "position_ids",
        "cache",
        "past_key_values",
        "cache_position",
        "inputs_embeds",
        "use_cache",
        "labels",
        "logits_to_keep",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "mm_encoder_outputs",
        "vision_feature_layer",
        "vision_feature_select_strategy",
        "args",
        "kwargs",
    ]
)
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
"""What models call the kinds of tokens: of text 0, of images 1."""


@dataclass(frozen=True, slots=True)
class ImageArguments:
    """What a model is given of images.

    Attributes:
        names: of the tensors it takes beside text and kinds of tokens.
        types: its name for the kinds of tokens; empty where it does not ask.
        in_trees: whether rows of trees are exact.
    """

    names: tuple[str, ...]
    types: str
    in_trees: bool

    @property
    def one_row_because(self) -> str:
        """Why sequences with images need rows of their own; empty where they do not."""
        return "" if self.in_trees else f"it gives the tokens of images an attention of their own ({self.types})"


def inputs_beside_text(backbone: nn.Module) -> tuple[str, ...]:
    """What the module below a head takes that is not of text."""
    return tuple(sorted(inspect.signature(type(backbone).forward).parameters.keys() - _OF_TEXT - {"self"}))


def image_arguments(model: nn.Module) -> ImageArguments:
    """What a vision-language model is given of images.

    Args:
        model: one that can be called for scores, or an adapter around one.

    Raises:
        ConfigError: a model without a place for images, or one that reads them by cross attention.
    """
    base = _base(model)
    names = base._inputs_beside_text
    if "pixel_values" not in names or "cross_attention_mask" in names:
        why = "reads them by cross attention, which is not supported" if "pixel_values" in names else "takes none"
        raise ConfigError(
            f"the rows have images, but {type(base).__name__} {why}. Give a vision-language model that puts them in the place of tokens, or leave the "
            "images out with dataset.remove_columns([...])."
        )
    types = next((name for name in TOKEN_TYPES if name in names), "")
    own = tuple(name for name in names if name not in TOKEN_TYPES)
    return ImageArguments(own, types, in_trees=not types or base._places_images)


def text_model(model: nn.Module) -> nn.Module:
    """The part of a model that reads tokens: below a vision-language model's head its decoder; any other model itself."""
    base = _base(model)
    return base.get_decoder() if "pixel_values" in getattr(base, "_inputs_beside_text", ()) else model


def _base(model: nn.Module) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model
