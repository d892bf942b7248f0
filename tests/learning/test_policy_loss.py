"""The clipped loss on tokens small enough to do by hand."""

import math

import pytest
import torch

from echo2.learning.losses import clipped_policy_loss


def losses(ratios, advantages):
    log_probs = torch.tensor(ratios).log().requires_grad_()
    sums = clipped_policy_loss(log_probs, torch.zeros(len(ratios)), torch.tensor(advantages), 0.2, 0.28)
    sums.loss.backward()
    return sums, log_probs.grad.tolist()


def test_where_the_clip_binds_the_bound_is_the_loss_and_no_gradient_flows():
    sums, gradient = losses([1.5, 0.5], [1.0, -1.0])
    assert sums.loss.item() == pytest.approx(-1.28 + 0.8)
    assert gradient == [0.0, 0.0]
    assert (sums.clipped_high.item(), sums.clipped_low.item()) == (1, 1)


def test_where_the_clip_would_flatter_it_does_not_bind():
    sums, gradient = losses([1.5, 0.5], [-1.0, 1.0])
    assert sums.loss.item() == pytest.approx(1.5 - 0.5)
    assert gradient == pytest.approx([1.5, -0.5])
    assert (sums.clipped_high.item(), sums.clipped_low.item()) == (0, 0)


def test_the_two_bounds_differ():
    sums, gradient = losses([1.25, 0.75], [1.0, -1.0])
    assert sums.loss.item() == pytest.approx(-1.25 + 0.8)
    assert gradient == pytest.approx([-1.25, 0.0])


def test_on_the_behaviour_policy_the_gradient_is_the_negative_advantage():
    sums, gradient = losses([1.0, 1.0], [0.7, -0.3])
    assert gradient == pytest.approx([-0.7, 0.3])
    assert (sums.kl.item(), sums.ratio.item(), sums.max_ratio.item()) == pytest.approx((0.0, 2.0, 1.0))


def test_kl_and_ratios_are_sums_over_tokens():
    sums, _ = losses([2.0, 0.5], [1.0, 1.0])
    assert sums.kl.item() == pytest.approx((2.0 - 1.0 - math.log(2.0)) + (0.5 - 1.0 + math.log(2.0)))
    assert (sums.ratio.item(), sums.max_ratio.item()) == pytest.approx((2.5, 2.0))


def test_k3_estimates_the_divergence_of_the_behaviour_policy_from_the_current_one():
    behaviour, current = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    tokens = torch.multinomial(behaviour, 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    sums = clipped_policy_loss(current.log()[tokens], behaviour.log()[tokens], torch.zeros(len(tokens)), 0.2, 0.28)
    divergence = (behaviour * (behaviour / current).log()).sum()
    assert sums.kl.item() / len(tokens) == pytest.approx(divergence.item(), rel=0.03)


def test_a_huge_ratio_stays_finite():
    log_probs = torch.tensor([0.0], requires_grad=True)
    sums = clipped_policy_loss(log_probs, torch.tensor([-1000.0]), torch.tensor([-1.0]), 0.2, 0.28)
    sums.loss.backward()
    assert math.isfinite(sums.loss.item())
    assert log_probs.grad.item() == 0.0
