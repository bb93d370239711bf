"""TRL 1.16's own loss code, fed the same scores, gives the same losses, gradients and metrics: DPO with every loss and option, KTO, Reward.

Its trainers compute their losses in methods that read attributes of the trainer and call the model. Here the trainer is an object of its class with just
these attributes, and the model returns scores made beforehand.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tests.ops.test_preference import LOSSES, options_for
from trellium.ops.preference import preference_loss, preference_metrics
from trellium.ops.preference_options import F_DIVERGENCES, LOSS_TRAITS, PreferenceOptions
from trellium.ops.preference_scores import pair_scores
from trellium.ops.reward import reward_loss, reward_metrics
from trellium.ops.segments import sample_scores
from trellium.ops.unpaired import (
    UNPAIRED_LOSSES,
    UnpairedOptions,
    mismatched_kl,
    reference_point,
    unpaired_loss,
    unpaired_metrics,
)

pytestmark = pytest.mark.peers

WIDTH = 12
WEIGHTED_LOSSES = tuple(loss for loss in LOSSES if LOSS_TRAITS[loss].takes_weighting)


class Scored(nn.Module):
    """A model that answers with the scores given, in turn."""

    is_gradient_checkpointing = False

    def __init__(self, *answers: SimpleNamespace) -> None:
        super().__init__()
        self.answers = itertools.cycle(answers)

    def forward(self, **inputs) -> SimpleNamespace:
        return next(self.answers)


class Batch:
    """`samples` padded rows of prompt and completion, the scores of two models on them, and the same as terms."""

    def __init__(self, samples: int, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        prompts = torch.randint(1, 4, (samples, 1), generator=generator)
        ends = prompts + torch.randint(1, WIDTH - 4, (samples, 1), generator=generator)
        place = torch.arange(WIDTH)
        self.input_ids = torch.randint(3, 50, (samples, WIDTH), generator=generator)
        self.attention_mask = (place < ends).long()
        self.completion_mask = ((place >= prompts) & (place < ends)).long()
        self.trained = self.completion_mask[:, 1:].bool()

        def scores(scale: float) -> Tensor:
            return scale * torch.rand(samples, WIDTH - 1, generator=generator, dtype=dtype) * self.trained

        self.policy = scores(-3.0).requires_grad_()
        self.reference = (self.policy.detach() + scores(2.0) - scores(2.0)) * self.trained
        self.log_sum_p2 = scores(-2.0)

    def answer(self, logprob: Tensor) -> SimpleNamespace:
        nothing = torch.zeros_like(logprob)
        return SimpleNamespace(
            log_probs=logprob,
            log_sum_sq_probs=self.log_sum_p2,
            entropy=nothing,
            mean_logits=nothing,
            is_top1=nothing.bool(),
        )

    def terms(self, order: Tensor) -> dict[str, Tensor]:
        """The completions' tokens, sample by sample in the order given."""
        rows = self.trained[order]
        return {
            "logprob": self.policy[order][rows],
            "reference_logprob": self.reference[order][rows],
            "sample": torch.arange(len(order)).repeat_interleave(rows.sum(1)),
            "mask": torch.ones(int(rows.sum()), dtype=torch.bool),
        }

    def inputs(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("input_ids", "attention_mask", "completion_mask")}

    def gradient(self, loss: Tensor) -> Tensor:
        """At the trained tokens; a head says 0 of the others, whatever the gradient."""
        return torch.autograd.grad(loss, self.policy, retain_graph=True)[0][self.trained]


