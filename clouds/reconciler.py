"""The reconciler: from what should run and what does to what is to be done, without doing it.

Invariants: pure functions; what is launched keeps to budget and quotas together with everything that is there, machines that
drain included; a machine that serves well is given up only for a plan that saves enough, and once what takes its place works,
unless the limits leave no room for both; an offer that failed is left alone for a while, and the cheapest plan without it is
taken instead.

**Plan.** The plan stands until it cannot be kept to: the demand or a limit changed, or it asks for a launch from an offer
that is blocked. Then the cheapest plan takes its place at once. It also gives way to one that costs less by `least_saving`,
starts included, which is looked for every `change_interval_s`. Where nothing keeps to the limits, as much throughput as does is
planned, the learner waits for the rest, and more is looked for as often and whenever an offer is blocked no more.

**Setbacks.** A machine that is gone without having been told to go, that lost its workers, or that is not ready in
`start_timeout_s`, is a setback of its offer, be it a preemption or a launch that failed. The n-th in a row blocks launches from
the offer for min(`longest_block_s`, `first_block_s`·2ⁿ⁻¹); a machine launched later that is ready and `settled_s` old ends the
row.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from echo2.capacity.activation import Demand
from echo2.capacity.limits import TOLERANCE, Limits
from echo2.capacity.offers import Candidate, Offer
from echo2.capacity.relaxations import RelaxationSearch, is_fresh
from echo2.capacity.selection import Selection, least_cost_usd_per_hour
from echo2.capacity.tables import number
from echo2.config_activation import PaceSection

SEARCH_S = 10.0
"""Longest search for a plan."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that was asked for and is not known to be gone."""

    name: str
    offer: Offer
    phase: Literal["launching", "ready", "draining", "done", "lost"]
    """`done` once it has nothing under way any more, or was told to stop; `lost` where it is there, but not its workers."""
    launched_at_s: float
    draining_since_s: float = 0.0
    """When it was told to drain, if it was."""


@dataclass(frozen=True, slots=True)
class Action:
    """What is to be done with one machine."""

    kind: Literal["launch", "keep", "drain", "stop"]
    name: str
    offer: Offer
    sentence: str
    """Why."""


@dataclass(frozen=True, slots=True)
class Setback:
    """Of an offer."""

    in_a_row: int
    at_s: float
    blocked_until_s: float


@dataclass(frozen=True, slots=True)
class Memory:
    """What the next reconciliation must know of this one."""

    plan: Mapping[str, int] = field(default_factory=dict)
    """Machines by the offer's name."""
    goal_groups_per_s: float = 0.0
    """What the plan was made to give: what was needed, or as much of it as could be had."""
    asked_groups_per_s: float = 0.0
    """What was needed when a plan was last looked for."""
    searched_at_s: float = -math.inf
    """When that was."""
    setbacks: Mapping[str, Setback] = field(default_factory=dict)
    """By the offer's name."""
    expected: Mapping[str, str] = field(default_factory=dict)
    """Machines that should be there next time, and their offers."""
    launches: int = 0
    """So many were asked for so far; the next machine has this number, and none has it again."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and the circumstances; see `Memory`."""

    selection: Selection
    goal_groups_per_s: float
    asked_groups_per_s: float
    searched_at_s: float


def reconcile(
    memory: Memory,
    candidates: Sequence[Candidate],
    demand: Demand,
    limits: Limits,
    machines: Sequence[Machine],
    now_s: float,
    pace: PaceSection,
    stem: str = "machine",
) -> tuple[Memory, list[Action]]:
    """What to do at `now_s`: an action for each machine, and the launches, of machines called `stem` and a number.

    `candidates` hold today's figures; what runs of them is counted from `machines`; names tell offers apart. `machines` hold
    every launch that was asked for until it is known to have failed; whoever was told to drain or stop is told again.
    """
    late = {m.name for m in machines if m.phase == "launching" and now_s - m.launched_at_s > pace.start_timeout_s}
    setbacks = _setbacks(memory, machines, late, now_s, pace)
    alive = [m for m in machines if m.phase in ("launching", "ready") and m.name not in late]
    running = Counter(machine.offer.name for machine in alive)
    blocked = {offer for offer, setback in setbacks.items() if now_s < setback.blocked_until_s}
    known = [replace(c, running=running[c.offer.name], launchable=c.offer.name not in blocked) for c in candidates]
    planned = _choose_plan(memory, known, demand, limits, now_s, pace)
    plan, needed_groups_per_s = planned.selection, min(demand.needed_groups_per_s, planned.goal_groups_per_s)
    room = _Room(limits, {c.offer.name: c for c in known})
    names = map(f"{stem}-{{}}".format, itertools.count(memory.launches))
    launches, cramped = _launches(plan, room, machines, alive, pace, names)
    given_up = _given_up(plan, room, machines, alive, cramped, needed_groups_per_s, now_s, pace)
    actions = launches + [_fate(machine, machine.name in late, given_up, now_s, pace) for machine in machines]
    expected = {action.name: action.offer.name for action in actions if action.kind in ("launch", "keep")}
    goal, asked = planned.goal_groups_per_s, planned.asked_groups_per_s
    counted = memory.launches + len(launches)
    return Memory(_counts(plan), goal, asked, planned.searched_at_s, setbacks, expected, counted), actions


