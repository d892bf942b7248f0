"""How far the learner's log-probabilities are from those that each worker sampled with.

Invariants: a sequence's tokens are counted for the worker that made them; nothing here judges a worker, since a difference is
comparable only between tokens that were trained at the same step and sampled with the same version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import isfinite

import torch
from torch import Tensor

from echo2.learning.batch import Share
from echo2.protocol import LogProbDifference

WORKER_MAX = "sampling/sampling_logp_difference/worker_max"


def log_prob_differences(
    share: Share, distances: Sequence[Tensor], gathered: Callable[[Tensor], Tensor]
) -> list[LogProbDifference]:
    """One difference for each worker and group of the whole batch; a sequence whose distance is not finite is left out.

    `distances` [M, 2] has for each part of `share` the mean and the largest |ln π₀ − ln μ| of its M sequences; `gathered` makes
    of this rank's row [n] the rows of all ranks [ranks, n].
    """
    table = torch.zeros(share.sequences, 2, device=distances[0].device)
    for part, found in zip(share.parts, distances, strict=True):
        if part.counts:
            table[part.origins] = found
    # Each sequence is on one rank, and zero on all others.
    table = gathered(table.flatten()).sum(0).reshape(-1, 2)
    shares: dict[tuple[int, str], list[tuple[int, int, int, float, float]]] = defaultdict(list)
    for (group, member), (mean, largest) in zip(share.origins, table.tolist(), strict=True):
        if isfinite(mean):
            versions = member.rollout.versions
            sequence = (int(versions.min()), int(versions.max()), len(versions), mean, largest)
            shares[group.group_id, member.worker_id].append(sequence)
    differences = []
    for (group_id, worker_id), sequences in shares.items():
        oldest, newest, tokens, means, largest_ones = zip(*sequences, strict=True)
        differences.append(
            LogProbDifference(
                group_id=group_id,
                worker_id=worker_id,
                oldest_version=min(oldest),
                newest_version=max(newest),
                tokens=sum(tokens),
                mean=weighted_mean(means, tokens),
                max=max(largest_ones),
            )
        )
    return differences


def worker_metrics(differences: Sequence[LogProbDifference]) -> dict[str, float]:
    """The mean difference of the worker that has the largest; empty where there is none."""
    of_worker: dict[str, list[LogProbDifference]] = defaultdict(list)
    for difference in differences:
        of_worker[difference.worker_id].append(difference)
    means = [weighted_mean([d.mean for d in own], [d.tokens for d in own]) for own in of_worker.values()]
    return {WORKER_MAX: max(means)} if means else {}


def weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    """Σ value · weight / Σ weight."""
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
