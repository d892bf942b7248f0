"""Policy losses on tokens small enough to do by hand."""

import pytest
import torch

from echo2.learning.losses import cispo_losses, clipped_losses


def clipped(ratios, advantages, clip_ratio_c=0.0):
    """Losses, their gradients, and which clip took a gradient away."""
    log_ratio = torch.tensor(ratios).log().requires_grad_()
    found = clipped_losses(log_ratio, torch.tensor(advantages), 0.2, 0.28, clip_ratio_c)
    found.loss.sum().backward()
    return found.loss.tolist(), log_ratio.grad.tolist(), found


def test_where_the_clip_binds_the_bound_is_the_loss_and_no_gradient_flows():
    loss, gradient, found = clipped([1.5, 0.5], [1.0, -1.0])
    assert loss == pytest.approx([-1.28, 0.8])
    assert gradient == [0.0, 0.0]
    assert (found.clipped_high.tolist(), found.clipped_low.tolist()) == ([True, False], [False, True])


def test_where_the_clip_would_flatter_it_does_not_bind():
    loss, gradient, found = clipped([1.5, 0.5], [-1.0, 1.0])
    assert loss == pytest.approx([1.5, -0.5])
    assert gradient == pytest.approx([1.5, -0.5])
    assert not found.clipped_high.any() and not found.clipped_low.any()


def test_the_two_bounds_differ():
    loss, gradient, _ = clipped([1.25, 0.75], [1.0, -1.0])
    assert loss == pytest.approx([-1.25, 0.8])
    assert gradient == pytest.approx([-1.25, 0.0])


def test_on_the_old_policy_the_gradient_is_the_negative_advantage():
    _, gradient, _ = clipped([1.0, 1.0], [0.7, -0.3])
    assert gradient == pytest.approx([-0.7, 0.3])


def test_the_dual_clip_bounds_what_a_negative_advantage_can_cost():
    loss, gradient, found = clipped([5.0, 5.0, 2.0], [-0.5, 0.5, -0.5], clip_ratio_c=3.0)
    assert loss == pytest.approx([1.5, -0.64, 1.0])
    assert gradient == pytest.approx([0.0, 0.0, 1.0])
    assert found.clipped_dual.tolist() == [True, False, False]


def test_cispo_cuts_the_weight_and_keeps_the_gradient():
    log_probs = torch.tensor([0.6, 0.1]).log().requires_grad_()
    behaviour, advantages = torch.tensor([0.2, 0.2]).log(), torch.tensor([1.0, -1.0])
    found = cispo_losses(log_probs, log_probs - behaviour, advantages, 0.28)
    found.loss.sum().backward()
    assert log_probs.grad.tolist() == pytest.approx([-1.28, 0.5])
    assert found.loss.tolist() == pytest.approx((torch.tensor([-1.28, 0.5]) * log_probs.detach()).tolist())
    assert found.clipped_high.tolist() == [True, False]
