"""What to rent for a run: from its plan and a catalog to machines, their cost, and the utilisation to expect of them.

Invariants: nothing is rented here; the needed throughput is the provisioning rule's for the latency of the machines that are
chosen; the utilisation is the twin's for just these machines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from clouds.catalog import read_catalog
from clouds.history import Figure
from clouds.offers import Job, appraise, check_learner_offer, read_shape
from echo2.capacity.activation import Activation, Demand, activate
from echo2.capacity.latencies import Latency
from echo2.capacity.limits import Limits, Quota
from echo2.capacity.model import Links, Workload, required_throughput
from echo2.capacity.offers import Candidate, Offer, Refusal, Rental
from echo2.capacity.plan import Plan
from echo2.capacity.pool import unit_of_slots
from echo2.capacity.provisioning import Provision, provision
from echo2.capacity.rented_pool import mean_latency_s, simulate_selection
from echo2.capacity.simulation import SimulationResult
from echo2.capacity.transfer import deltas_pay
from echo2.config import Config
from echo2.config_activation import ActivationSection, QuotaSection

ROUNDS = 4
"""Most times that machines are chosen."""

SAME_THROUGHPUT = 0.005
"""Share by which the throughput needed at the latency of the machines chosen may exceed the one that they were chosen for."""

MARKETS = {"both": None, "spot": True, "on-demand": False}


@dataclass(frozen=True, slots=True)
class Renting:
    """What to rent."""

    plan: Plan
    catalog: Path
    offers: int
    """Offers in the catalog."""
    clouds: int
    """Clouds in it."""
    activation: Activation
    need: Provision
    """The pool at the latency of these machines, which their throughput is to come up to."""
    simulated: SimulationResult | None
    """The twin for these machines; None where there is no plan."""
    strays: tuple[str, ...]
    """Offers of machines that run and are no candidates, each once for every machine."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run measured, and where."""

    where: str
    rentals: Sequence[Rental]
    snapshot_bytes: float | None


NOTHING_MEASURED = Measured("", (), None)


def choose_machines(config: Config, plan: Plan, measured: Measured = NOTHING_MEASURED) -> Renting:
    """What to rent from `activation.catalog` for `plan`, which was made from `config`.

    Raises UserError where catalog or model cannot be read, or no offer can be used.
    """
    offers, candidates, refused = appraise_catalog(config, plan, measured)
    activation = settle(config, plan, candidates, limits_of(config.activation), refused)
    return Renting(
        plan=plan,
        catalog=Path(config.activation.catalog),
        offers=len(offers),
        clouds=len({offer.cloud for offer in offers}),
        activation=activation,
        need=_need_at(plan, _latency_s(activation, candidates)),
        simulated=_simulated(config, plan, activation),
        strays=_strays(candidates, measured.rentals),
    )


def appraise_catalog(
    config: Config, plan: Plan, measured: Measured = NOTHING_MEASURED
) -> tuple[list[Offer], list[Candidate], list[Refusal]]:
    """All offers of `activation.catalog`, and each as candidate or refusal. Raises UserError as `choose_machines` does."""
    offers = read_catalog(Path(config.activation.catalog))
    check_learner_offer(offers, config.activation)
    job = job_of(config, plan, measured)
    return offers, *appraise(offers, job, config.activation, measured.rentals, measured.where)


def settle(
    config: Config, plan: Plan, candidates: Sequence[Candidate], limits: Limits, refused: Sequence[Refusal] = ()
) -> Activation:
    """The cheapest machines for `plan`.

    The needed throughput is at first that for the latency of the offer that is cheapest per rollout. Where the machines chosen
    are so much slower that they would need more, the choice is made anew with that.
    """

    needed_groups_per_s = _need_at(plan, _cheapest_latency_s(candidates)).groups_per_s
    for _ in range(ROUNDS):
        demand = demand_of(config, plan, needed_groups_per_s)
        found = activate(candidates, demand, limits, refused=refused, time_limit_s=config.activation.time_limit_s)
        if found.selection is None:
            break
        own_groups_per_s = _need_at(plan, mean_latency_s(found.selection)).groups_per_s
        if own_groups_per_s <= needed_groups_per_s * (1 + SAME_THROUGHPUT):
            break
        needed_groups_per_s = own_groups_per_s
    return found


