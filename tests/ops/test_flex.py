"""FlexAttention over a forest, on the CPU: which blocks it looks into; the compiled forward, and the derivative of its unfused form, against the mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as torch_flex

from tests.ops.forests import Forest, chain_tree, forests, grow
from tests.ops.test_attention import assert_same, dense_attention, inputs, output_and_gradients
from trellium.ops.attention import flex, forest_attention, forest_mask

OPTIONS = [{}, {"window": 7}, {"softcap": 3.0}, {"scale": 0.3, "window": 40, "softcap": 5.0}]


def branching() -> Forest:
    """Two rows of 150 tokens, no multiple of a block: a tree of long branches and a short root; and a chain before short sequences."""
    return grow(
        chain_tree((0, 20), (20, 30), (50, 8), (50, 12), (20, 40), (0, 40)),
        chain_tree((0, 90), *[(0, 10)] * 6),
    )


def by_flex(query, key, value, forest, *, kernel=torch_flex.flex_attention, scale=None, **bends):
    bends = {"window": None, "softcap": None, "sinks": None, **bends}
    scale = query.shape[3] ** -0.5 if scale is None else scale
    return flex.attend(query, key, value, forest.subtree_end, forest.position_ids, scale=scale, kernel=kernel, **bends)


@settings(max_examples=150, deadline=None)
@given(forest=forests(max_length=40), window=st.none() | st.integers(1, 12), size=st.sampled_from([1, 3, 8, 64]))
def test_no_block_is_left_out_that_a_query_sees_and_none_let_through_that_it_does_not(forest, window, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "BLOCK", size)
        some, every = flex.blocks(forest.subtree_end, forest.position_ids, window)
        table = flex.block_mask(forest.subtree_end, forest.position_ids, window)
    mask = forest_mask(forest.subtree_end, forest.position_ids, window)[:, 0]
    missing = -mask.shape[1] % size
    padded = torch.nn.functional.pad(mask, (0, missing, 0, missing))
    count = padded.shape[1] // size
    cells = padded.view(-1, count, size, count, size)
    any_seen, all_seen = cells.amax((2, 4)), cells.amin((2, 4))
    assert not (any_seen & ~some).any()
    assert not (every & ~all_seen).any()
    assert torch.equal(table.to_dense()[:, 0].bool(), some)
    if window is None:
        assert torch.equal(some, any_seen)
        assert torch.equal(every, all_seen & ~torch.eye(count, dtype=torch.bool))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_unfused_form_gives_the_output_and_the_gradients_of_the_mask(monkeypatch, options, sinks):
    monkeypatch.setattr(
        torch_flex, "_validate_device", lambda *_: None
    )  # which refuses gradients on the CPU, where no kernel has them
    forest = branching()
    tensors = inputs(forest, sinks=sinks)
    found = output_and_gradients(by_flex, tensors, forest, **options)
    assert_same(found, output_and_gradients(dense_attention, tensors, forest, **options), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_the_compiled_kernel_gives_the_output_of_the_mask(options):
    forest = branching()
    with torch.no_grad():
        query, key, value = (one.detach() for one in inputs(forest, dtype=torch.float32, width=16))
        found = by_flex(query, key, value, forest, kernel=torch.compile(torch_flex.flex_attention), **options)
        expected = dense_attention(query, key, value, forest, **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_layers_of_a_batch_share_its_blocks_and_another_batch_in_its_memory_has_its_own():
    last = flex._Last()
    both = torch.stack([branching().subtree_end, branching().position_ids], dim=1)
    first = last.of(both[:, 0], both[:, 1], None)
    assert last.of(both[:, 0], both[:, 1], None) is first
    assert last.of(both[:, 0], both[:, 1], 5) is not first
    assert last.of(both[:, 0], both[:, 1], None) is first
    both[:, 0] = torch.arange(1, both.shape[2] + 1)  # nobody sees but itself
    assert last.of(both[:, 0], both[:, 1], None) is not first
    with torch.inference_mode():
        given = both.clone()
        assert last.of(given[:, 0], given[:, 1], None) is not last.of(given[:, 0], given[:, 1], None)


def test_it_is_asked_where_it_has_a_backward_only(monkeypatch):
    meta = [torch.empty(1, heads, 8, 16, device="meta") for heads in (4, 2, 2)]
    assert not flex.takes(*meta)
    assert not flex.takes(*(one.to("cpu") for one in inputs(grow([0, 1]), width=16, dtype=torch.float32)))
    asked = []
    monkeypatch.setattr(flex, "takes", lambda *_: True)
    monkeypatch.setattr(flex, "attend", lambda *tensors, **bends: asked.append(bends))
    forest = grow([0, 1, 1])
    forest_attention(*inputs(forest), forest.subtree_end, forest.position_ids, softcap=2.0)
    assert asked == [{"scale": 8**-0.5, "window": None, "softcap": 2.0, "sinks": None}]
