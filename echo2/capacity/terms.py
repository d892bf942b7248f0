"""The terms of the capacity model: what it needs to know beside the configuration, and where each figure comes from.

Invariants: every term has a provenance that says whether it was guessed or measured; estimates before a run and measurements
after it have the same form; seconds, and groups per second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from echo2.capacity.latencies import Latency, Lognormal
from echo2.capacity.model import Links, Prediction, Workload
from echo2.capacity.slow_end import predict_pool
from echo2.errors import UserError

if TYPE_CHECKING:
    from echo2.config import Config

TermName = Literal["T", "L", "D_tx", "D_fix", "α", "μ"]
TERM_NAMES: tuple[TermName, ...] = ("T", "L", "D_tx", "D_fix", "α", "μ")
ESTIMATE = "estimate from [capacity]"


@dataclass(frozen=True, slots=True)
class Terms:
    """One figure per term; `Workload` and `Links` refuse impossible ones."""

    learner_step_s: float
    """T: seconds of learner work per step."""
    latency: Latency
    """L as a distribution: seconds from a lease to its scored group, for one group."""
    groups_per_s: float
    """μ: groups per second that the whole pool completes."""
    accepted_share: float
    """α: share of generated groups that are trained."""
    transfer_s: float
    """D_tx: seconds that one snapshot occupies the links."""
    fixed_s: float
    """D_fix: the rest of the dissemination latency."""
    workers: int
    """Workers that the pool consists of."""
    provenance: Mapping[TermName, str]
    """Where each term comes from, in words."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UserError(f"workers = {self.workers} make no pool: give the number of workers that complete groups")
        if not (math.isfinite(self.groups_per_s) and self.groups_per_s > 0):
            raise UserError(
                f"groups_per_s (μ) = {self.groups_per_s!r} is not a finite number above 0: give the groups that the pool "
                "completes per second"
            )

    @property
    def slots(self) -> int:
        """Groups that the pool has under way when no slot is idle: μ·L, by Little's law; at least 1."""
        return max(1, round(self.groups_per_s * self.latency.mean_s))

    @property
    def links(self) -> Links:
        """D_tx and D_fix."""
        return Links(self.transfer_s, self.fixed_s)

    def workload(self, config: Config) -> Workload:
        """B, S and κ from the configuration, T, L and α from the terms."""
        return Workload(
            learner_step_s=self.learner_step_s,
            groups_per_batch=config.batch.groups,
            staleness_bound=config.staleness.bound,
            publish_interval=config.staleness.publish_interval,
            group_latency_s=self.latency.mean_s,
            accepted_share=self.accepted_share,
        )

    def with_workers(self, workers: int) -> Terms:
        """The same with another number of workers of the same speed."""
        return replace(self, workers=workers, groups_per_s=self.groups_per_s / self.workers * workers)


def estimate_terms(config: Config, workers: int) -> Terms:
    """What [capacity] lets expect of so many workers."""
    given = config.capacity
    return Terms(
        learner_step_s=given.learner_step_s,
        latency=Lognormal(given.group_latency_s, given.group_latency_cv),
        groups_per_s=workers * given.worker_groups_per_s,
        accepted_share=given.accepted_share,
        transfer_s=given.transfer_s,
        fixed_s=given.dissemination_fixed_s,
        workers=workers,
        provenance=dict.fromkeys(TERM_NAMES, ESTIMATE),
    )


def predict_run(config: Config, terms: Terms) -> Prediction:
    """The closed form for `config`'s B, S and κ with these terms; raises UserError where a term is impossible."""
    return predict_pool(terms.workload(config), terms.links, terms.slots, terms.latency)
