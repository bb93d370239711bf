"""The mask by hand; the cascade against the mask on random forests; what the plan computes; one node a direction in a compiled graph."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.forests import chain_tree, forests, grow
from trellium.monitor import max_compiles
from trellium.ops.attention import forest_attention, forest_mask, rows_are_chains
from trellium.ops.attention import plan as planning

DEVICES = ["cpu", pytest.param("neuron", marks=pytest.mark.skipif(not hasattr(torch, "neuron"), reason="no device"))]


# One row: tree 0-{1-2, 3} (token 0 with two branches, the first of two tokens), then a chain 4-5.
ENDS = torch.tensor([[4, 3, 3, 4, 6, 6]])
POSITIONS = torch.tensor([[0, 1, 2, 1, 0, 1]])


def test_a_token_sees_itself_and_its_ancestors_only():
    seen = [row.nonzero()[:, 0].tolist() for row in forest_mask(ENDS, POSITIONS)[0, 0]]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 3], [4], [4, 5]]


def test_a_window_counts_depth_not_distance_in_the_row():
    seen = [row.nonzero()[:, 0].tolist() for row in forest_mask(ENDS, POSITIONS, window=2)[0, 0]]
    assert seen == [[0], [0, 1], [1, 2], [0, 3], [4], [4, 5]]  # 3 sees 0: one step up, three places back


def test_the_mask_of_one_chain_is_causal():
    ends = torch.full((2, 5), 5)
    expected = torch.ones(5, 5, dtype=torch.bool).tril()
    assert (forest_mask(ends, torch.arange(5).expand(2, 5)) == expected).all()


def test_rows_are_chains_only_if_one_sequence_stands_at_the_left():
    assert rows_are_chains(torch.tensor([[3, 3, 3, 5, 5], [5, 5, 5, 5, 5], [1, 5, 5, 5, 5]]))
    assert not rows_are_chains(torch.tensor([[2, 2, 4, 4, 5]]))  # three chains
    assert not rows_are_chains(torch.tensor([[4, 3, 3, 4, 5]]))  # a branch


# ---- the cascade


def dense_attention(query, key, value, forest, *, scale=None, window=None, softcap=None, sinks=None):
    """The definition: every logit, `forest_mask`, softmax; `[B, L, Hq, Dv]`."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~forest_mask(forest.subtree_end, forest.position_ids, window), -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], dim=3)
    probability = logits.softmax(-1)[..., : key.shape[2]]
    return (probability @ value).transpose(1, 2)


def inputs(forest, *, heads=(4, 2), width=8, value_width=None, sinks=False, dtype=torch.float64, device="cpu"):
    """query, key, value and perhaps sinks, that want gradients."""
    generator = torch.Generator().manual_seed(0)
    rows, length = forest.subtree_end.shape
    shapes = [
        (rows, length, heads[0], width),
        (rows, length, heads[1], width),
        (rows, length, heads[1], value_width or width),
    ]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).transpose(1, 2) for shape in shapes]
    if sinks:
        tensors.append(torch.randn(heads[0], generator=generator, dtype=torch.float64))
    return [tensor.to(dtype=dtype, device=device).requires_grad_() for tensor in tensors]


def output_and_gradients(attend, tensors, forest, **options):
    query, key, value, *sinks = tensors
    out = attend(query, key, value, forest, sinks=sinks[0] if sinks else None, **options)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), tensors)]


def cascade(query, key, value, forest, **options):
    forest = forest.to(query.device)
    return forest_attention(query, key, value, forest.subtree_end, forest.position_ids, **options)


