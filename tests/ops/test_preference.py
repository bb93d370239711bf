from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from tests.ops.test_segments import Terms, make_terms
from trellium.errors import ConfigError
from trellium.ops.preference import (
    PREFERENCE_LOSSES,
    PreferenceSums,
    preference_loss,
    preference_metrics,
    preference_sums,
)
from trellium.ops.preference_options import F_DIVERGENCES, LOSS_TRAITS, PreferenceOptions, needed_scores
from trellium.ops.preference_scores import PairScores, pair_scores

LOSSES = tuple(LOSS_TRAITS)
OVER_THE_BATCH = ("aot", "aot_unpaired")


def options_for(loss: str, **given) -> PreferenceOptions:
    """Options with which a loss can be: what it does not take is left out."""
    traits = LOSS_TRAITS[loss]
    if not traits.takes_divergence:
        given.pop("f_divergence_type", None)
    if not traits.takes_smoothing:
        given.pop("label_smoothing", None)
    if not traits.takes_weighting:
        given.pop("use_weighting", None)
    if loss == "exo_pair":
        given["label_smoothing"] = given.get("label_smoothing") or 1e-3
    return PreferenceOptions(loss_type=(loss,), **given)


def scores_of(terms: Terms, real: Tensor, options: PreferenceOptions) -> PairScores:
    return pair_scores(
        terms.logprob,
        terms.reference_logprob,
        terms.sample,
        mask=terms.mask,
        real=real,
        ld_alpha=options.ld_alpha,
        log_sum_p2=terms.log_sum_p2 if "log_sum_p2" in needed_scores(options) else None,
    )


# ---- the papers, written out one pair at a time ----


def log_sigmoid(x: Tensor) -> Tensor:
    return -torch.log(1 + torch.exp(-x))


def plain_score(r: Tensor, options: PreferenceOptions) -> Tensor:
    u, a = r.exp(), options.f_alpha_divergence_coef
    return {
        "reverse_kl": u.log(),
        "forward_kl": 1 - 1 / u,
        "js_divergence": (2 * u / (1 + u)).log(),
        "alpha_divergence": u.log() if a == 1 else (u ** (a - 1) - 1) / (a - 1),
    }[options.f_divergence_type]


def plain_loss(name: str, pairs: list[dict[str, Tensor]], options: PreferenceOptions) -> Tensor:
    """Each pair's; of the sorted losses, each rank's."""
    if name not in OVER_THE_BATCH:
        return torch.stack(
            [plain_value(name, p, options) * (p["weight"] if options.use_weighting else 1) for p in pairs]
        )
    if name == "aot":
        better, worse = [p["logp_c"] - p["logp_r"] for p in pairs], [p["ref_c"] - p["ref_r"] for p in pairs]
    else:
        better, worse = [p["r_c"] for p in pairs], [p["r_r"] for p in pairs]
    delta = torch.stack(better).sort().values - torch.stack(worse).sort().values
    b, eps = options.beta, options.label_smoothing
    return -(1 - eps) * log_sigmoid(b * delta) - eps * log_sigmoid(-b * delta)


def plain_value(name: str, p: dict[str, Tensor], options: PreferenceOptions) -> Tensor:
    b, eps, tau = options.beta, options.label_smoothing, options.discopop_tau
    r_c, r_r = p["r_c"], p["r_r"]
    s_c, s_r = plain_score(r_c, options), plain_score(r_r, options)
    m, per_token = b * (s_c - s_r), s_c / max(p["len_c"], 1) - s_r / max(p["len_r"], 1)
    q, w, sig_c, sig_r, sig_d = (1 / (1 + torch.exp(-x)) for x in (m, m / tau, b * r_c, b * r_r, b * (r_c - r_r)))
    return {
        "sigmoid": -log_sigmoid(m),
        "hinge": (1 - m).clamp(min=0),
        "ipo": (per_token - 1 / (2 * b)) ** 2,
        "exo_pair": q * (q / (1 - eps)).log() + (1 - q) * ((1 - q) / eps).log() if eps else None,
        "nca_pair": -sig_c.log() - 0.5 * (1 - sig_c).log() - 0.5 * (1 - sig_r).log(),
        "robust": (-(1 - eps) * log_sigmoid(m) + eps * log_sigmoid(-m)) / (1 - 2 * eps),
        "bco_pair": -sig_c.log() - (1 - sig_r).log(),
        "sppo_hard": (r_c - 1 / (2 * b)) ** 2 + (r_r + 1 / (2 * b)) ** 2,
        "apo_zero": 1 - sig_c + sig_r,
        "apo_down": sig_c + 1 - sig_d,
        "discopop": -(1 - w) * log_sigmoid(m) + w * torch.exp(-m),
        "sft": p["nll_c"],
        "sigmoid_norm": -log_sigmoid(b * per_token),
    }[name]


