"""Losses of single tokens, and how they are added up.

Invariants: a token's loss depends on its own sequence alone; with the token weights, the losses of a batch are one sum over
tokens divided by one number of the whole batch, so micro-batches and ranks add up to exactly what the whole batch gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from echo2.config_sections import Aggregation, KLEstimator
from echo2.learning.corrections import LOG_RATIO_LIMIT, exp_log_ratio


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """Of N tokens, each [N]; only `loss` carries a gradient."""

    loss: Tensor
    clipped_low: Tensor
    """Whether the lower bound took the gradient away."""
    clipped_high: Tensor
    """Whether the upper bound took the gradient away, or for CISPO cut the weight."""
    clipped_dual: Tensor
    """Whether the dual clip took the gradient away."""


def clipped_losses(
    log_ratio: Tensor, advantages: Tensor, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float = 0.0
) -> TokenLosses:
    """PPO's clipped losses −min(r·A, clip(r, 1 − low, 1 + high)·A) with r = exp(log_ratio); arguments are [N].

    Schulman et al. 2017; bounds apart as in DAPO (Yu et al. 2025). With `clip_ratio_c` > 0, a negative advantage's loss is at
    most −c·A (dual clip, Ye et al. 2020).

    >>> clipped_losses(torch.tensor([1.5, 5.0]).log(), torch.tensor([1.0, -1.0]), 0.2, 0.28, 3.0).loss.tolist()
    [-1.2799999713897705, 3.0]
    """
    ratio = exp_log_ratio(log_ratio)
    clipped_ratio = ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    clipped_dual = torch.zeros_like(ratio, dtype=torch.bool)
    if clip_ratio_c > 0.0:
        loss = torch.where(advantages < 0, torch.minimum(loss, -clip_ratio_c * advantages), loss)
        clipped_dual = (ratio > clip_ratio_c) & (advantages < 0)
    return TokenLosses(
        loss=loss,
        clipped_low=(ratio < 1.0 - clip_ratio_low) & (advantages < 0),
        clipped_high=(ratio > 1.0 + clip_ratio_high) & (advantages > 0),
        clipped_dual=clipped_dual,
    )


def cispo_losses(log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, clip_ratio_high: float) -> TokenLosses:
    """CISPO's losses −w·A·log π with the weight w = min(r, 1 + high), which carries no gradient; arguments are [N].

    MiniMax-M1 (2025), without a lower bound as there. No token loses its gradient.
    """
    ratio = exp_log_ratio(log_ratio.detach())
    never = torch.zeros_like(ratio, dtype=torch.bool)
    return TokenLosses(
        loss=-ratio.clamp(max=1.0 + clip_ratio_high) * advantages * log_probs,
        clipped_low=never,
        clipped_high=ratio > 1.0 + clip_ratio_high,
        clipped_dual=never,
    )


def kl_estimates(log_probs: Tensor, reference_log_probs: Tensor, estimator: KLEstimator) -> Tensor:
    """Schulman's estimates [N] of KL(π ‖ reference) at tokens that π sampled; with d = ln reference − ln π.

    k1 = −d, unbiased, may be negative; k2 = d²/2, biased; k3 = eᵈ − 1 − d, unbiased and never negative.
    The gradients with respect to ln π are 1, −d and 1 − eᵈ: that of k1 does not see the reference. In k3, d is held within ±20,
    beyond which no gradient flows.
    """
    difference = reference_log_probs - log_probs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2.0
    difference = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return difference.exp() - 1.0 - difference


def token_weights(lengths: Tensor, aggregation: Aggregation) -> Tensor:
    """What the loss of each token of a sequence counts in the batch's sum: [M] float32 for M sequences of `lengths` [M]."""
    if aggregation == "seq_mean_token_mean":
        return 1.0 / lengths.float()
    return torch.ones_like(lengths, dtype=torch.float32)


def batch_divisor(tokens: int, sequences: int, max_completion_tokens: int, aggregation: Aggregation) -> int:
    """What the weighted sum over the whole batch, of `tokens` tokens in `sequences` sequences, is divided by.

    >>> [batch_divisor(60, 4, 100, way) for way in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "dr_grpo")]
    [60, 4, 4, 400]
    """
    match aggregation:
        case "token_mean":
            return tokens
        case "dr_grpo":
            return sequences * max_completion_tokens
        case _:
            return sequences
