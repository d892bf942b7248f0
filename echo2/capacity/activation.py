"""Activation: which offers to rent so that the learner is kept busy at the least cost, and why these and not others.

Invariants: pure functions; every offer handed in is chosen or refused, with a sentence that holds the numbers and is true of
the plan; an impossible demand is answered with what stands in its way and with plans that a single change would allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from echo2.capacity.limits import TOLERANCE, Limits
from echo2.capacity.offers import Candidate, Refusal
from echo2.capacity.relaxations import Relaxation, RelaxationSearch, is_fresh
from echo2.capacity.selection import Selection, obstacles, select
from echo2.capacity.tables import number, percent
from echo2.errors import WaitTimeout

SIDE_SEARCH_S = 2.0
"""Longest search for what the plan would be without one of its limits."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What the learner asks of the rented machines."""

    groups_per_s: float
    """The throughput that keeps it busy."""
    margin: float
    """Share by which the rented throughput exceeds it."""
    learner_step_s: float
    """T."""
    slack_steps: int
    """S + 1 − κ: steps within which a group must have been made and scored."""
    members: int
    """G."""

    @property
    def needed_groups_per_s(self) -> float:
        """R: with the margin."""
        return self.groups_per_s * (1 + self.margin)

    @property
    def fresh_s(self) -> float:
        """(S + 1 − κ)·T: what D + L may come to."""
        return self.slack_steps * self.learner_step_s

    def usd_per_1000_rollouts(self, usd_per_group: float) -> float:
        """Cost per rollout of a group that costs so much, times 1,000."""
        return 1000 * usd_per_group / self.members


@dataclass(frozen=True, slots=True)
class Choice:
    """An offer that is rented, how often, and why."""

    candidate: Candidate
    count: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Activation:
    """The plan of what to rent."""

    demand: Demand
    limits: Limits
    selection: Selection | None
    """None where no plan keeps to the limits."""
    choices: tuple[Choice, ...]
    """Cheapest per rollout first."""
    refusals: tuple[Refusal, ...]
    limit_costs: tuple[tuple[str, float], ...]
    """Limits without which the plan would cost less, and by how many USD per hour."""
    obstacle: str
    """Why there is no plan; empty where there is one."""
    relaxations: tuple[Relaxation, ...]
    """What would allow one, each by itself."""

    @property
    def usd_per_1000_rollouts(self) -> float:
        """Rent and traffic of the plan over what its machines complete."""
        chosen = self.selection
        if chosen is None or not chosen.groups_per_s:
            return math.nan
        return self.demand.usd_per_1000_rollouts(chosen.usd_per_hour / 3600 / chosen.groups_per_s)


def activate(
    candidates: Sequence[Candidate],
    demand: Demand,
    limits: Limits,
    *,
    refused: Sequence[Refusal] = (),
    time_limit_s: float = 10.0,
) -> Activation:
    """The cheapest plan for the demand. `refused` are offers that were no candidates, and are reported with the others.

    A search that finds nothing in time is answered like one that proves that there is nothing, and its obstacle says which it
    was. Raises UserError where scipy is missing.
    """
    fresh = [candidate for candidate in candidates if is_fresh(candidate, demand.fresh_s)]
    stale = [_too_stale(candidate, demand) for candidate in candidates if not is_fresh(candidate, demand.fresh_s)]
    needed = demand.needed_groups_per_s
    selection, reason, failing = None, "no plan keeps to the limits", "gives"
    try:
        selection = select(fresh, needed, limits, time_limit_s) if fresh else None
    except WaitTimeout:
        reason = "no plan was found in time"
        failing = f"was found in activation.time_limit_s = {number(time_limit_s)} to give"
    if selection is None:
        search = RelaxationSearch(candidates, demand.learner_step_s, demand.slack_steps, needed, limits, SIDE_SEARCH_S)
        relaxations = search.least()
        obstacle = _obstacle(len(candidates), len(fresh), demand, limits, failing, relaxations)
        others = [Refusal(c.offer, reason, obstacle) for c in fresh]
        return Activation(demand, limits, None, (), (*refused, *stale, *others), (), obstacle, relaxations)
    choices = [Choice(c, n, _why_chosen(selection, c, n, demand)) for c, n in selection.chosen]
    left = [c for c, n in zip(selection.candidates, selection.counts, strict=True) if not n]
    return Activation(
        demand,
        limits,
        selection,
        tuple(sorted(choices, key=lambda choice: choice.candidate.usd_per_group())),
        (*refused, *stale, *(_why_refused(selection, candidate, demand) for candidate in left)),
        tuple(_limit_costs(selection, needed)),
        "",
        (),
    )


def _too_stale(candidate: Candidate, demand: Demand) -> Refusal:
    return Refusal(
        candidate.offer,
        "too stale",
        f"D + L = {number(candidate.dissemination_s)} s + {number(candidate.group_latency_s)} s exceeds the "
        f"(S + 1 − κ)·T = {demand.slack_steps} · {number(demand.learner_step_s)} s that the staleness bound allows",
    )


def _why_chosen(selection: Selection, candidate: Candidate, count: int, demand: Demand) -> str:
    rate = candidate.effective_groups_per_s
    per_1000 = demand.usd_per_1000_rollouts(candidate.usd_per_group())
    kept = min(count, candidate.running)
    how = f"; {kept} of them run already" if kept else ""
    return (
        f"{number(per_1000)} USD per 1,000 rollouts; {count} × {number(rate)} groups/s give "
        f"{percent(count * rate / selection.groups_per_s)} of the throughput{how}"
    )


