"""The terms of the capacity model: what it needs to know beside the configuration, and where each figure comes from.

Invariants: every term has a provenance that says whether it was guessed or measured; estimates before a run and measurements
after it have the same form; seconds, and groups per second.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from echo2.capacity.latencies import Latency, Lognormal
from echo2.capacity.model import Links, Workload, required_throughput
from echo2.capacity.pool import PoolUnit, unit_of_slots
from echo2.capacity.provisioning import simulate_pool
from echo2.capacity.simulation import SimulationResult
from echo2.capacity.slow_end import least_integer, slow_end_latency_s
from echo2.capacity.transfer import UNSEEN, SeenLinks, changed_transfer, transfer_of
from echo2.errors import UserError

if TYPE_CHECKING:
    from echo2.config import Config

TermName = Literal["T", "L", "D_tx", "D_fix", "α", "μ"]
TERM_NAMES: tuple[TermName, ...] = ("T", "L", "D_tx", "D_fix", "α", "μ")
ESTIMATE, GIVEN = "estimate from [capacity]", "given"
ENGINES_IN_CALLS = ("transformers", "simulated")
"""Engines that generate a set of groups at a time and take the next when the last of them is done."""
MOST_CALL_SLOTS = 1 << 16
FIRST_TRANSFER_S = 0.1
"""D_tx where nothing is known of it."""


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
    worker_slots: int
    """Groups that one worker generates at a time."""
    provenance: Mapping[TermName, str]
    """Where each term comes from, in words."""
    links_seen: SeenLinks = UNSEEN
    """What was measured of snapshots and links, which D_tx follows from."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UserError(f"workers = {self.workers} make no pool: give the number of workers that complete groups")
        if not (math.isfinite(self.groups_per_s) and self.groups_per_s > 0):
            raise UserError(
                f"groups_per_s (μ) = {self.groups_per_s!r} is not a finite number above 0: give the groups that the pool "
                "completes per second"
            )

    @property
    def slots(self) -> float:
        """Groups that the pool has under way while there is work: μ·L, by Little's law."""
        return self.groups_per_s * self.latency.mean_s

    def unit(self, config: Config) -> PoolUnit:
        """What the pool grows by: a worker where the engine generates in calls, else a slot or a part of one."""
        if config.worker.engine not in ENGINES_IN_CALLS:
            return unit_of_slots(required_throughput(self.workload(config)) * self.latency.mean_s)
        return PoolUnit(self.worker_slots, in_calls=True, effective_slots=self.slots / self.workers)

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


def what_if(terms: Terms, measured_in: Config, config: Config, given: Collection[str]) -> Terms:
    """`terms` that were measured with one configuration, as they are to be expected with another one.

    The learner's work grows with B, μ with the workers, and D_tx as `Transfer.seconds` does with the workers, the uplinks and
    what travels, where these are known. Keys of [capacity] that the user has `given` count instead of what was measured.
    """
    changes: dict[str, Any] = {}
    provenance = dict(terms.provenance)
    if (groups := config.batch.groups) != (former := measured_in.batch.groups):
        changes["learner_step_s"] = terms.learner_step_s * groups / former
        provenance["T"] = f"in proportion to B = {groups}; {terms.provenance['T']} with B = {former}"
    workers = config.fleet.workers or terms.workers
    before, after = changed_transfer(measured_in, config, terms.links_seen, given)
    if before and after and (ratio := after.seconds(workers) / before.seconds(terms.workers)) != 1.0:
        changes["transfer_s"] = terms.transfer_s * ratio
        provenance["D_tx"] = f"in proportion to {after.told(workers)}; {terms.provenance['D_tx']} with {terms.workers} workers"
    terms = replace(terms.with_workers(workers), provenance=provenance, **changes)
    return _with_given(terms, config, given)


def _with_given(terms: Terms, config: Config, given: Collection[str]) -> Terms:
    capacity, mean_s, cv = config.capacity, config.capacity.group_latency_s, config.capacity.group_latency_cv
    changes: dict[str, tuple[TermName, dict[str, Any]]] = {
        "learner_step_s": ("T", {"learner_step_s": capacity.learner_step_s}),
        "group_latency_s": ("L", {"latency": terms.latency.scaled_to(mean_s)}),
        "group_latency_cv": ("L", {"latency": Lognormal(terms.latency.mean_s, cv)}),
        "worker_groups_per_s": ("μ", {"groups_per_s": terms.workers * capacity.worker_groups_per_s}),
        "accepted_share": ("α", {"accepted_share": capacity.accepted_share}),
        "transfer_s": ("D_tx", {"transfer_s": capacity.transfer_s or 0.0}),
        "dissemination_fixed_s": ("D_fix", {"fixed_s": capacity.dissemination_fixed_s}),
    }
    chosen = [changes[key] for key in changes if f"capacity.{key}" in given]
    if {"capacity.group_latency_s", "capacity.group_latency_cv"} <= set(given):
        chosen.append(("L", {"latency": Lognormal(mean_s, cv)}))
    for name, change in chosen:
        terms = replace(terms, provenance={**terms.provenance, name: GIVEN}, **change)
    return terms


def estimate_terms(config: Config, workers: int) -> Terms:
    """What [capacity] lets expect of so many workers; D_tx that is not given follows from what travels and the links."""
    given, transfer = config.capacity, transfer_of(config)
    latency = Lognormal(given.group_latency_s, given.group_latency_cv)
    transfer_s, transfer_source = given.transfer_s, ESTIMATE
    if transfer_s is None:
        transfer_s = FIRST_TRANSFER_S
        if transfer is not None:
            transfer_s, transfer_source = transfer.seconds(workers), transfer.told(workers)
    return Terms(
        learner_step_s=given.learner_step_s,
        latency=latency,
        groups_per_s=workers * given.worker_groups_per_s,
        accepted_share=given.accepted_share,
        transfer_s=transfer_s,
        fixed_s=given.dissemination_fixed_s,
        workers=workers,
        worker_slots=call_slots(latency, given.worker_groups_per_s),
        provenance={**dict.fromkeys(TERM_NAMES, ESTIMATE), "D_tx": transfer_source},
    )


def call_slots(latency: Latency, groups_per_s: float) -> int:
    """Slots that complete so many groups per second in calls, each as long as its slowest group; at least 1."""

    def suffice(slots: int) -> bool:
        return slots >= groups_per_s * slow_end_latency_s(latency, slots, slots)

    most = 1
    while not suffice(most) and most < MOST_CALL_SLOTS:
        most *= 2
    return least_integer(suffice, 1, most) or most


def predict_run(config: Config, terms: Terms) -> SimulationResult:
    """The twin for `config`'s B, S and κ with these terms; raises UserError where a term is impossible."""
    return simulate_pool(terms.workload(config), terms.links, terms.slots, terms.latency, terms.unit(config))
