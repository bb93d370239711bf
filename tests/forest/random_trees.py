"""Random sequences that share prefixes, and what the forest must say of them, in the plainest way."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from trellium.data.sequence import Sequence

TOKENS = st.lists(st.integers(0, 2), max_size=7)


@st.composite
def token_lists(draw, *, smallest: int = 0, most: int = 8) -> list[list[int]]:
    """Sequences over three tokens: they share by themselves. Some go on from an earlier one, cut anywhere, or are one again."""
    made: list[list[int]] = []
    for _ in range(draw(st.integers(min(smallest, 1), most))):
        tail = draw(TOKENS)
        if made and draw(st.booleans()):
            earlier = draw(st.sampled_from(made))
            tail = earlier[: draw(st.integers(0, len(earlier)))] + tail
        made.append(tail if len(tail) >= smallest else [*tail, draw(st.integers(0, 2))])
    return made


@st.composite
def sequences(draw, *, most: int = 8) -> list[Sequence]:
    """The same as sequences of at least one token, some tokens trained, with weights."""
    lists = draw(token_lists(smallest=1, most=most))
    made = []
    for tokens in lists:
        trained = draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
        trained[0] = False
        weight = draw(st.sampled_from([1.0, 0.5, -2.0]))
        made.append(Sequence(np.asarray(tokens, dtype=np.int64), np.asarray(trained), weight))
    return made


def prefixes(lists: list[list[int]], groups: list[int]) -> set[tuple[int, ...]]:
    """The nodes of the trees: every distinct (group, prefix)."""
    return {
        (group, *tokens[: end + 1]) for tokens, group in zip(lists, groups, strict=True) for end in range(len(tokens))
    }