def _why_refused(selection: Selection, candidate: Candidate, demand: Demand) -> Refusal:
    """The first reason that holds: not to be had, dearer, not worth a start, a limit, or its size."""
    offer, limits = candidate.offer, selection.limits
    if not candidate.launchable and not candidate.running:
        return Refusal(offer, "not to be had", "no machine of it can be launched now")
    usd, dearest = candidate.usd_per_group(), max(c.usd_per_group() for c, _ in selection.chosen)
    shown, bar = (number(demand.usd_per_1000_rollouts(each)) for each in (usd, dearest))
    if usd >= dearest:
        return Refusal(offer, "dearer", f"{shown} USD per 1,000 rollouts; the dearest chosen costs {bar}")
    started = candidate.usd_per_group(limits.start_usd_per_hour(candidate))
    dearest_started = max(_with_start(selection, c, n) for c, n in selection.chosen)
    if not candidate.running and started >= dearest_started:
        with_starts = [number(demand.usd_per_1000_rollouts(each)) for each in (started, dearest_started)]
        return Refusal(
            offer,
            "not worth a start",
            f"{shown} USD per 1,000 rollouts, but {with_starts[0]} with the {number(candidate.start_usd)} USD of its start "
            f"spread over {number(limits.switching_horizon_h)} h; the dearest chosen, started if need be, {with_starts[1]}",
        )
    broken = obstacles(selection, candidate, demand.needed_groups_per_s)
    if broken:
        return Refusal(offer, "at a limit", f"{shown} USD per 1,000 rollouts, but {'; '.join(broken)}")
    size = (
        f"{shown} USD per 1,000 rollouts, the dearest chosen {bar}, but machines come whole: one gives "
        f"{percent(candidate.effective_groups_per_s / demand.needed_groups_per_s)} of the need for "
        f"{number(candidate.usd_per_hour)} USD/h"
    )
    if selection.gap:
        return Refusal(offer, "not in the best plan found", f"{size}, and the search ended before all plans with it were tried")
    return Refusal(offer, "no cheaper plan with it", f"{size}, and no plan with it costs less")


def _with_start(selection: Selection, candidate: Candidate, count: int) -> float:
    """Cost per group of the dearest of `count` machines: with a start, if one of them is launched."""
    launched = count > candidate.running
    return candidate.usd_per_group(selection.limits.start_usd_per_hour(candidate) if launched else 0.0)


def _limit_costs(selection: Selection, needed_groups_per_s: float) -> Iterator[tuple[str, float]]:
    """What each limit costs: the plan's cost less that of the cheapest plan without this limit."""
    limits = selection.limits
    without = {f"quota {q.name}": replace(limits, quotas=tuple(p for p in limits.quotas if p != q)) for q in limits.quotas}
    if limits.caps_domains:
        share = percent(limits.max_domain_share)
        without[f"at most {share} in one {limits.failure_domain}"] = replace(limits, max_domain_share=1.0)
    if limits.min_on_demand_share:
        share = percent(limits.min_on_demand_share)
        without[f"at least {share} on demand"] = replace(limits, min_on_demand_share=0.0)
    for name, freer in without.items():
        try:
            cheaper = select(selection.candidates, needed_groups_per_s, freer, SIDE_SEARCH_S)
        except WaitTimeout:
            continue
        saved = 0.0 if cheaper is None else selection.cost_usd_per_hour - cheaper.cost_usd_per_hour
        if saved > TOLERANCE * selection.cost_usd_per_hour:
            yield name, saved


def _obstacle(offers: int, fresh: int, demand: Demand, limits: Limits, failing: str, relaxations: Sequence[Relaxation]) -> str:
    """Why there is no plan, in a sentence."""
    goal = f"{number(demand.needed_groups_per_s)} groups/s"
    if not offers:
        return f"no offer can be used, so nothing gives {goal}"
    if not fresh:
        return _none_is_fresh(offers, demand)
    names = ", ".join(relaxation.name for relaxation in relaxations)
    blame = f"; to change one of these is enough: {names}" if names else "; to change one of them is not enough"
    return f"no choice among {fresh} offers {failing} {goal} within {', '.join(_in_words(limits))}{blame}"


def why_less(candidates: Sequence[Candidate], demand: Demand, limits: Limits, blocked: int) -> str:
    """Why less than the need can be had, in a sentence, without a search for what would allow all of it.

    `blocked` of the candidates cannot be launched.
    """
    fresh = sum(is_fresh(candidate, demand.fresh_s) for candidate in candidates)
    if not fresh:
        return _none_is_fresh(len(candidates), demand)
    within = ", ".join(_in_words(limits))
    alone = f"; {blocked} of the offers cannot be launched for now, after setbacks" if blocked else ""
    return f"{fresh} of {len(candidates)} offers are fresh enough, and give no more{within and f' within {within}'}{alone}"


def _none_is_fresh(offers: int, demand: Demand) -> str:
    return (
        f"none of {offers} offers is fresh enough: D + L exceeds (S + 1 − κ)·T = {demand.slack_steps} · "
        f"{number(demand.learner_step_s)} s for each"
    )


def _in_words(limits: Limits) -> Iterator[str]:
    if limits.budget_usd_per_hour < math.inf:
        yield f"{number(limits.budget_usd_per_hour)} USD/h"
    for quota in limits.quotas:
        yield f"the quota {quota.name} of {quota.accelerators}"
    if limits.caps_domains:
        yield f"{percent(limits.max_domain_share)} in one {limits.failure_domain}"
    if limits.min_on_demand_share:
        yield f"{percent(limits.min_on_demand_share)} on demand"
