"""Which worker's log-probabilities are not what its versions say.

The learner's distance from a sampled log-probability grows with every update between the version that sampled and the step that
trains, so it means something only beside that of other workers: groups that were trained at the same step and sampled with the
same versions are alike in all but their worker, whatever their length and staleness. A worker whose weights are others than
those of the version that it claims, or whose log-probabilities are wrong, is farther away.

Invariants: only groups of the same step and versions are compared; who is *nearer* than others is never accused; a worker
stands out by ranks, which no outlier and no distribution can deceive, and by a distance beyond what number formats make. Where
most workers are wrong in the same way, or there is only one, nobody stands out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

import numpy as np

from echo2.hub.database import Database
from echo2.protocol import LogProbDifference

WINDOW_STEPS = 20
"""Steps that are looked back on."""
LEAST_TOKENS = 1000
LEAST_SCORE = 6.0
"""Standard deviations: one honest worker in 10⁹ looks would reach it by chance."""
LEAST_RATIO = 1.5
LEAST_EXCESS = 0.02
"""Nats; bfloat16 makes 0.006 on average, other kernels and number formats somewhat more."""

Stratum = tuple[int, int, int]
"""The step, and the oldest and newest version of the tokens."""


@dataclass(frozen=True, slots=True)
class WorkerMismatch:
    """One worker's distance from the learner, |ln π₀ − ln μ| in nats, beside that of the others."""

    worker_id: str
    groups: int
    tokens: int
    mean: float
    max: float
    compared_tokens: int
    """Those trained at a step together with other workers' of the same versions."""
    compared_mean: float | None
    """Over these tokens; None where there are none."""
    others_mean: float | None
    """Of the other workers at the same steps and versions, weighted as this worker's tokens are."""
    score: float
    """Van Elteren's statistic (1960): Wilcoxon's rank sums of the strata, in standard deviations above what chance gives."""

    @property
    def stands_out(self) -> bool:
        if self.others_mean is None or self.compared_mean is None or self.compared_tokens < LEAST_TOKENS:
            return False
        far = self.compared_mean >= max(LEAST_RATIO * self.others_mean, self.others_mean + LEAST_EXCESS)
        return far and self.score >= LEAST_SCORE

    def __str__(self) -> str:
        return (
            f"the log-probabilities of worker {self.worker_id} differ from the learner's by {self.compared_mean:.3g} nats on "
            f"average over {self.compared_tokens} tokens, those of other workers with the same versions at the same steps by "
            f"{self.others_mean:.3g} ({self.score:.1f} standard deviations apart): its weights are not those of the versions "
            f"that it claims, or its engine computes them wrongly; end it, and look into its log"
        )


def recent_mismatches(database: Database) -> list[WorkerMismatch]:
    """Of all workers with groups that were trained in the last `WINDOW_STEPS` committed steps, by id."""
    rows = database.rows("SELECT * FROM log_prob_differences WHERE step > (SELECT MAX(step) FROM steps) - ?", WINDOW_STEPS)
    # What the ledger holds was checked when it came in.
    return mismatches((row["step"], LogProbDifference.model_construct(None, **dict(row))) for row in rows)


def mismatches(differences: Iterable[tuple[int, LogProbDifference]]) -> list[WorkerMismatch]:
    """Every worker held against all others, by id; `differences` are given with the step that trained them."""
    strata: dict[Stratum, list[LogProbDifference]] = defaultdict(list)
    for step, difference in differences:
        strata[step, difference.oldest_version, difference.newest_version].append(difference)
    worker_ids = sorted({difference.worker_id for members in strata.values() for difference in members})
    place = {worker_id: number for number, worker_id in enumerate(worker_ids)}
    sums = _Sums(len(worker_ids))
    for members in strata.values():
        sums.add(
            np.array([place[difference.worker_id] for difference in members]),
            np.array([difference.tokens for difference in members]),
            np.array([difference.mean for difference in members]),
            np.array([difference.max for difference in members]),
        )
    return [sums.mismatch(number, worker_id) for worker_id, number in place.items()]


class _Sums:
    """What the strata add up to, for W workers; each array is [W]."""

    def __init__(self, workers: int) -> None:
        self._all_groups = np.zeros(workers, np.int64)
        self._all_tokens = np.zeros(workers)
        self._all_nats = np.zeros(workers)
        self._max = np.zeros(workers)
        self._tokens = np.zeros(workers)
        self._nats = np.zeros(workers)
        self._others_nats = np.zeros(workers)
        self._excess = np.zeros(workers)
        self._variance = np.zeros(workers)

    def add(self, workers: np.ndarray, tokens: np.ndarray, means: np.ndarray, largest: np.ndarray) -> None:
        """A stratum of N groups, arrays [N]."""

        def by_worker(values: np.ndarray) -> np.ndarray:
            return np.bincount(workers, values, len(self._tokens))

        size, ranks = len(workers), _midranks(means)
        groups, own_tokens, own_nats = by_worker(np.ones(size)), by_worker(tokens), by_worker(tokens * means)
        self._all_groups += groups.astype(np.int64)
        self._all_tokens += own_tokens
        self._all_nats += own_nats
        np.maximum.at(self._max, workers, largest)
        compared = (groups > 0) & (groups < size)
        if not compared.any():
            return
        others_mean = (own_nats.sum() - own_nats)[compared] / (own_tokens.sum() - own_tokens)[compared]
        self._tokens[compared] += own_tokens[compared]
        self._nats[compared] += own_nats[compared]
        self._others_nats[compared] += others_mean * own_tokens[compared]
        # Each stratum counts by 1 / (size + 1), with which a group of a small one says as much as one of a large one.
        self._excess += (by_worker(ranks) - groups * (size + 1) / 2) / (size + 1)
        self._variance += groups * (size - groups) / size * ranks.var(ddof=1) / (size + 1) ** 2

    def mismatch(self, number: int, worker_id: str) -> WorkerMismatch:
        tokens, variance = float(self._tokens[number]), float(self._variance[number])
        return WorkerMismatch(
            worker_id=worker_id,
            groups=int(self._all_groups[number]),
            tokens=int(self._all_tokens[number]),
            mean=float(self._all_nats[number] / self._all_tokens[number]),
            max=float(self._max[number]),
            compared_tokens=int(tokens),
            compared_mean=float(self._nats[number]) / tokens if tokens else None,
            others_mean=float(self._others_nats[number]) / tokens if tokens else None,
            score=float(self._excess[number]) / sqrt(variance) if variance > 0.0 else 0.0,
        )


def _midranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share the mean of theirs.

    >>> _midranks(np.array([3.0, 1.0, 3.0])).tolist()
    [2.5, 1.0, 2.5]
    """
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[places]