def trl_trainer(name: str, **attributes) -> object:
    trl = pytest.importorskip("trl", reason="install the bench extra")
    trainer = object.__new__(getattr(trl, name))
    single = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x, unwrap_model=lambda x: x
    )
    common = {
        "accelerator": single,
        "aux_loss_enabled": False,
        "precompute_ref_logps": False,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    for attribute, value in (common | attributes).items():
        setattr(trainer, attribute, value)
    return trainer


def trl_dpo(batch: Batch, options: PreferenceOptions) -> tuple[Tensor, dict[str, list[float]]]:
    model = Scored(batch.answer(batch.policy))
    same_name = ("beta", "label_smoothing", "f_divergence_type", "f_alpha_divergence_coef", "ld_alpha", "use_weighting")
    trainer = trl_trainer(
        "DPOTrainer",
        model=model,
        ref_model=Scored(batch.answer(batch.reference)),
        args=SimpleNamespace(discopop_tau=options.discopop_tau, gradient_checkpointing_kwargs=None),
        loss_types=list(options.loss_type),
        loss_weights=list(options.loss_weights or [1.0] * len(options.loss_type)),
        **{name: getattr(options, name) for name in same_name},
    )
    return trainer._compute_loss(model, batch.inputs(), return_outputs=False), trainer._metrics["train"]


def our_dpo(batch: Batch, options: PreferenceOptions) -> tuple[Tensor, dict[str, Tensor]]:
    pairs = len(batch.policy) // 2
    order = torch.arange(2 * pairs).view(2, pairs).T.reshape(-1)  # TRL's rows are all chosen, then all rejected
    log_sum_p2 = batch.log_sum_p2[order][batch.trained[order]] if options.use_weighting else None
    scores = pair_scores(
        **batch.terms(order),
        real=torch.ones(pairs, dtype=torch.bool),
        ld_alpha=options.ld_alpha,
        log_sum_p2=log_sum_p2,
    )
    loss = preference_loss(scores, options, pairs=pairs, chosen_tokens=batch.trained[:pairs].sum())
    return loss, preference_metrics(scores, options)


def assert_equal_dpo(options: PreferenceOptions, pairs: int = 4, *, gradients: bool = True) -> None:
    # TRL's α-divergence knows no float64.
    dtype = torch.float32 if options.f_divergence_type == "alpha_divergence" else torch.float64
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-6, "atol": 1e-7}
    batch = Batch(2 * pairs, dtype)
    (theirs, their_metrics), (ours, our_metrics) = trl_dpo(batch, options), our_dpo(batch, options)
    torch.testing.assert_close(ours, theirs, **close)
    if gradients:
        torch.testing.assert_close(batch.gradient(ours), batch.gradient(theirs), **close)
    for name, values in our_metrics.items():
        assert values.mean().item() == pytest.approx(their_metrics[name][0], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize(
    ("loss", "divergence"),
    [(loss, kind) for loss in LOSSES for kind in F_DIVERGENCES[: None if LOSS_TRAITS[loss].takes_divergence else 1]],
)
def test_every_dpo_loss_with_every_option_is_trl_s(loss, divergence):
    seen = set()
    for smoothing, ld_alpha, coefficient, beta in itertools.product(
        (0.0, 0.1), (None, 0.0, 0.5), (0.5, 1.0, 2.0), (0.1, 0.7)
    ):
        options = options_for(
            loss,
            label_smoothing=smoothing,
            ld_alpha=ld_alpha,
            beta=beta,
            f_divergence_type=divergence,
            f_alpha_divergence_coef=coefficient if divergence == "alpha_divergence" else 0.5,
            discopop_tau=0.05 if beta == 0.1 else 0.5,
        )
        if options not in seen:
            seen.add(options)
            assert_equal_dpo(options)


@pytest.mark.parametrize("loss", WEIGHTED_LOSSES)
def test_weighted_dpo_losses_are_trl_s(loss):
    """TRL multiplies in place: `hinge` then has no backward, and `sft` no place to write to with more than one pair."""
    options = options_for(loss, use_weighting=True)
    assert_equal_dpo(options, pairs=1 if loss == "sft" else 4, gradients=loss != "hinge")


def test_what_trl_cannot_weigh_we_can():
    hinge, sft = (options_for(loss, use_weighting=True, beta=0.01) for loss in ("hinge", "sft"))
    batch = Batch(8, torch.float64)
    with pytest.raises(RuntimeError, match="inplace operation"):
        batch.gradient(trl_dpo(batch, hinge)[0])
    with pytest.raises(RuntimeError, match="single memory location"):
        trl_dpo(batch, sft)
    for options in (hinge, sft):
        assert (batch.gradient(our_dpo(batch, options)[0])[: batch.trained[:4].sum()] != 0).all()


def test_a_dpo_pair_far_on_the_wrong_side_has_a_loss_where_trl_has_none():
    """DiscoPOP multiplies an exponential that overflows by a sigmoid that vanishes."""
    batch, options = Batch(2, torch.float32), options_for("discopop")
    with torch.no_grad():
        batch.policy[0] -= 1000 * batch.trained[0]
    assert trl_dpo(batch, options)[0].isnan()
    assert our_dpo(batch, options)[0].isfinite()


@pytest.mark.parametrize(
    "options",
    [
        PreferenceOptions(loss_type=("sigmoid", "bco_pair", "sft"), loss_weights=(0.8, 0.2, 1.0)),
        PreferenceOptions(loss_type=("aot", "robust", "exo_pair"), label_smoothing=0.1),
        PreferenceOptions(loss_type=("sigmoid", "ipo"), use_weighting=True, ld_alpha=0.5),
    ],
)
def test_combined_dpo_losses_are_trl_s(options):
    assert_equal_dpo(options)


@pytest.mark.parametrize("labels", [(1, 0, 0, 1, 1), (1, 1, 1, 1, 1), (0, 0, 0, 0, 0)])
@pytest.mark.parametrize("higher", [True, False])
@pytest.mark.parametrize("loss", UNPAIRED_LOSSES)
def test_kto_losses_are_trl_s(loss, higher, labels):
    options = UnpairedOptions(loss_type=loss, beta=0.3, desirable_weight=1.3, undesirable_weight=0.7)
    batch, mismatched = Batch(5, torch.float64), Batch(5, torch.float64, seed=1)
    mismatched.policy = mismatched.reference + (0.2 if higher else -0.2) * mismatched.trained
    needs_kl = [batch.answer(mismatched.policy)] if options.needs_kl else []
    needs_reference_kl = [batch.answer(mismatched.reference)] if options.needs_kl else []
    model = Scored(*needs_kl, batch.answer(batch.policy))
    trainer = trl_trainer(
        "KTOTrainer",
        model=model,
        ref_model=Scored(*needs_reference_kl, batch.answer(batch.reference)),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        calculate_KL=options.needs_kl,
        **{name: getattr(options, name) for name in ("loss_type", "beta", "desirable_weight", "undesirable_weight")},
    )
    desirable, real, order = torch.tensor(labels) == 1, torch.ones(5, dtype=torch.bool), torch.arange(5)
    kl_inputs = {f"KL_{name}": value for name, value in mismatched.inputs().items()}
    theirs = trainer._compute_loss(model, batch.inputs() | kl_inputs | {"label": desirable}, return_outputs=False)

    scores = sample_scores(**batch.terms(order), samples=5)
    kl = reference_point(*mismatched_kl(sample_scores(**mismatched.terms(order), samples=5).log_ratio, real))
    ours = unpaired_loss(scores, desirable, real, options, kl).sum() / 5
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(batch.gradient(ours), batch.gradient(theirs))
    their_metrics = trainer._metrics["train"]
    assert their_metrics["kl"][0] == pytest.approx(kl.item() if options.needs_kl else 0)
    assert not options.needs_kl or (kl > 0) == higher
    for name, (total, count) in unpaired_metrics(scores, desirable, real, options).items():
        assert [(total / count).item()] == pytest.approx(their_metrics[name]) if count else name not in their_metrics


@pytest.mark.parametrize("with_margin", [True, False])
@pytest.mark.parametrize("coefficient", [None, 0.01])
def test_the_reward_loss_is_trl_s(coefficient, with_margin):
    chosen, rejected, margin = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theirs_in = torch.cat([chosen, rejected]).unsqueeze(1).requires_grad_()
    ours_in = torch.stack([chosen, rejected], dim=1).reshape(-1).requires_grad_()
    model = Scored(SimpleNamespace(logits=theirs_in))
    args = SimpleNamespace(center_rewards_coefficient=coefficient)
    trainer = trl_trainer("RewardTrainer", model=model, args=args)
    inputs = {"attention_mask": torch.ones(8, 3)} | ({"margin": margin} if with_margin else {})
    theirs = trainer.compute_loss(model, inputs)
    real = torch.ones(4, dtype=torch.bool)
    given = {"margin": margin if with_margin else None, "center_rewards_coefficient": coefficient}
    ours = reward_loss(ours_in, real, **given).sum() / 4
    torch.testing.assert_close(ours, theirs)
    gradients = torch.autograd.grad(ours, ours_in)[0], torch.autograd.grad(theirs, theirs_in)[0]
    torch.testing.assert_close(gradients[0], gradients[1].view(2, 4).T.reshape(-1))
    for name, value in reward_metrics(ours_in, real).items():
        assert value.mean().item() == pytest.approx(trainer._metrics["train"][name][0]), name