def _latency_s(activation: Activation, candidates: Sequence[Candidate]) -> float:
    return _cheapest_latency_s(candidates) if activation.selection is None else mean_latency_s(activation.selection)


def _cheapest_latency_s(candidates: Sequence[Candidate]) -> float:
    return min(candidates, key=Candidate.usd_per_group).group_latency_s


def _need_at(plan: Plan, latency_s: float) -> Provision:
    return _need(plan.workload, plan.links, plan.target_utilisation, plan.terms.latency.scaled_to(latency_s))


@lru_cache(maxsize=256)
def _need(workload: Workload, links: Links, target_utilisation: float, latency: Latency) -> Provision:
    """What the provisioning rule asks for slot by slot, since machines to be rented are not the workers of the plan.

    Parts of a slot count where the need is few of them: what is needed must not depend on how fast a whole one is.
    """
    κ, unit = workload.publish_interval, unit_of_slots(required_throughput(workload) * latency.mean_s)
    return provision(workload, links, target_utilisation, latency=latency, publish_intervals=[κ], unit=unit)


def job_of(config: Config, plan: Plan, measured: Measured) -> Job:
    """What the run asks of a machine. Raises UserError where its model cannot be read."""
    settings, shape = config.activation, read_shape(config)
    full_bytes = config.capacity.snapshot_bytes or shape.weights_bytes
    if measured.snapshot_bytes is not None:
        snapshot = Figure(measured.snapshot_bytes, f"as measured in {measured.where}")
    elif config.dissemination.deltas and deltas_pay(config):
        share = config.capacity.delta_share
        snapshot = Figure(full_bytes * share, f"capacity.delta_share = {share:g}")
    else:
        snapshot = Figure(full_bytes, "all weights")
    return Job(
        shape=shape,
        prompt_tokens=settings.prompt_tokens,
        completion_tokens=settings.completion_tokens or config.sampling.max_completion_tokens,
        members=config.batch.members,
        worker_groups=config.worker.slots,
        publish_interval_s=plan.workload.publish_interval * plan.workload.learner_step_s,
        snapshot=snapshot,
        dissemination=Figure(plan.links.latency_s, f"D of the run, {plan.terms.provenance['D_tx']}"),
        group_latency_s=plan.terms.latency.mean_s,
        passes_on=config.dissemination.peers,
    )


def demand_of(config: Config, plan: Plan, groups_per_s: float) -> Demand:
    """What the learner asks for."""
    workload = plan.workload
    return Demand(
        groups_per_s=groups_per_s,
        margin=config.activation.throughput_margin,
        learner_step_s=workload.learner_step_s,
        slack_steps=workload.staleness_bound + 1 - workload.publish_interval,
        members=config.batch.members,
    )


def limits_of(settings: ActivationSection) -> Limits:
    """The limits of [activation]."""
    return Limits(
        budget_usd_per_hour=settings.budget_usd_per_hour or math.inf,
        quotas=tuple(_quota(quota) for quota in settings.quotas),
        failure_domain=settings.failure_domain,
        max_domain_share=settings.max_domain_share,
        min_on_demand_share=settings.min_on_demand_share,
        switching_horizon_h=settings.switching_horizon_h,
    )


def _quota(quota: QuotaSection) -> Quota:
    return Quota(quota.cloud, quota.accelerators, quota.region, quota.accelerator, MARKETS[quota.market])


def _simulated(config: Config, plan: Plan, activation: Activation) -> SimulationResult | None:
    if activation.selection is None:
        return None
    return simulate_selection(
        activation.selection,
        plan.workload,
        plan.links,
        plan.terms.latency,
        in_calls=plan.in_calls,
        detection_s=config.hub.heartbeat_timeout_s,
    )[0]


def _strays(candidates: Sequence[Candidate], rentals: Sequence[Rental]) -> tuple[str, ...]:
    known = {candidate.offer.name for candidate in candidates}
    return tuple(rental.offer for rental in rentals if rental.running and rental.offer not in known)