def plain_pairs(terms: Terms, real: Tensor, options: PreferenceOptions) -> list[dict[str, Tensor]]:
    found = []
    for pair in real.nonzero().squeeze(1).tolist():
        own = {"c": terms.of(2 * pair), "r": terms.of(2 * pair + 1)}
        shared = min(map(len, own.values()))
        fields = {"weight": torch.ones((), dtype=torch.float64)}
        for side, places in own.items():
            policy, reference = terms.logprob[places], terms.reference_logprob[places]
            alpha = 1.0 if options.ld_alpha is None else options.ld_alpha
            fields[f"logp_{side}"], fields[f"ref_{side}"] = (
                values[:shared].sum() + alpha * values[shared:].sum() for values in (policy, reference)
            )
            fields[f"r_{side}"] = fields[f"logp_{side}"] - fields[f"ref_{side}"]
            fields[f"len_{side}"] = len(places)
            fields[f"nll_{side}"] = -policy.sum()
            if len(places):
                fields["weight"] = fields["weight"] * (policy - terms.log_sum_p2[places]).mean().exp().detach()
        found.append(fields)
    return found


def value_and_gradient(loss: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    (gradient,) = torch.autograd.grad(loss, terms.logprob, allow_unused=True)
    return loss.detach(), torch.zeros_like(terms.logprob) if gradient is None else gradient


def loss_of(terms: Terms, real: Tensor, options: PreferenceOptions) -> tuple[Tensor, Tensor]:
    tokens = max(sum(len(terms.of(2 * pair)) for pair in real.nonzero().squeeze(1).tolist()), 1)
    sums = scores_of(terms, real, options)
    loss = preference_loss(sums, options, pairs=real.sum().clamp(min=1), chosen_tokens=tokens)
    return value_and_gradient(loss, terms)


some_options = st.fixed_dictionaries(
    {
        "beta": st.sampled_from([0.1, 0.5]),
        "label_smoothing": st.sampled_from([0.0, 0.1, 0.4]),
        "f_divergence_type": st.sampled_from(F_DIVERGENCES),
        "f_alpha_divergence_coef": st.sampled_from([0.5, 0.0, 1.0, 2.0]),
        "ld_alpha": st.sampled_from([None, 0.0, 0.5, 1.0]),
        "use_weighting": st.booleans(),
        "discopop_tau": st.sampled_from([0.05, 0.5]),
    }
)
some_pairs = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4)


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=25, deadline=None)
@given(given=some_options, pairs=some_pairs, seed=st.integers(0, 1000))
def test_each_loss_is_its_paper_s_in_value_and_gradient(loss, given, pairs, seed):
    options, real = options_for(loss, **given), torch.ones(len(pairs), dtype=torch.bool)
    terms = make_terms([length for pair in pairs for length in pair], seed=seed)
    plain = plain_loss(loss, plain_pairs(terms, real, options), options).sum()
    plain = plain / (max(sum(chosen for chosen, _ in pairs), 1) if loss == "sft" else len(pairs))
    torch.testing.assert_close(loss_of(terms, real, options), value_and_gradient(plain, terms))


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=15, deadline=None)
@given(
    given=some_options, pairs=some_pairs, fillers=st.integers(1, 6), extra=st.integers(1, 3), seed=st.integers(0, 1000)
)
def test_what_fills_up_changes_neither_loss_nor_gradient(loss, given, pairs, fillers, extra, seed):
    options, lengths = options_for(loss, **given), [length for pair in pairs for length in pair]
    alone = make_terms(lengths, seed=seed)
    value, gradient = loss_of(alone, torch.ones(len(pairs), dtype=torch.bool), options)

    filled = make_terms(lengths, fillers=fillers, seed=seed)
    real = torch.arange(len(pairs) + extra) < len(pairs)
    # Filler terms may name filler samples, and a pair that fills up may have terms that call themselves real.
    filled.sample[~filled.mask] = torch.randint(
        2 * len(real), (fillers,), generator=torch.Generator().manual_seed(seed)
    )
    claims = torch.tensor([2 * len(pairs), 2 * len(pairs) + 1])
    filled.sample = torch.cat([filled.sample, claims])
    filled.mask = torch.cat([filled.mask, torch.ones(2, dtype=torch.bool)])
    rubbish = torch.tensor([-torch.inf, torch.nan], dtype=torch.float64)
    filled.logprob = torch.cat([filled.logprob.detach(), rubbish]).requires_grad_()
    filled.reference_logprob, filled.log_sum_p2 = (
        torch.cat([values, rubbish]) for values in (filled.reference_logprob, filled.log_sum_p2)
    )
    tokens = max(sum(lengths[::2]), 1)
    sums = scores_of(filled, real, options)
    filled_loss = preference_loss(sums, options, pairs=len(pairs), chosen_tokens=tokens)
    filled_value, filled_gradient = value_and_gradient(filled_loss, filled)
    torch.testing.assert_close(filled_value, value, rtol=1e-12, atol=0)
    counted = filled.mask & real[filled.sample // 2]
    torch.testing.assert_close(filled_gradient[counted], gradient, rtol=1e-12, atol=1e-15)
    assert (filled_gradient[~counted] == 0).all()
    assert all(values[~real].eq(0).all() for values in preference_metrics(sums, options).values())


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_those_of_finite_differences(loss):
    options = options_for(loss, label_smoothing=0.1, f_divergence_type="js_divergence", ld_alpha=0.5)
    terms, real = make_terms([2, 3, 4, 1, 1, 2]), torch.ones(3, dtype=torch.bool)

    def of(logprob: Tensor) -> Tensor:
        terms.logprob = logprob
        return preference_loss(scores_of(terms, real, options), options, pairs=3, chosen_tokens=7)

    assert torch.autograd.gradcheck(of, (terms.logprob,))


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss not in OVER_THE_BATCH])
def test_micro_batches_add_up_to_the_batch(loss):
    options, lengths = options_for(loss, use_weighting=True, ld_alpha=0.5), [2, 5, 1, 1, 7, 3, 4, 4]
    whole, _ = loss_of(make_terms(lengths), torch.ones(4, dtype=torch.bool), options)
    terms, parts = make_terms(lengths), []
    for pairs in ((0,), (1, 2), (3,)):
        real = torch.zeros(4, dtype=torch.bool).index_fill(0, torch.tensor(pairs), True)
        sums = preference_sums(scores_of(terms, real, options), options)
        parts.append(sums.pairs / 4 + (0 if sums.chosen_tokens is None else sums.chosen_tokens / sum(lengths[::2])))
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("loss", OVER_THE_BATCH)
def test_a_loss_over_the_batch_depends_on_which_pairs_came_together(loss):
    options, terms = options_for(loss, beta=1.0), make_terms([2, 5, 1, 1, 7, 3, 4, 4])
    alone = torch.eye(4, dtype=torch.bool)
    parts = sum(preference_sums(scores_of(terms, real, options), options).pairs for real in alone)
    whole = preference_sums(scores_of(terms, alone.any(0), options), options).pairs
    assert abs(parts - whole) > 1e-4 * whole