def assert_same(found, expected, tolerance):
    for name, left, right in zip(("out", "query", "key", "value", "sinks"), found, expected, strict=False):
        torch.testing.assert_close(
            left.cpu().double(),
            right.double(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("call_cost", [0, planning.CALL])
@settings(max_examples=60, deadline=None)
@given(
    forest=forests(),
    window=st.sampled_from([None, 1, 2, 5, 300]),
    softcap=st.sampled_from([None, 1.5]),
    sinks=st.booleans(),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    tile=st.sampled_from([1, 3, 256]),
)
def test_the_cascade_gives_outputs_and_gradients_of_the_dense_mask(
    call_cost, forest, window, softcap, sinks, heads, tile
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "CALL", call_cost)
        patch.setattr(planning, "WINDOW_TILE", tile)
        patch.setattr(planning, "_PLANS", type(planning._PLANS)(maxlen=4))
        tensors = inputs(forest, heads=heads, sinks=sinks)
        options = {"window": window, "softcap": softcap}
        assert_same(
            output_and_gradients(cascade, tensors, forest, **options),
            output_and_gradients(dense_attention, tensors, forest, **options),
            1e-12,
        )


# Row 0: a prompt of 40, three completions of 24, one of which branches. Row 1: two documents.
GROUP = grow(
    chain_tree((0, 40), (40, 24), (40, 24), (40, 10), (50, 7), (50, 7)),
    chain_tree((0, 70), (0, 42)),
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize(
    "options", [{}, {"window": 20}, {"softcap": 2.0}, {"sinks": True, "scale": 0.5}, {"value_width": 4}]
)
def test_lower_precision_and_the_device_agree_with_float64(monkeypatch, device, dtype, tolerance, options):
    monkeypatch.setattr(planning, "CALL", 100)
    options = dict(options)
    made = {name: options.pop(name) for name in ("sinks", "value_width") if name in options}
    found = inputs(GROUP, dtype=dtype, device=device, **made)
    plain = [tensor.detach().cpu().double().requires_grad_() for tensor in found]
    assert_same(
        output_and_gradients(cascade, found, GROUP, **options),
        output_and_gradients(dense_attention, plain, GROUP, **options),
        tolerance,
    )


@pytest.mark.skipif(not hasattr(torch, "neuron"), reason="no device")
def test_the_device_gives_the_bits_of_the_cpu():
    results = [
        output_and_gradients(cascade, inputs(GROUP, device=device, dtype=torch.float32), GROUP)
        for device in ("cpu", "neuron")
    ]
    assert all(torch.equal(host, device.cpu()) for host, device in zip(*results, strict=True))


def test_only_what_is_asked_for_has_a_gradient():
    query, key, value = inputs(GROUP)
    out = cascade(query.detach(), key, value.detach(), GROUP)
    out.sum().backward()
    assert query.grad is None
    assert value.grad is None
    assert key.grad is not None


# ---- what is computed


def plan(forest, window=None):
    return planning.make_plan(forest.subtree_end.numpy(), forest.position_ids.numpy(), window)


def pairs_of_mask(forest, window=None):
    return int(forest_mask(forest.subtree_end, forest.position_ids, window).sum())


@settings(max_examples=60, deadline=None)
@given(forest=forests())
def test_with_free_calls_the_plan_computes_the_pairs_of_the_mask_and_no_more(forest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "CALL", 0)
        assert sum(block.pairs for block in plan(forest).blocks) == pairs_of_mask(forest)


@settings(max_examples=60, deadline=None)
@given(forest=forests(), window=st.sampled_from([None, 1, 3]), call=st.sampled_from([0, 20, 1600]))
def test_the_blocks_cover_each_pair_of_the_mask_once(forest, window, call):
    length = forest.subtree_end.shape[1]
    covered = torch.zeros(len(forest.subtree_end), length, length, dtype=torch.int64)
    opened = torch.zeros(len(forest.subtree_end), length, dtype=torch.int64)
    mask = forest_mask(forest.subtree_end, forest.position_ids, window).squeeze(1)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "CALL", call)
        patch.setattr(planning, "WINDOW_TILE", 3)
        blocks = plan(forest, window).blocks
    for block in blocks:
        for copy in range(block.copies):
            queries = slice(block.query + copy * block.queries, block.query + (copy + 1) * block.queries)
            keys = slice(block.key + copy * block.queries, block.key + copy * block.queries + block.keys)
            for row in range(block.row, block.row + block.rows):
                seen = {"causal": causal, "full": torch.ones_like(causal), "masked": mask[row]}[block.kind][
                    queries, keys
                ]
                assert seen.any(1).all()  # the kernel gives a query without keys the log-sum-exp of one that has some
                assert block.opens == (not opened[row, queries].any())
                covered[row, queries, keys] += seen
                opened[row, queries] += 1
    assert torch.equal(covered, mask.long())


def test_small_neighbours_share_a_call_and_equal_leaves_and_rows_do():
    small = plan(grow(chain_tree(*[(0, 3)] * 8))).blocks
    assert [(block.kind, block.queries) for block in small] == [("masked", 24)]
    leaves = grow(*[chain_tree((0, 300), (300, 200), (300, 200), (300, 200))] * 2)
    assert [(block.kind, block.query, block.queries, block.rows, block.copies) for block in plan(leaves).blocks] == [
        ("causal", 0, 300, 2, 1),
        ("causal", 300, 200, 1, 3),
        ("causal", 300, 200, 1, 3),
        ("full", 300, 600, 2, 1),
    ]


def test_a_chain_is_one_causal_call():
    assert [(block.kind, block.queries, block.rows) for block in plan(grow(*[list(range(500))] * 3)).blocks] == [
        ("causal", 500, 3)
    ]


def test_a_window_computes_in_proportion_to_itself():
    long = grow(chain_tree((0, 2000), (2000, 1000), (2000, 1000)))
    computed = sum(block.pairs for block in plan(long, window=128).blocks)
    assert computed < 4 * pairs_of_mask(long, window=128)
    assert computed < pairs_of_mask(long) / 4


def test_a_deep_tree_is_planned_without_recursion():
    depths = list(range(3000))
    comb = [depth for spine in depths for depth in (spine, spine + 1)][:4000]  # each token of the spine has a leaf
    ends = np.full((1, len(comb)), len(comb))
    ends[0, 1::2] = np.arange(2, len(comb) + 1, 2)  # leaf, then the spine goes on
    assert sum(block.opens for block in planning.make_plan(ends, None, None).blocks) > 0


def test_a_plan_is_found_again_by_content_and_never_for_another_forest(monkeypatch):
    made = []
    make = planning.make_plan
    monkeypatch.setattr(planning, "_PLANS", type(planning._PLANS)(maxlen=4))
    monkeypatch.setattr(planning, "make_plan", lambda *arguments: made.append(1) or make(*arguments))
    ends, positions = GROUP.subtree_end.clone(), GROUP.position_ids.clone()
    first = planning.plan_of(ends, positions, None)
    assert planning.plan_of(ends.clone(), positions, None) is first
    assert planning.plan_of(ends, positions, 7) is not first
    ends.copy_(ends.flip(0))  # in place: the same tensor, another forest
    assert planning.plan_of(ends, positions, None) != first
    assert len(made) == 3


# ---- the operator


def test_the_operator_s_fake_and_derivative_are_what_it_computes():
    for options in ((0.3, None, None), (0.3, 5, 2.0)):
        tensors = inputs(GROUP, sinks=True)
        arguments = (*tensors[:3], GROUP.subtree_end, GROUP.position_ids, *options, tensors[3])
        torch.library.opcheck(torch.ops.trellium.forest_attention.default, arguments)


@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("neuron", marks=pytest.mark.skipif(not hasattr(torch, "neuron"), reason="no device"))],
)
def test_two_forests_of_one_shape_run_on_one_graph(backend):
    device = "neuron" if backend == "neuron" else "cpu"
    other = grow(list(range(112)), chain_tree((0, 12), (12, 50), (12, 50)))

    def attend(query, key, value, forest, sinks):
        return cascade(query * 2, key, value, forest, window=30, sinks=sinks) + 1

    compiled = torch.compile(attend, backend=backend, fullgraph=True, dynamic=False)
    tensors = inputs(GROUP, sinks=True, device=device)
    with max_compiles(1):
        for forest in (GROUP, other, GROUP):
            assert_same(
                output_and_gradients(compiled, tensors, forest.to(device)),
                [result.cpu() for result in output_and_gradients(attend, tensors, forest)],
                1e-12,
            )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(2, 3, 112, 8)}, "Hq a multiple of Hkv"),
        ({"value": torch.zeros(2, 2, 112, 8, dtype=torch.float64)}, "share a floating-point dtype"),
        ({"subtree_end": torch.zeros(2, 112)}, "subtree_end must be"),
        ({"position_ids": torch.zeros(1, 112, dtype=torch.int64)}, "position_ids must be"),
        ({"window": 0}, "window must be at least 1"),
        ({"softcap": 0.0}, "softcap must be above 0"),
        ({"sinks": torch.zeros(2)}, "sinks must be"),
        ({"query": torch.zeros(2, 112, 8)}, "must be \\[B, H, L, D\\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_what_came(change, message):
    query, key, value = inputs(GROUP, dtype=torch.float32)
    arguments = {
        "query": query,
        "key": key,
        "value": value,
        "subtree_end": GROUP.subtree_end,
        "position_ids": GROUP.position_ids,
    }
    with pytest.raises(ValueError, match=message):
        forest_attention(**{**arguments, **change})
