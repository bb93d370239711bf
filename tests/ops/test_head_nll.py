from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.ops.test_head import (
    HEADS,
    TILINGS,
    cut_small,
    full_log_probabilities,
    full_logits_scores,
    problem,
    small_tiles,  # noqa: F401
)
from trellium.ops import head_nll, head_products, head_rows, head_tiles, losses
from trellium.ops.head import MODES, NLL_OUTPUTS, token_scores, weighted_nll

LOSSES = {"nll": losses.nll, "dft": losses.dft}


def weights_of(edges: int, seed: int, *, none: bool = False) -> Tensor:
    """Every third edge does not count; or none does."""
    weights = torch.rand(edges, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weights[:: 1 if none else 3] = 0
    return weights


@settings(max_examples=60, deadline=None)
@given(
    edges=st.integers(0, 11),
    mode=st.sampled_from(MODES),
    smoothing=st.sampled_from([0.0, 0.1, 0.9]),
    outputs=st.lists(st.sampled_from(NLL_OUTPUTS), unique=True),
    tiling=TILINGS,
    paying_rows=st.sampled_from([0, 100]),
    untrained=st.booleans(),
    frozen=st.sampled_from([(), (0,), (1,), (0, 1, 2)]),
    **HEADS,
)
def test_loss_and_gradients_are_those_of_full_logits(
    edges, width, vocabulary, with_bias, temperature, logit_scale, softcap, magnitude, mode, smoothing, outputs, tiling, paying_rows, untrained, frozen, seed
):  # fmt: skip
    hidden, weight, target, bias, leaves = problem(
        edges, width, vocabulary, with_bias=with_bias, scale=magnitude, seed=seed
    )
    for index in frozen[: len(leaves)]:
        leaves[index].requires_grad_(False)
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    edge_weight = weights_of(edges, seed, none=untrained)
    options = {"bias": bias, "temperature": temperature, "logit_scale": logit_scale, "softcap": softcap}
    smoothing = smoothing if mode == "nll" else 0.0
    with pytest.MonkeyPatch.context() as patch:
        if tiling is not None:
            cut_small(patch, *tiling)
        patch.setattr(head_rows, "PAYING_ROWS", paying_rows)
        loss, scores = weighted_nll(
            hidden, weight, target, edge_weight, **options, mode=mode, label_smoothing=smoothing, outputs=outputs
        )
        gradients = torch.autograd.grad(loss / 7, leaves) if leaves else ()
    plain = full_logits_scores(hidden, weight, target, **options)
    expected = LOSSES[mode](plain.logprob, edge_weight, 7)
    if smoothing:
        uniform = full_log_probabilities(hidden, weight, **options).mean(-1)
        expected = (1 - smoothing) * expected + smoothing * LOSSES[mode](uniform, edge_weight, 7)
    torch.testing.assert_close(loss / 7, expected, rtol=1e-10, atol=1e-10)
    for name in NLL_OUTPUTS:
        if name not in outputs:
            assert getattr(scores, name) is None
        else:
            assert not getattr(scores, name).requires_grad
            torch.testing.assert_close(getattr(scores, name), getattr(plain, name), rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, leaves) if leaves else (), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", MODES)
def test_the_fused_form_is_the_loss_of_the_scores(small_tiles, mode):  # noqa: F811
    hidden, weight, target, bias, leaves = problem(9, 6, 200, with_bias=True, dtype=torch.float32)
    edge_weight = weights_of(9, 0)
    fused, _ = weighted_nll(hidden, weight, target, edge_weight, bias=bias, softcap=5.0, mode=mode)
    plain = LOSSES[mode](token_scores(hidden, weight, target, bias=bias, softcap=5.0).logprob, edge_weight, 1)
    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close(torch.autograd.grad(fused, leaves), torch.autograd.grad(plain, leaves))
    with torch.no_grad():
        torch.testing.assert_close(
            weighted_nll(hidden, weight, target, edge_weight, bias=bias, softcap=5.0, mode=mode)[0], plain
        )


def test_weights_of_classes_are_a_factor_of_each_edge_s_weight(small_tiles):  # noqa: F811
    hidden, weight, target, _, leaves = problem(9, 6, 200)
    class_weight = torch.rand(200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loss, _ = weighted_nll(hidden, weight, target, class_weight[target] / class_weight[target].sum())
    expected = F.cross_entropy(hidden @ weight.T, target, weight=class_weight)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves))


def test_label_smoothing_is_that_of_transformers_trainer(small_tiles):  # noqa: F811
    from transformers.trainer_pt_utils import LabelSmoother

    hidden, weight, target, _, leaves = problem(9, 6, 200, dtype=torch.float32)
    labels = target.clone()
    labels[::4] = -100
    trained = labels != -100
    loss, _ = weighted_nll(hidden, weight, target, trained / trained.sum(), label_smoothing=0.1)
    expected = LabelSmoother(0.1)({"logits": (hidden @ weight.T)[None]}, labels[None])
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves))