def test_combined_losses_add_up_by_their_weights_and_keep_their_own_counts():
    terms, real = make_terms([2, 5, 1, 1]), torch.ones(2, dtype=torch.bool)
    options = PreferenceOptions(loss_type=("sigmoid", "bco_pair", "sft"), loss_weights=(0.8, 0.2, 1.5))
    single = [loss_of(terms, real, options_for(loss))[0] for loss in options.loss_type]
    combined, _ = loss_of(terms, real, options)
    torch.testing.assert_close(combined, 0.8 * single[0] + 0.2 * single[1] + 1.5 * single[2])


@pytest.mark.parametrize("divergence", F_DIVERGENCES)
@pytest.mark.parametrize("loss", LOSSES)
def test_pairs_far_from_the_reference_have_finite_losses_and_gradients(loss, divergence):
    options = options_for(loss, f_divergence_type=divergence, f_alpha_divergence_coef=-1.0, label_smoothing=0.1)
    for chosen, rejected in ((3000.0, -3000.0), (-3000.0, 3000.0), (-3000.0, -3000.0), (0.0, 0.0)):
        terms = make_terms([1, 1], dtype=torch.float32)
        terms.logprob = (terms.reference_logprob + torch.tensor([chosen, rejected])).requires_grad_()
        value, gradient = loss_of(terms, torch.ones(1, dtype=torch.bool), options)
        assert value.isfinite()
        assert gradient.isfinite().all()


def test_metrics_are_implicit_rewards_and_log_probabilities_of_each_pair():
    options = PreferenceOptions(beta=0.3, ld_alpha=0.5, f_divergence_type="js_divergence")
    terms, real = make_terms([2, 5, 1, 1, 0, 0]), torch.tensor([True, True, False])
    metrics = preference_metrics(scores_of(terms, real, options), options)
    for index, p in enumerate(plain_pairs(terms, real, options)):
        expected = {
            "rewards/chosen": 0.3 * p["r_c"],
            "rewards/rejected": 0.3 * p["r_r"],
            "rewards/accuracies": (p["r_c"] > p["r_r"]).double(),
            "rewards/margins": 0.3 * (p["r_c"] - p["r_r"]),
            "logps/chosen": p["logp_c"],
            "logps/rejected": p["logp_r"],
        }
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            assert not metrics[name].requires_grad
            torch.testing.assert_close(metrics[name][index], value.detach())


