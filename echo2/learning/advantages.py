"""Advantages of a batch's members.

Invariants: a group is judged by its identity, never by its place in a batch or the text of its prompt; a member without a
reward takes no part and is not a 0; advantages are made from the whole batch, before it is cut for micro-batches or ranks and
before any member is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from echo2.config_sections import AdvantageEstimator

STD_FLOOR = 1e-4
"""Added to the standard deviation, so that rewards which differ by rounding alone give no large advantages."""


def group_advantages(rewards: Sequence[float]) -> np.ndarray:
    """Advantages [n] of one group by itself: (reward − mean) / (unbiased standard deviation + 1e-4), as in GRPO."""
    return batch_advantages([rewards], "grpo")[0]


def batch_advantages(rewards: Sequence[Sequence[float]], estimator: AdvantageEstimator) -> list[np.ndarray]:
    """Advantages of all groups, from the rewards of each group's scored members.

    - `grpo`: (r − group mean) / (group std + 1e-4), Shao et al. 2024;
    - `mean_only`: r − group mean, Dr. GRPO (Liu et al. 2025);
    - `batch`: (r − group mean) / (std of all rewards of the batch + 1e-4), Lite PPO (Liu et al. 2025);
    - `rloo`: r − mean of the group's other members, Ahmadian et al. 2024.

    Standard deviations are unbiased. A single member, and rewards that are all equal (compared exactly), give exactly 0 in
    each. Raises ValueError for a reward that is None or not finite: such a member has to be left out.

    >>> [values.tolist() for values in batch_advantages([[1.0, 0.0], [0.5, 0.5], [1.0]], "mean_only")]
    [[0.5, -0.5], [0.0, 0.0], [0.0]]
    >>> batch_advantages([[1.0, 0.0, 0.0]], "rloo")[0].tolist()
    [1.0, -0.5, -0.5]
    """
    groups = [_finite(values) for values in rewards]
    batch_std = _std(np.concatenate(groups)) if groups else 0.0
    return [_advantages(group, estimator, batch_std) for group in groups]


def soft_overlong_penalties(
    lengths: Sequence[int], max_completion_tokens: int, buffer_tokens: int, penalty_factor: float
) -> np.ndarray:
    """What DAPO's soft overlong punishment adds to the rewards of completions of `lengths` tokens: 0 to −`penalty_factor`.

    It falls linearly over the last `buffer_tokens` before `max_completion_tokens` (Yu et al. 2025).

    >>> soft_overlong_penalties([5, 6, 8, 10], max_completion_tokens=10, buffer_tokens=4, penalty_factor=1.0).tolist()
    [0.0, 0.0, -0.5, -1.0]
    """
    excess = np.asarray(lengths, np.float64) - (max_completion_tokens - buffer_tokens)
    return 0.0 - penalty_factor * np.clip(excess / buffer_tokens, 0.0, 1.0)


def _finite(rewards: Sequence[float]) -> np.ndarray:
    values = np.asarray(rewards, np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"rewards {values.tolist()} are not all finite: a member that could not be scored must be left out")
    return values


def _advantages(rewards: np.ndarray, estimator: AdvantageEstimator, batch_std: float) -> np.ndarray:
    members = len(rewards)
    if members < 2 or (rewards == rewards[0]).all():
        return np.zeros(members)
    centred = rewards - rewards.mean()
    match estimator:
        case "grpo":
            return centred / (_std(rewards) + STD_FLOOR)
        case "mean_only":
            return centred
        case "batch":
            return centred / (batch_std + STD_FLOOR)
        case "rloo":
            return centred * members / (members - 1)


def _std(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
