"""Ratios between policies, per token and per sequence, and the weights that correct for data of an older policy.

Invariants: flat arrays hold the sequences one after another, `lengths` saying where each ends; a sequence's ratio is the
geometric mean of its tokens' ratios, so it does not grow with length; no exponential overflows; NaN stays NaN, so that a
broken log-probability is noticed and never masked away.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echo2.config_sections import ImportanceSamplingMode

LOG_RATIO_LIMIT = 20.0
"""Largest absolute log-ratio; beyond it the exponential would overflow, and no gradient flows."""


def exp_log_ratio(log_ratio: Tensor) -> Tensor:
    """The ratio, with its logarithm held within ±20."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def sequence_means(values: Tensor, lengths: Tensor) -> Tensor:
    """Means [M] of `values` [N] over sequences of `lengths` [M] ≥ 1 tokens, which add up to N.

    >>> sequence_means(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([2, 1])).tolist()
    [2.0, 5.0]
    """
    return torch.segment_reduce(values, "mean", lengths=lengths)


def at_tokens(values: Tensor, lengths: Tensor, tokens: int) -> Tensor:
    """One value a sequence [M], laid at each of its tokens: [N] with N = `tokens`.

    >>> at_tokens(torch.tensor([2.0, 5.0]), torch.tensor([2, 1]), 3).tolist()
    [2.0, 2.0, 5.0]
    """
    return values.repeat_interleave(lengths, output_size=tokens)


def sequence_log_ratio(log_ratio: Tensor, lengths: Tensor) -> Tensor:
    """Each sequence's mean log-ratio, at each of its tokens: from [N] to [N] (GSPO, Zheng et al. 2025)."""
    return at_tokens(sequence_means(log_ratio, lengths), lengths, len(log_ratio))


@torch.no_grad()
def importance_weights(
    proximal_log_probs: Tensor,
    behaviour_log_probs: Tensor,
    lengths: Tensor,
    mode: ImportanceSamplingMode,
    clip_min: float,
    clip_max: float,
) -> Tensor:
    """Weights w = π_proximal / π_behaviour of N tokens, [N], without a gradient; `mode` is not `off`.

    `token_…` weighs each token by its own ratio, `sequence_…` by that of its sequence. `…_truncate` brings the ratio into
    [clip_min, clip_max] (truncated importance sampling, Ionides 2008); `…_mask` makes it 0 outside of it (masked importance
    sampling, as in IcePop).

    >>> proximal, behaviour = torch.tensor([0.5, 0.4]).log(), torch.tensor([0.1, 0.4]).log()
    >>> [round(w, 6) for w in importance_weights(proximal, behaviour, torch.tensor([2]), "token_truncate", 0.0, 2.0).tolist()]
    [2.0, 1.0]
    >>> [round(w, 6) for w in importance_weights(proximal, behaviour, torch.tensor([2]), "token_mask", 0.0, 2.0).tolist()]
    [0.0, 1.0]
    >>> [round(w, 3) for w in importance_weights(proximal, behaviour, torch.tensor([2]), "sequence_mask", 0.0, 3.0).tolist()]
    [2.236, 2.236]
    """
    log_ratio = proximal_log_probs - behaviour_log_probs
    if mode in ("sequence_truncate", "sequence_mask"):
        log_ratio = sequence_log_ratio(log_ratio, lengths)
    ratio = exp_log_ratio(log_ratio)
    if mode in ("token_truncate", "sequence_truncate"):
        return ratio.clamp(clip_min, clip_max)
    return ratio.masked_fill((ratio < clip_min) | (ratio > clip_max), 0.0)