def _setbacks(
    memory: Memory, machines: Sequence[Machine], late: set[str], now_s: float, pace: PaceSection
) -> dict[str, Setback]:
    """With those that were noticed now, and without those of offers that have settled."""
    found = dict(memory.setbacks)
    for machine in machines:
        setback, settled = found.get(machine.offer.name), now_s - machine.launched_at_s >= pace.settled_s
        if setback is not None and machine.phase == "ready" and settled and machine.launched_at_s > setback.at_s:
            del found[machine.offer.name]
    there = {machine.name for machine in machines if machine.phase != "lost"} - late
    for offer in sorted({offer for name, offer in memory.expected.items() if name not in there}):
        in_a_row = found[offer].in_a_row + 1 if offer in found else 1
        block_s = min(pace.longest_block_s, pace.first_block_s * 2.0 ** min(in_a_row - 1, 100))
        found[offer] = Setback(in_a_row, now_s, now_s + block_s)
    return found


def _choose_plan(
    memory: Memory, candidates: Sequence[Candidate], demand: Demand, limits: Limits, now_s: float, pace: PaceSection
) -> Planned:
    """The standing plan, or another that has reason to take its place."""
    needed = demand.needed_groups_per_s
    fresh = tuple(candidate for candidate in candidates if is_fresh(candidate, demand.fresh_s))
    standing = Selection(fresh, tuple(memory.plan.get(candidate.offer.name, 0) for candidate in fresh), limits)
    stands = _counts(standing) == memory.plan and not standing.violations(memory.goal_groups_per_s)
    short = memory.goal_groups_per_s < min(needed, memory.asked_groups_per_s)
    unblocked = any(memory.searched_at_s < setback.blocked_until_s <= now_s for setback in memory.setbacks.values())
    urgent = not stands or needed > memory.asked_groups_per_s or (short and unblocked)
    if not urgent and now_s - memory.searched_at_s < pace.change_interval_s:
        return Planned(standing, memory.goal_groups_per_s, memory.asked_groups_per_s, memory.searched_at_s)
    worth_leaving_usd_per_hour = standing.cost_usd_per_hour * (1 - pace.least_saving)
    if (
        stands
        and memory.goal_groups_per_s >= needed * (1 - TOLERANCE)
        and least_cost_usd_per_hour(fresh, needed, limits) > worth_leaving_usd_per_hour
    ):
        return Planned(standing, memory.goal_groups_per_s, needed, now_s)
    search = RelaxationSearch(candidates, demand.learner_step_s, demand.slack_steps, needed, limits, SEARCH_S)
    found, goal = search.most() or (Selection((), (), limits), 0.0)
    no_more = goal <= memory.goal_groups_per_s * (1 + TOLERANCE)
    if stands and no_more and found.cost_usd_per_hour > worth_leaving_usd_per_hour:
        return Planned(standing, memory.goal_groups_per_s, needed, now_s)
    return Planned(found, goal, needed, now_s)


def _counts(plan: Selection) -> dict[str, int]:
    return {candidate.offer.name: count for candidate, count in plan.chosen}


