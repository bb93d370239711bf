from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.forest.random_trees import prefixes, token_lists
from trellium.forest import trie as trie_module
from trellium.forest.trie import Trie, build_trie, group_codes, prefix_order


def arrays(lists: list[list[int]]) -> list[np.ndarray]:
    return [np.asarray(tokens, dtype=np.int64) for tokens in lists]


def ways(trie: Trie) -> list[list[int]]:
    return [trie.path[begin:end].tolist() for begin, end in zip(trie.start[:-1], trie.start[1:], strict=True)]


@pytest.mark.parametrize("compared", [1, 32])
@settings(max_examples=200, deadline=None)
@given(lists=token_lists(), data=st.data())
def test_every_distinct_prefix_is_one_token_and_every_sequence_can_be_read_back(compared, lists, data):
    groups = data.draw(st.lists(st.integers(0, 1), min_size=len(lists), max_size=len(lists)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trie_module, "_FIRST_TOKENS", compared)
        trie = build_trie(arrays(lists), np.asarray(groups, dtype=np.int64))
    assert len(trie) == len(prefixes(lists, groups)) == trie.prefixes.tokens
    seen: dict[int, tuple[int, ...]] = {}
    for tokens, group, way in zip(lists, groups, ways(trie), strict=True):
        assert trie.token[way].tolist() == tokens
        assert trie.depth[way].tolist() == list(range(len(tokens)))
        for end, place in enumerate(way):  # the same place in the trees says the same prefix of the same group
            assert seen.setdefault(place, (group, *tokens[: end + 1])) == (group, *tokens[: end + 1])


@settings(max_examples=200, deadline=None)
@given(lists=token_lists())
def test_the_mask_of_subtree_ends_is_the_mask_of_explicit_ancestors(lists):
    trie = build_trie(arrays(lists))
    ancestors = np.zeros((len(trie), len(trie)), dtype=bool)
    for way in ways(trie):
        for end, place in enumerate(way):
            ancestors[place, way[: end + 1]] = True
    query, key = np.arange(len(trie))[:, None], np.arange(len(trie))
    assert ((key <= query) & (query < trie.subtree_end) == ancestors).all()


@settings(max_examples=100, deadline=None)
@given(lists=token_lists())
def test_without_sharing_every_sequence_is_a_chain_of_its_own(lists):
    trie = build_trie(arrays(lists), share=False)
    assert trie.token.tolist() == [token for tokens in lists for token in tokens]
    assert trie.path.tolist() == list(range(len(trie)))
    assert trie.subtree_end.tolist() == [int(trie.start[i + 1]) for i, tokens in enumerate(lists) for _ in tokens]


@pytest.mark.parametrize(
    ("lists", "tokens", "ends"),
    [
        ([[5, 6], [5, 6]], [5, 6], [2, 2]),  # the same twice
        ([[5, 6, 7], [5]], [5, 6, 7], [3, 3, 3]),  # one inside another
        ([[], [5]], [5], [1]),  # an empty one
        ([[6, 1], [5, 1]], [5, 1, 6, 1], [2, 2, 4, 4]),  # the same text at the same place after another beginning
        ([[5, 6, 7], [5, 8], [5, 6, 9]], [5, 6, 7, 9, 8], [5, 4, 3, 4, 5]),
        ([[0, 0], [0]], [0, 0], [2, 2]),  # token 0 is a token, not an end
        ([[256], [1], [65536]], [1, 256, 65536], [1, 2, 3]),  # numbers, not bytes in the machine's order
    ],
)
def test_small_trees_lie_as_they_should(lists, tokens, ends):
    trie = build_trie(arrays(lists))
    assert trie.token.tolist() == tokens
    assert trie.subtree_end.tolist() == ends


def test_equal_text_of_different_keys_shares_nothing_and_keys_may_be_anything():
    codes = group_codes(["cat.png", None, "cat.png", ("lora", 1)])
    assert codes.tolist() == [0, 1, 0, 2]
    trie = build_trie(arrays([[5, 6]] * 4), codes)
    assert trie.token.tolist() == [5, 6] * 3
    assert ways(trie)[0] == ways(trie)[2]


def test_tokens_that_are_no_ids_and_groups_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match=r"token ids must lie in \[0, 2\*\*32\), got -100 to 5"):
        build_trie(arrays([[5, -100]]))
    with pytest.raises(ValueError, match=r"one number a sequence, \[2\], got \(1,\)"):
        prefix_order(arrays([[5], [6]]), np.zeros(1, dtype=np.int64))


@pytest.mark.parametrize("compared", [1, 2, 32])
@settings(max_examples=150, deadline=None)
@given(lists=token_lists(most=12), data=st.data())
def test_the_order_is_that_of_lists_and_equal_ones_stay_as_they_were_given(compared, lists, data):
    groups = data.draw(st.lists(st.integers(0, 1), min_size=len(lists), max_size=len(lists)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trie_module, "_FIRST_TOKENS", compared)
        patch.setattr(trie_module, "_CHECKED_TOKENS", compared)
        found = prefix_order(arrays(lists), np.asarray(groups, dtype=np.int64))
    assert found.order.tolist() == sorted(range(len(lists)), key=lambda which: (groups[which], lists[which]))


def test_the_order_leaves_the_tokens_where_they_are(monkeypatch):
    """Two thousand sequences of a thousand tokens, every four of them alike up to their 500th."""
    random = np.random.default_rng(0)
    flat = random.integers(0, 1000, (500, 4, 1000), dtype=np.int32)
    flat[:, :, :500] = flat[:, :1, :500]
    sequences = list(flat.reshape(2000, 1000))
    monkeypatch.setattr(trie_module, "_CHECKED_TOKENS", 10_000)
    tracemalloc.start()
    found = prefix_order(sequences)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (np.sort(found.shared)[-1500:] >= 500).all()
    assert peak < flat.nbytes / 4


def test_memory_is_linear_in_the_tokens_however_deep_sequences_nest():
    """Each sequence inside the next is the deepest stack there is."""
    lists = [np.arange(length) % 7 for length in range(1, 600)]
    tokens = sum(map(len, lists))
    tracemalloc.start()
    trie = build_trie(lists)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(trie) == 599
    assert peak < 60 * tokens