@pytest.mark.parametrize(("dtype", "columns"), [(torch.float32, 300), (torch.bfloat16, 64)])
def test_the_first_block_s_logits_lie_in_the_weight_s_gradient(monkeypatch, dtype, columns):
    """Where rows have no other room: 16 edges in one block, and the memory of three rows asked for none of them."""
    cut_small(monkeypatch, 3, columns)
    monkeypatch.setattr(head_rows, "FEWEST_ROWS", 1)
    monkeypatch.setattr(head_tiles, "WORK_BYTES", 1 << 18)
    hidden, weight, target, _, leaves = problem(40, 16, 20_000, dtype=dtype)
    plan = head_rows.row_plan((head_tiles.Head(hidden, weight, None, 1.0, 1.0, None),), wants_hidden=True, lends=True)
    assert plan.lent == [(0, 16)]
    assert max(stop - start for start, stop in plan.own) < 3
    loss, _ = weighted_nll(hidden, weight, target, torch.ones(40))
    expected = -full_logits_scores(hidden.float(), weight.float(), target).logprob.sum()
    torch.testing.assert_close(loss, expected, rtol=max(torch.finfo(dtype).eps / 4, 1e-6), atol=0.0)
    for ours, theirs in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True):
        assert (ours - theirs).norm() < max(4 * torch.finfo(dtype).eps, 1e-5) * theirs.norm()


def test_a_head_that_lies_transposed_in_memory_is_trained_as_any_other(small_tiles):  # noqa: F811
    hidden, weight, target, _, leaves = problem(9, 6, 200)
    transposed = weight.detach().t().contiguous().t().requires_grad_()
    loss = torch.compile(weighted_nll, backend="aot_eager", fullgraph=True)(hidden, transposed, target, torch.ones(9))[
        0
    ]
    expected = torch.autograd.grad(weighted_nll(hidden, weight, target, torch.ones(9))[0], leaves)
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, transposed)), expected)


def test_duplicate_targets_and_a_token_out_of_the_distribution(small_tiles):  # noqa: F811
    hidden, weight, _, bias, leaves = problem(7, 4, 130, with_bias=True)
    with torch.no_grad():
        bias[:70] = -torch.inf
    target = torch.tensor([129, 129, 129, 70, 0, 129, 70])  # edge 4 wants a token that cannot be
    edge_weight = torch.tensor([1.0, 2, 1, 1, 0, 1, 1])
    loss, _ = weighted_nll(hidden, weight, target, edge_weight, bias=bias, outputs=("entropy",))
    gradients = torch.autograd.grad(loss, leaves)
    rows = [0, 1, 2, 3, 5, 6]
    plain = full_logits_scores(hidden[rows], weight[70:], target[rows] - 70, bias=bias[70:])
    expected = losses.nll(plain.logprob, edge_weight[rows], 1)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_logits_give_a_finite_loss_and_gradients(small_tiles, dtype):  # noqa: F811
    hidden, weight, target, _, leaves = problem(9, 4, 200, scale=1e6, dtype=dtype)
    loss, _ = weighted_nll(hidden, weight, target, torch.ones(9))
    torch.testing.assert_close(loss, -full_logits_scores(hidden, weight, target).logprob.sum(), rtol=1e-5, atol=1e-5)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("mixed", [False, True], ids=["as float32", "in its own products"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_within_the_rounding_of_full_logits(small_tiles, monkeypatch, dtype, mixed):  # noqa: F811
    monkeypatch.setattr(head_products, "multiplies_as_is", lambda _: mixed)
    hidden, weight, target, bias, leaves = problem(40, 16, 500, with_bias=True, dtype=dtype)
    edge_weight = weights_of(40, 0)
    loss, _ = weighted_nll(hidden, weight, target, edge_weight, bias=bias)
    assert loss.dtype == torch.float32
    gradients = torch.autograd.grad(loss, leaves)
    assert [gradient.dtype for gradient in gradients] == [dtype] * 3
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = full_logits_scores(exact_leaves[0], exact_leaves[1], target, bias=exact_leaves[2])
    expected = losses.nll(exact.logprob, edge_weight, 1)
    rounding = 4 * torch.finfo(dtype).eps
    assert abs(loss - expected) < rounding * abs(expected)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, exact_leaves), strict=True):
        assert (ours - theirs).norm() < rounding * theirs.norm()


def test_autocast_rounds_operands_and_keeps_the_gradients_of_the_parameters_dtype():
    hidden, weight, target, _, _ = problem(9, 16, 200, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = weighted_nll(hidden, weight, target, torch.ones(9))
    low = [tensor.detach().bfloat16() for tensor in (hidden, weight)]
    assert loss.item() == pytest.approx(weighted_nll(*low, target, torch.ones(9))[0].item(), rel=1e-6)
    loss.backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


@pytest.mark.parametrize("fused", [True, False])
def test_a_gradient_dtype_of_float32_sums_accumulation_steps_in_float32(fused):
    hidden, weight, target, _, _ = problem(64, 16, 200, dtype=torch.bfloat16)
    weight.grad_dtype = torch.float32

    def differentiate(rows: Tensor, wanted: Tensor) -> None:
        if fused:
            weighted_nll(rows, weight, wanted, torch.ones(1))[0].backward()
        else:
            losses.nll(token_scores(rows, weight, wanted).logprob, torch.ones(1), 1).backward()

    alone = torch.zeros(200, 16)
    for rows, wanted in zip(hidden.detach().split(1), target.split(1), strict=True):
        weight.grad = None
        differentiate(rows, wanted)
        alone += weight.grad
    weight.grad = None
    for rows, wanted in zip(hidden.detach().split(1), target.split(1), strict=True):
        differentiate(rows, wanted)
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad, alone, rtol=1e-6, atol=1e-6)
    exact = weight.detach().double().requires_grad_()
    (-full_logits_scores(hidden.detach().double(), exact, target).logprob.sum()).backward()
    assert (weight.grad - exact.grad).norm() < 4 * torch.finfo(torch.bfloat16).eps * exact.grad.norm()


