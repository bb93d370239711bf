"""How many positions a model has a place for, where it keeps them in a table rather than computing them."""

from __future__ import annotations

import re

from torch import nn

_TABLE = re.compile(
    r"(^|\.)(wpe|wpos|embed_positions?|position_embeddings?|positions?_embed\w*|positional_embeddings?|pos_emb\w*)$"
)


def learned_positions(model: nn.Module) -> int | None:
    """The longest row that a language model's table of positions has a place for, in tokens; None where there is no table.

    A table is known by the names that transformers' models give them (`wpe` of GPT-2, `embed_positions` of OPT, the buffer of GPT-J) and by having as
    many places as the text's configuration says, which a picture's table has not. A row beyond it would end as an index out of range, in the middle of
    a run.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)  # type: ignore[union-attr]
    places = [
        module.num_embeddings - int(getattr(module, "offset", 0))
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and _TABLE.search(name)
    ]
    places += [buffer.shape[0] for name, buffer in model.named_buffers() if name.endswith("embed_positions")]
    return limit if limit in places else None
