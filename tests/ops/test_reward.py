from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trellium.ops.reward import reward_loss, reward_metrics

RUBBISH = torch.tensor([torch.nan, torch.inf])
rewards = st.floats(-5, 5)


@settings(max_examples=40, deadline=None)
@given(
    pairs=st.lists(st.tuples(rewards, rewards, rewards), min_size=1, max_size=5),
    with_margin=st.booleans(),
    coefficient=st.sampled_from([None, 0.0, 0.01, 1.0]),
)
def test_the_loss_is_bradley_and_terry_s_in_value_and_gradient(pairs, with_margin, coefficient):
    table = torch.tensor(pairs, dtype=torch.float64)
    reward, margin = table[:, :2].reshape(-1).requires_grad_(), table[:, 2] if with_margin else None
    real = torch.ones(len(pairs), dtype=torch.bool)
    found = reward_loss(reward, real, margin=margin, center_rewards_coefficient=coefficient)
    plain = []
    for index, (_, _, m) in enumerate(pairs):
        better, worse = reward[2 * index], reward[2 * index + 1]
        value = torch.log(1 + torch.exp(-(better - worse - (m if with_margin else 0))))
        plain.append(value + (coefficient or 0) * (better + worse) ** 2)
    plain = torch.stack(plain)
    torch.testing.assert_close(found, plain)
    torch.testing.assert_close(*(torch.autograd.grad(loss.sum(), reward)[0] for loss in (found, plain)))


def test_what_fills_up_changes_neither_loss_nor_gradient_nor_metric():
    alone = torch.tensor([1.0, -0.5, 0.2, 0.4], requires_grad=True)
    filled = torch.cat([RUBBISH, alone.detach(), RUBBISH.flip(0)]).requires_grad_()
    margin, real = torch.tensor([torch.nan, 0.1, 0.3, torch.inf]), torch.tensor([False, True, True, False])
    both = torch.ones(2, dtype=torch.bool)
    loss = reward_loss(alone, both, margin=margin[real], center_rewards_coefficient=0.1)
    found = reward_loss(filled, real, margin=margin, center_rewards_coefficient=0.1)
    assert torch.equal(found, torch.cat([torch.zeros(1), loss, torch.zeros(1)]))
    (expected,), (gradient,) = torch.autograd.grad(loss.sum(), alone), torch.autograd.grad(found.sum(), filled)
    assert torch.equal(gradient, torch.cat([torch.zeros(2), expected, torch.zeros(2)]))
    without, metrics = reward_metrics(alone, both), reward_metrics(filled, real)
    assert metrics.keys() == without.keys()
    for name, value in without.items():
        assert torch.equal(metrics[name][real] if value.ndim else metrics[name], value)
        assert not value.ndim or (metrics[name][~real] == 0).all()


def test_metrics_tell_who_won_by_how_much_and_where_rewards_lie():
    metrics = reward_metrics(torch.tensor([1.0, -0.5, 0.2, 0.4]), torch.ones(2, dtype=torch.bool))
    expected = {
        "accuracy": [1, 0],
        "margin": [1.5, -0.2],
        "mean_reward": [0.25, 0.3],
        "min_reward": -0.5,
        "max_reward": 1.0,
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(metrics[name], torch.tensor(value, dtype=torch.float32))


def test_a_batch_without_real_pairs_leaves_minimum_and_maximum_to_others():
    nobody = torch.zeros(1, dtype=torch.bool)
    metrics = reward_metrics(RUBBISH, nobody)
    assert (metrics["min_reward"].item(), metrics["max_reward"].item()) == (torch.inf, -torch.inf)
    assert reward_loss(RUBBISH, nobody).tolist() == [0]


def test_an_odd_number_of_rewards_is_refused():
    with pytest.raises(ValueError, match="even, got 3"):
        reward_loss(torch.zeros(3), torch.ones(1, dtype=torch.bool))