def test_low_precision_follows_the_curve_of_float32_sums():
    """200 steps. Two tokens pull with weight 1 in turn, many edges between them with 1/1024 for the first: rounded sums would lose every one of those."""
    edges = 34
    inputs = torch.full((edges, 4), 0.5).bfloat16()
    targets = torch.tensor([3] * (edges - 1) + [5])
    weights = torch.tensor([1.0] + [2.0**-10] * (edges - 2) + [1.0])

    def last_logprobs(fused: bool) -> Tensor:
        master, curve = torch.zeros(8, 4), []
        for _ in range(200):
            weight = master.bfloat16().requires_grad_()
            weight.grad_dtype = torch.float32
            if fused:  # a block an edge
                weighted_nll(inputs, weight, targets, weights)[0].backward()
            else:
                log_p = (inputs.float() @ weight.float().T).log_softmax(-1)
                losses.nll(log_p.gather(1, targets[:, None])[:, 0], weights, 1).backward()
            master -= 0.3 * weight.grad
            curve.append((inputs[:1].float() @ weight.detach().float().T).log_softmax(-1)[0, [3, 5]])
        return torch.stack(curve)

    with pytest.MonkeyPatch.context() as patch:
        cut_small(patch, 1, 64)
        ours = last_logprobs(fused=True)
    theirs = last_logprobs(fused=False)
    pull = theirs[-1, 0] - theirs[-1, 1]
    assert 0.02 < pull < 0.05  # log(1 + 32 / 1024), and not 0
    # Means of 25 steps: a weight that lies between two of bfloat16 is rounded now to one and now to the other.
    drift = (ours - theirs).view(8, 25, 2).mean(1)
    assert drift.abs().max() < 0.005


def test_a_second_backward_through_one_loss_is_refused_rather_than_scaled_twice():
    hidden, weight, target, _, _ = problem(3, 4, 30)
    loss = weighted_nll(hidden, weight, target, torch.ones(3))[0] / 2
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_outside_changes_nothing(small_tiles, reentrant):  # noqa: F811
    hidden, weight, target, _, leaves = problem(7, 4, 130)

    def loss(hidden, weight):
        return weighted_nll(hidden * 2, weight, target, torch.ones(7))[0]

    inside = torch.autograd.grad(loss(hidden, weight), leaves)
    checkpoint(loss, hidden, weight, use_reentrant=reentrant).backward()
    torch.testing.assert_close((hidden.grad, weight.grad), inside)


def test_it_is_one_node_of_a_graph():
    hidden, weight, target, _, leaves = problem(7, 4, 130)
    nodes = []

    def backend(graph, _):
        nodes.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    def loss(hidden, weight):
        return weighted_nll(hidden, weight, target, torch.ones(7), outputs=("entropy",))[0]

    torch.compile(loss, backend=backend, fullgraph=True)(hidden, weight)
    assert sum("weighted_nll" in str(node) for node in nodes) == 1
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=False)(hidden, weight)
    torch.testing.assert_close(torch.autograd.grad(compiled, leaves), torch.autograd.grad(loss(hidden, weight), leaves))


def test_operators_keep_the_contract_of_custom_operators(small_tiles):  # noqa: F811
    hidden, weight, target, bias, _ = problem(5, 4, 130, with_bias=True)
    arguments = (
        hidden,
        weight,
        bias,
        target,
        torch.ones(5),
        1.0,
        1.0,
        None,
        0,
        "",
        False,
        0.1,
        True,
        True,
        True,
        True,
        True,
    )
    torch.library.opcheck(
        head_nll.weighted_nll,
        (*arguments, torch.float64),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "kl"}, "mode must be one of"),
        ({"label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\)"),
        ({"label_smoothing": 0.1, "mode": "dft"}, "0 for any mode but 'nll'"),
        ({"outputs": ("log_sum_p2",)}, "outputs must name some of"),
        ({"edge_weight": torch.ones(2)}, r"edge_weight must be \[E\]"),
        ({"temperature": -1.0}, "temperature must be above 0"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(change, message):
    arguments = {
        "hidden": torch.zeros(3, 4),
        "weight": torch.zeros(10, 4),
        "target": torch.zeros(3, dtype=torch.int64),
        "edge_weight": torch.ones(3),
    }
    with pytest.raises(ValueError, match=message):
        weighted_nll(**{**arguments, **change})
