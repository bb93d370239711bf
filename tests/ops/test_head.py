from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trellium.ops import head_products, head_rows, head_tiles
from trellium.ops.head import NLL_OUTPUTS, OUTPUTS, TokenScores, token_scores, weighted_nll

HEADS = {
    "width": st.integers(1, 9),
    "vocabulary": st.integers(1, 300),
    "with_bias": st.booleans(),
    "temperature": st.sampled_from([1.0, 0.7, 3.0]),
    "logit_scale": st.sampled_from([1.0, 0.0625, -2.0]),
    "softcap": st.sampled_from([None, 2.0, 30.0]),
    "magnitude": st.sampled_from([1.0, 20.0]),
    "seed": st.integers(0, 1000),
}
"""Any head, and the size of its hidden states."""

TILINGS = st.sampled_from([(3, 64), (1, 64), None])
"""For `cut_small`; None leaves the tiles as they are."""


def full_log_probabilities(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """`[E, V]`, the plainest way."""
    return _full_logits(hidden, weight, bias, temperature, logit_scale, softcap).log_softmax(-1)


def _full_logits(hidden, weight, bias, temperature, logit_scale, softcap) -> Tensor:
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature


def full_logits_scores(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> TokenScores:
    """The plainest way."""
    logits = _full_logits(hidden, weight, bias, temperature, logit_scale, softcap)
    log_p = logits.log_softmax(-1)
    entropy = -torch.where(log_p.isinf(), 0.0, log_p.exp() * log_p).sum(-1)
    return TokenScores(
        logprob=log_p.gather(1, target[:, None])[:, 0],
        entropy=entropy,
        log_sum_p2=(2 * log_p).logsumexp(-1),
        mean_logit=logits.mean(-1),
        top1=logits.argmax(-1) == target,
    )


def cut_small(patch: pytest.MonkeyPatch, edges: int = 3, columns: int = 64) -> None:
    """Tiles of a few edges and tokens, and blocks of as few whole rows, so that small problems have many."""
    patch.setattr(head_tiles, "EDGE_TILE", edges)
    patch.setattr(head_tiles, "VOCABULARY_TILE", columns)
    patch.setattr(head_tiles, "TILE_BYTES", edges * columns * 8)
    patch.setattr(head_rows, "FEWEST_ROWS", edges)
    patch.setattr(head_rows, "PAYING_ROWS", 0)
    patch.setattr(head_tiles, "WORK_BYTES", 0)


@pytest.fixture
def small_tiles(monkeypatch):
    cut_small(monkeypatch)


def problem(edges: int, width: int, vocabulary: int, *, with_bias=False, scale=1.0, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(edges, width, generator=generator, dtype=torch.float64).mul(scale).to(dtype)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64).to(dtype)
    bias = torch.randn(vocabulary, generator=generator, dtype=torch.float64).to(dtype) if with_bias else None
    target = torch.randint(0, vocabulary, (edges,), generator=generator)
    leaves = [leaf.requires_grad_() for leaf in (hidden, weight, bias) if leaf is not None]
    return hidden, weight, target, bias, leaves


def objective(scores: TokenScores, seed: int = 1) -> Tensor:
    """A weighted sum of what is differentiable; every third weight is 0."""
    terms = []
    for value in (scores.logprob, scores.entropy):
        if value is not None:
            generator = torch.Generator().manual_seed(seed)
            weights = torch.randn(len(value), generator=generator, dtype=torch.float64).to(value.dtype)
            weights[::3] = 0
            terms.append((value * weights).sum())
    return torch.stack(terms).sum()


@settings(max_examples=60, deadline=None)
@example(
    edges=5,
    width=8,
    vocabulary=8,
    with_bias=False,
    temperature=0.7,
    logit_scale=-2.0,
    softcap=2.0,
    magnitude=20.0,
    outputs=["logprob", "top1"],
    tiling=(3, 64),
    seed=431,
)
@given(
    edges=st.integers(1, 11),
    outputs=st.lists(st.sampled_from(OUTPUTS), min_size=1, unique=True),
    tiling=TILINGS,
    **HEADS,
)
def test_scores_and_gradients_are_those_of_full_logits(
    edges, width, vocabulary, with_bias, temperature, logit_scale, softcap, magnitude, outputs, tiling, seed
):
    hidden, weight, target, bias, leaves = problem(
        edges, width, vocabulary, with_bias=with_bias, scale=magnitude, seed=seed
    )
    options = {"bias": bias, "temperature": temperature, "logit_scale": logit_scale, "softcap": softcap}
    with pytest.MonkeyPatch.context() as patch:
        if tiling is not None:
            cut_small(patch, *tiling)
        scores = token_scores(hidden, weight, target, **options, outputs=outputs)
        differentiable = {"logprob", "entropy"} & set(outputs)
        if differentiable:
            gradients = torch.autograd.grad(objective(scores), leaves)
    plain = full_logits_scores(hidden, weight, target, **options)
    for name in OUTPUTS:
        if name not in outputs:
            assert getattr(scores, name) is None
        elif name == "top1":  # of tokens that are alike to rounding, as under a soft cap, any may be the first
            ranked = full_log_probabilities(hidden, weight, **options).sort(dim=-1, descending=True).values
            clear = (ranked[:, 0] - ranked[:, 1] > 1e-12) if vocabulary > 1 else torch.ones(edges, dtype=torch.bool)
            assert scores.top1[clear].equal(plain.top1[clear])
        else:
            torch.testing.assert_close(getattr(scores, name), getattr(plain, name), rtol=1e-10, atol=1e-10)
    if not differentiable:
        return
    asked = TokenScores(**{name: getattr(plain, name) for name in differentiable})
    for ours, theirs in zip(gradients, torch.autograd.grad(objective(asked), leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_one_edge_many_times_gives_the_sum_of_its_gradients(small_tiles):
    hidden, weight, _, _, _ = problem(1, 4, 130)
    target = torch.full((7,), 129)
    token_scores(hidden.expand(7, 4), weight, target).logprob.sum().backward()
    once = torch.autograd.grad(7 * full_logits_scores(hidden, weight, target[:1]).logprob.sum(), (hidden, weight))
    torch.testing.assert_close((hidden.grad, weight.grad), once, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_logits_give_finite_scores_and_gradients(small_tiles, dtype):
    hidden, weight, target, _, leaves = problem(9, 4, 200, scale=1e6, dtype=dtype)
    scores = token_scores(hidden, weight, target, outputs=OUTPUTS)
    plain = full_logits_scores(hidden, weight, target)
    torch.testing.assert_close(scores.logprob, plain.logprob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.entropy, plain.entropy, rtol=1e-5, atol=1e-5)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(objective(scores), leaves))


def test_tokens_taken_out_by_a_bias_of_minus_infinity_do_not_count(small_tiles):
    hidden, weight, _, bias, leaves = problem(7, 4, 200, with_bias=True)
    banned = torch.zeros(200, dtype=torch.bool)
    banned[:70] = True  # the whole first tile
    banned[100:120] = True
    with torch.no_grad():
        bias[banned] = -torch.inf
    target = torch.tensor([70, 99, 120, 199, 150, 71, 98])
    scores = token_scores(hidden, weight, target, bias=bias, outputs=OUTPUTS)
    gradients = torch.autograd.grad(objective(scores), leaves)
    kept = (~banned).nonzero()[:, 0]
    plain = full_logits_scores(hidden, weight[kept], (kept == target[:, None]).int().argmax(1), bias=bias[kept])
    torch.testing.assert_close(scores.logprob, plain.logprob, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(scores.entropy, plain.entropy, rtol=1e-10, atol=1e-10)
    assert scores.top1.equal(plain.top1)
    for ours, theirs in zip(gradients, torch.autograd.grad(objective(plain), leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("fused", [False, True])
def test_nothing_is_computed_for_a_frozen_head(small_tiles, monkeypatch, fused):
    hidden, weight, target, bias, _ = problem(7, 4, 130, with_bias=True)
    weight.requires_grad_(False)
    bias.requires_grad_(False)
    added = []
    for name in ("add_product", "set_product"):
        plain = getattr(head_products, name)
        watched = lambda into, *factors, plain=plain: (added.append(into.shape), plain(into, *factors))  # noqa: E731
        monkeypatch.setattr(head_products, name, watched)
    if fused:
        weighted_nll(hidden, weight, target, -torch.ones(7), bias=bias)[0].backward()
    else:
        token_scores(hidden, weight, target, bias=bias).logprob.sum().backward()
    assert {shape[1] for shape in added} == {4}
    assert len(added) == 3 * 3  # one product a tile: the gradient of hidden
    torch.testing.assert_close(
        hidden.grad,
        torch.autograd.grad(full_logits_scores(hidden, weight, target, bias=bias).logprob.sum(), hidden)[0],
    )


def test_a_frozen_backbone_still_trains_the_head(small_tiles):
    hidden, weight, target, _, _ = problem(7, 4, 130)
    hidden = hidden.detach()
    token_scores(hidden, weight, target).logprob.sum().backward()
    (expected,) = torch.autograd.grad(full_logits_scores(hidden, weight, target).logprob.sum(), weight)
    torch.testing.assert_close(weight.grad, expected)


@pytest.mark.parametrize("fused", [False, True])
def test_no_tensor_of_edges_by_vocabulary_exists(monkeypatch, fused):
    cut_small(monkeypatch, 4, 128)
    hidden, weight, target, _, _ = problem(128, 8, 1000, dtype=torch.float32)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(result):
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.untyped_storage().nbytes() // tensor.element_size())
            return result

    with Watch():
        if fused:
            weighted_nll(hidden, weight, target, torch.ones(128), outputs=NLL_OUTPUTS)[0].backward()
        else:
            scores = token_scores(hidden, weight, target, outputs=OUTPUTS)
            (scores.logprob.sum() + scores.entropy.sum()).backward()
    assert largest == weight.numel() < 128 * 1000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_within_the_rounding_of_full_logits(small_tiles, dtype):
    hidden, weight, target, bias, leaves = problem(40, 16, 500, with_bias=True, dtype=dtype)
    scores = token_scores(hidden, weight, target, bias=bias, outputs=OUTPUTS)
    assert scores.logprob.dtype == scores.entropy.dtype == torch.float32
    gradients = torch.autograd.grad(objective(scores), leaves)
    assert [gradient.dtype for gradient in gradients] == [dtype] * 3
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = full_logits_scores(exact_leaves[0], exact_leaves[1], target, bias=exact_leaves[2])
    rounding = 4 * torch.finfo(dtype).eps
    assert (scores.logprob - exact.logprob).norm() < rounding * exact.logprob.norm()
    for ours, theirs in zip(gradients, torch.autograd.grad(objective(exact), exact_leaves), strict=True):
        assert (ours - theirs).norm() < rounding * theirs.norm()


def test_autocast_makes_products_in_its_dtype_and_statistics_in_float32():
    hidden, weight, target, _, _ = problem(9, 16, 200, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        scores = token_scores(hidden, weight, target, outputs=("logprob", "entropy"))
        objective(scores).backward()
    low = [tensor.detach().bfloat16() for tensor in (hidden, weight)]
    plain = token_scores(*low, target, outputs=("logprob", "entropy"))
    assert scores.logprob.equal(plain.logprob)
    assert scores.logprob.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32


def test_a_head_wider_than_the_hidden_state_keeps_its_precision():
    hidden, weight, target, _, _ = problem(5, 8, 100, dtype=torch.float32)
    low = hidden.detach().bfloat16().requires_grad_()
    scores = token_scores(low, weight, target)
    torch.testing.assert_close(scores.logprob, full_logits_scores(low.float(), weight, target).logprob)
    scores.logprob.sum().backward()
    assert low.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_outside_changes_nothing(small_tiles, reentrant):
    hidden, weight, target, _, leaves = problem(7, 4, 130)

    def score(hidden, weight):
        return token_scores(hidden * 2, weight, target).logprob

    inside = torch.autograd.grad(score(hidden, weight).sum(), leaves)
    checkpoint(score, hidden, weight, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close((hidden.grad, weight.grad), inside)


def test_tiles_are_even():
    for length, target, alignment in [
        (151_936, 2048, 64),
        (49_152, 2000, 64),
        (50_257, 1999, 64),
        (8191, 1024, 1),
        (5, 64, 64),
    ]:
        pieces = head_tiles.even_split(length, target, alignment)
        assert pieces[0][0] == 0
        assert pieces[-1][1] == length
        assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(pieces))
        sizes = [stop - start for start, stop in pieces]
        assert max(sizes) - min(sizes) < 2 * alignment
        assert max(sizes) < target + alignment


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outputs": ("perplexity",)}, "outputs must name some of"),
        ({"outputs": "logprob"}, "outputs must name some of"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"softcap": 0.0}, "softcap must be above 0"),
        ({"logit_scale": 0.0}, "logit_scale must not be 0"),
        ({"bias": torch.zeros(3)}, r"bias must be \[V\]"),
        ({"target": torch.zeros(4, dtype=torch.int64)}, r"target must be \[E\]"),
        ({"weight": torch.zeros(10, 5)}, "hidden must be"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(change, message):
    arguments = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(10, 4), "target": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(ValueError, match=message):
        token_scores(**{**arguments, **change})
