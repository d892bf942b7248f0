"""The policy loss and what is watched beside it, over flat arrays of completion tokens.

Invariant: everything is a sum (or a maximum) over tokens, so that micro-batches add up to exactly what the whole batch gives
once the sum is divided by the tokens of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Largest absolute log-ratio; beyond it the exponential would overflow, and no gradient flows."""


@dataclass(frozen=True, slots=True)
class TokenSums:
    """Sums over the N tokens of a micro-batch, each a scalar tensor; only `loss` carries a gradient."""

    loss: Tensor
    clipped_low: Tensor
    """Tokens whose ratio is below 1 − low while their advantage is negative, so that the clip binds."""
    clipped_high: Tensor
    """Tokens whose ratio is above 1 + high while their advantage is positive."""
    kl: Tensor
    """Of r − 1 − ln r, with r the ratio: Schulman's k3 estimate of KL(behaviour ‖ current)."""
    ratio: Tensor
    max_ratio: Tensor
    """Largest ratio, a maximum rather than a sum."""


def clipped_policy_loss(
    log_probs: Tensor, behaviour_log_probs: Tensor, advantages: Tensor, clip_ratio_low: float, clip_ratio_high: float
) -> TokenSums:
    """PPO's clipped loss of N ≥ 1 tokens against the policy that sampled them; all arguments are [N].

    Per token −min(r·A, clip(r, 1 − low, 1 + high)·A), with r = π(token) / π_behaviour(token); bounds apart as in DAPO.
    """
    ratio = (log_probs - behaviour_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    clipped_ratio = ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages).sum()
    with torch.no_grad():
        return TokenSums(
            loss=loss,
            clipped_low=((ratio < 1.0 - clip_ratio_low) & (advantages < 0)).sum(),
            clipped_high=((ratio > 1.0 + clip_ratio_high) & (advantages > 0)).sum(),
            kl=(ratio - 1.0 - ratio.log()).sum(),
            ratio=ratio.sum(),
            max_ratio=ratio.max(),
        )