@dataclass(frozen=True, slots=True)
class _Room:
    """What budget and quotas leave."""

    limits: Limits
    candidates: Mapping[str, Candidate]

    def holds(self, offers: Sequence[Offer]) -> bool:
        """Whether a machine of each of these may be there at a time."""
        limits = self.limits
        usd_per_hour = math.fsum(self._usd_per_hour(offer) for offer in offers)
        used = (math.fsum(o.accelerators for o in offers if quota.covers(o)) - quota.accelerators for quota in limits.quotas)
        return usd_per_hour <= limits.budget_usd_per_hour * (1 + TOLERANCE) and all(over <= TOLERANCE for over in used)

    def _usd_per_hour(self, offer: Offer) -> float:
        """At today's price; at that of its launch where it is on offer no more."""
        return self.candidates[offer.name].usd_per_hour if offer.name in self.candidates else offer.price_usd_per_hour

    def groups_per_s(self, machines: Sequence[Machine]) -> float:
        """What those of the machines give that are on offer."""
        known = [self.candidates[m.offer.name] for m in machines if m.offer.name in self.candidates]
        return math.fsum(candidate.effective_groups_per_s for candidate in known)


def _launches(
    plan: Selection,
    room: _Room,
    machines: Sequence[Machine],
    alive: Sequence[Machine],
    pace: PaceSection,
    names: Iterator[str],
) -> tuple[list[Action], Offer | None]:
    """Launches, cheapest per rollout first, and the first offer for which there was no room beside what is there."""
    there, cramped = [machine.offer for machine in machines], None
    found: list[Action] = []
    free = pace.most_launches - sum(machine.phase == "launching" for machine in alive)
    for candidate, count in sorted(plan.chosen, key=lambda chosen: chosen[0].usd_per_group()):
        for _ in range(count - candidate.running):
            if not room.holds([*there, candidate.offer]):
                cramped = cramped or candidate.offer
                break
            if len(found) >= free:
                return found, None
            there.append(candidate.offer)
            sentence = f"the plan has {count} of them, {candidate.running} are there"
            found.append(Action("launch", next(names), candidate.offer, sentence))
    return found, cramped


def _given_up(
    plan: Selection,
    room: _Room,
    machines: Sequence[Machine],
    alive: Sequence[Machine],
    cramped: Offer | None,
    needed_groups_per_s: float,
    now_s: float,
    pace: PaceSection,
) -> dict[str, str]:
    """Machines beyond the plan that may go now, and why: the others are enough, or there is no room."""
    counts, ready = _counts(plan), [machine for machine in alive if machine.phase == "ready"]
    staying, found = list(alive), dict[str, str]()
    for machine in _surplus(counts, alive):
        offers = [each.offer for each in staying]
        left = [each for each in ready if each.name not in found and each is not machine]
        if not room.holds([*offers, cramped] if cramped else offers):
            why = "the limits leave no room for it beside the plan"
        elif now_s - machine.launched_at_s >= pace.settled_s and (
            machine.phase == "launching" or room.groups_per_s(left) >= needed_groups_per_s * (1 - TOLERANCE)
        ):
            why = f"the plan has {counts.get(machine.offer.name, 0)} of them, and the others are enough"
        else:
            continue
        found[machine.name] = why
        staying.remove(machine)
    return found


def _surplus(counts: Mapping[str, int], alive: Sequence[Machine]) -> Iterator[Machine]:
    """Of each offer those beyond the plan: those that launch before those that are ready, and the youngest first."""
    left = Counter(machine.offer.name for machine in alive)
    for machine in sorted(alive, key=lambda m: (m.phase == "ready", -m.launched_at_s, m.name)):
        if left[machine.offer.name] > counts.get(machine.offer.name, 0):
            left[machine.offer.name] -= 1
            yield machine


def _fate(machine: Machine, late: bool, given_up: Mapping[str, str], now_s: float, pace: PaceSection) -> Action:
    """What is done with a machine that is there."""
    if late:
        return Action("stop", machine.name, machine.offer, f"it was not ready in {number(pace.start_timeout_s)} s")
    if machine.phase == "lost":
        return Action("stop", machine.name, machine.offer, "its workers are gone")
    if machine.phase == "done":
        return Action("stop", machine.name, machine.offer, "it has nothing under way")
    if machine.phase == "draining":
        timed_out = now_s - machine.draining_since_s > pace.drain_timeout_s
        why = f"it did not drain in {number(pace.drain_timeout_s)} s" if timed_out else "it was given up"
        return Action("stop" if timed_out else "drain", machine.name, machine.offer, why)
    if machine.name in given_up:
        kind: Literal["drain", "stop"] = "drain" if machine.phase == "ready" else "stop"
        return Action(kind, machine.name, machine.offer, given_up[machine.name])
    return Action("keep", machine.name, machine.offer, "it is in the plan, or serves until what takes its place is ready")