def test_one_graph_serves_every_filling_of_a_shape():
    options, counter = PreferenceOptions(loss_type=("sigmoid", "aot", "sft"), ld_alpha=0.5), CompileCounter()

    @torch.compile(backend=counter, fullgraph=True, dynamic=False)
    def loss(logprob: Tensor, reference: Tensor, sample: Tensor, mask: Tensor, real: Tensor) -> PreferenceSums:
        return preference_sums(
            pair_scores(logprob, reference, sample, mask=mask, real=real, ld_alpha=options.ld_alpha), options
        )

    for lengths in ([2, 3, 4, 1, 0, 0], [1, 1, 2, 2, 3, 3]):
        terms = make_terms(lengths, fillers=16 - sum(lengths))
        real = torch.tensor(lengths[::2]) > 0
        compiled = loss(terms.logprob, terms.reference_logprob, terms.sample, terms.mask, real)
        eager = preference_sums(scores_of(terms, real, options), options)
        torch.testing.assert_close((compiled.pairs, compiled.chosen_tokens), (eager.pairs, eager.chosen_tokens))
    assert counter.frame_count == 1


@pytest.mark.skipif(not hasattr(torch, "neuron"), reason="no device")
def test_no_loss_leaves_a_device_of_fixed_shapes():
    options = PreferenceOptions(loss_type=LOSSES, label_smoothing=0.1, ld_alpha=0.5)
    terms, real = make_terms([2, 3, 4, 1, 0, 0], fillers=6, dtype=torch.float32), torch.tensor([True, True, False])
    expected = loss_of(terms, real, options)
    moved = Terms(**{name: value.detach().to("neuron") for name, value in vars(terms).items()})
    moved.logprob.requires_grad_()
    torch.neuron.clear_op_tracking()
    loss = preference_loss(scores_of(moved, real.to("neuron"), options), options, pairs=2, chosen_tokens=6)
    found = value_and_gradient(loss, moved)
    assert torch.neuron.get_fallback_ops() == []
    torch.testing.assert_close(tuple(value.cpu() for value in found), expected)


def test_weighting_without_the_scores_it_needs_is_refused():
    terms, real = make_terms([1, 1]), torch.ones(1, dtype=torch.bool)
    scores = scores_of(terms, real, PreferenceOptions())
    with pytest.raises(ValueError, match="log_sum_p2"):
        preference_sums(scores, PreferenceOptions(use_weighting=True))


def test_the_head_is_asked_for_nothing_that_no_option_needs():
    assert needed_scores(PreferenceOptions()) == ("logprob",)
    assert needed_scores(PreferenceOptions(use_weighting=True)) == ("logprob", "log_sum_p2")


def test_every_loss_has_a_formula_and_traits():
    assert tuple(PREFERENCE_LOSSES) == tuple(LOSS_TRAITS)
    assert len(LOSS_TRAITS) == 15


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss_type": ("sigmod",)}, "Did you mean 'sigmoid'"),
        ({"loss_type": "sigmoid"}, "must be a tuple"),
        ({"loss_type": ()}, "one or more losses"),
        ({"loss_weights": (1.0, 2.0)}, "1 for sigmoid; got 2"),
        ({"loss_weights": (math.nan,)}, "loss_weights must be finite"),
        ({"f_divergence_type": "reverse"}, "Did you mean 'reverse_kl'"),
        ({"beta": 0.0}, "beta must be a number above 0"),
        ({"beta": math.nan}, "beta must be a number above 0"),
        ({"discopop_tau": -1.0}, "discopop_tau must be"),
        ({"f_alpha_divergence_coef": math.inf}, "must be finite"),
        ({"ld_alpha": 1.5}, "ld_alpha must be in"),
        ({"label_smoothing": 1.0}, "in \\[0, 1\\)"),
        ({"label_smoothing": 0.1}, "would do nothing: sigmoid"),
        ({"loss_type": ("exo_pair",)}, "label_smoothing=1e-3"),
        ({"loss_type": ("robust",), "label_smoothing": 0.5}, "swap chosen and rejected"),
        (
            {"loss_type": ("sigmoid", "nca_pair"), "f_divergence_type": "forward_kl"},
            "'nca_pair'.*use losses of: sigmoid",
        ),
        ({"loss_type": ("aot",), "use_weighting": True}, "'aot'.*sorted"),
        ({"loss_type": ("aot_unpaired",), "use_weighting": True}, "'aot_unpaired'.*sorted"),
    ],
)
def test_options_that_cannot_be_say_the_way_out(given, said):
    with pytest.raises(ConfigError, match=said):
        PreferenceOptions(**given)
