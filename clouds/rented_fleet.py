"""The fleet of rented machines, kept at what the plan asks for.

Invariants: a machine's name is on the disk before the cloud is asked for it, so that whoever takes over after kill −9 knows of
it; a name is given once; a machine counts as there from then on until the cloud says that it is not; one that was given up and
shows up all the same is stopped; only machines that the cloud lists for this run are touched; the ledger's paid intervals are
the cloud's; the budget of the run is never exceeded, as long as the fleet is looked at every `pace.period_s`.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from clouds.budget import Budget
from clouds.cloud import Cloud, CloudMachine, CloudTrouble, LaunchFailed, MachineFailed, SetupFailed
from clouds.fleet_state import FleetState, Record, load_state, save_state
from clouds.reconciler import Action, Machine, Memory, reconcile
from echo2.capacity.activation import Demand, why_less
from echo2.capacity.limits import TOLERANCE, Limits
from echo2.capacity.offers import Candidate, Offer
from echo2.capacity.tables import number
from echo2.config_activation import ActivationSection
from echo2.errors import UserError
from echo2.hub.intervals import machine_of
from echo2.hub.roster import FLEET_ENDED
from echo2.protocol import CrewMember

log = logging.getLogger(__name__)
JobKind = Literal["launch", "stop"]


class FleetLedger(Protocol):
    """What the fleet tells the run's ledger and asks it: the hub, or the roster itself where there is no hub any more."""

    def record_interval(
        self, name: str, offer: str, price_usd_per_hour: float, launched_at_s: float, ended_at_s: float | None
    ) -> None: ...

    def crew(self) -> list[CrewMember]: ...

    def drain(self, machine: str) -> None: ...

    def cost_usd(self) -> float: ...

    def note(self, kind: str, subject: str, detail: str) -> None: ...


class Market(Protocol):
    """What is offered and what is asked for."""

    def look(self, now_s: float) -> tuple[Sequence[Candidate], Demand, Limits]:
        """With the figures of now. Raises UserError where they cannot be had."""


class RentedFleet:
    """Keeps the machines of one run; to be used by one thread of one process at a time."""

    def __init__(
        self,
        run_id: str,
        file: Path,
        cloud: Cloud,
        ledger: FleetLedger,
        market: Market,
        settings: ActivationSection,
        executor: Executor,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`file` holds the state; what an earlier process left in it is taken up. `executor` runs launches and stops."""
        self._run_id, self._stem = run_id, f"echo2-{run_id[-40:].strip('.-_')}"
        self._file, self._cloud, self._ledger, self._market = file, cloud, ledger, market
        self._pace, self._executor, self._clock = settings.pace, executor, clock
        self._budget = Budget(settings.budget_usd, lambda: self._ledger.cost_usd(), clock)
        found = load_state(file)
        self._adopts = found is None
        """Whether machines that are there, but not in the state, are taken up: without one, all of them are."""
        self._saved = found
        state = found or FleetState()
        self._memory, self._records = _looking_for_more(state.memory), dict(state.records)
        self._short: tuple[float, float] | None = None
        """What the plan falls short of, and of what need, as it was told last."""
        self._closing, self._without_hub = "", False
        self._jobs: dict[tuple[JobKind, str], Future[None]] = {}
        """By kind and the machine's name; a machine may be stopped while its launch is under way."""
        self._told: set[tuple[str, float, float | None]] = set()

    @property
    def closing(self) -> str:
        """Why the fleet ends for good; empty while it goes on."""
        return self._closing

    @property
    def is_over(self) -> bool:
        """Whether the fleet has ended, and nothing of it is left."""
        return bool(self._closing) and not self._records and not self._jobs

    def close(self, reason: str, without_hub: bool = False) -> None:
        """From the next tick on, machines are ended and none is launched any more.

        They are drained first, unless they are `without_hub`, for which whoever was live until then may have ended.
        """
        self._closing, self._without_hub = self._closing or reason, self._without_hub or without_hub

    def turn_to(self, ledger: FleetLedger) -> None:
        """From now on this is the ledger's door, such as the roster itself in place of a hub that is gone."""
        self._ledger = ledger

    def _give_in(self, reason: str) -> None:
        """End before the run does, and have its learner know why."""
        if not self._closing:
            self._tell(partial(self._ledger.note, FLEET_ENDED, "fleet", reason))
        self.close(reason)

    def tick(self) -> list[Action]:
        """Look, and do what is to be done. Raises UserError where cloud, ledger or market do not answer, before it does."""
        self._collect()
        # A name may have been paid for more than once; the machine that is there, if one is, comes last.
        machines = sorted(self._cloud.machines(self._run_id), key=lambda each: each.ended_at_s or math.inf)
        listed = {machine.name: machine for machine in machines}
        now_s = self._clock()
        self._account(machines)
        crews = self._crews(self._records.keys() | listed.keys())
        self._take_in(listed, crews, now_s)
        actions = self._decide([self._observe(name, crews.get(name, ()), now_s) for name in sorted(self._records)], now_s)
        self._carry_out(actions, now_s)
        return actions

    # --- what is there

    def _collect(self) -> None:
        """What came of launches and stops."""
        for kind, name in [key for key, job in self._jobs.items() if job.done()]:
            error, record = self._jobs.pop((kind, name)).exception(), self._records[name]
            if error is None:
                self._records[name] = replace(record, stopped=record.stopped or kind == "stop")
            elif isinstance(error, UserError) and kind == "launch" and record.stopping:
                log.info("the launch of %s has ended: %s", name, error)
            elif isinstance(error, MachineFailed) and self._has_worked(name):
                # Whether it is still there its cloud says, and its workers; if it is not, it was lost.
                log.warning("%s of %s has failed after its workers were ready: %s", name, record.offer.name, error)
            elif isinstance(error, LaunchFailed):
                self._give_up(name, record, error)
            elif isinstance(error, CloudTrouble):
                log.warning("%s is asked again about %s: %s", record.offer.cloud, name, error)
            else:
                raise error

    def _has_worked(self, name: str) -> bool:
        return any(member.ready for member in self._crews(self._records).get(name, ()))

    def _give_up(self, name: str, record: Record, error: LaunchFailed) -> None:
        """A launch failed."""
        log.warning("%s of %s was not launched: %s", name, record.offer.name, error)
        self._tell(partial(self._ledger.note, "launch failed", name, f"{record.offer.name}: {error}"))
        if isinstance(error, SetupFailed) and not any(each.was_ready for each in self._records.values()):
            self._give_in(f"the worker cannot be set up on {record.offer.name}: {error}")
        if record.seen is None:
            del self._records[name]
        else:
            self._records[name] = replace(record, failed=True)

    def _account(self, machines: Sequence[CloudMachine]) -> None:
        """The ledger has every interval as the cloud has it."""
        for machine in machines:
            times = (machine.launched_at_s, machine.ended_at_s)
            if (machine.name, *times) not in self._told:
                record = self._records.get(machine.name)
                offer = record.offer.name if record else machine.offer
                self._ledger.record_interval(machine.name, offer, machine.price_usd_per_hour, *times)
                self._told.add((machine.name, *times))

    def _take_in(self, listed: Mapping[str, CloudMachine], crews: Mapping[str, Sequence[CrewMember]], now_s: float) -> None:
        """Bring the records to what the cloud lists."""
        there = {name: machine for name, machine in listed.items() if machine.ended_at_s is None}
        for name in there.keys() - self._records.keys():
            self._records[name] = self._found(there[name])
        self._adopts = False
        for name, record in list(self._records.items()):
            if name in there:
                self._records[name] = replace(record, seen=there[name])
            elif name in listed or record.seen is not None:
                self._bury(name, record, listed.get(name), crews.get(name, ()), now_s)
            elif record.stopped and not self._is_busy(name):
                del self._records[name]

    def _found(self, machine: CloudMachine) -> Record:
        """A machine that is in no record: it was given up before, unless there are no records at all."""
        log.warning("%s was found running and is %s", machine.name, "taken up" if self._adopts else "stopped")
        number = machine.name.rpartition("-")[2]
        if number.isdecimal():
            self._memory = replace(self._memory, launches=max(self._memory.launches, int(number) + 1))
        offer = Offer(machine.offer, machine.price_usd_per_hour)
        return Record(offer, 1, machine.launched_at_s, machine, stopping=not self._adopts)

    def _bury(self, name: str, record: Record, ended: CloudMachine | None, crew: Sequence[CrewMember], now_s: float) -> None:
        """The machine is gone."""
        if self._is_busy(name):
            return
        if ended is None and record.seen is not None:
            seen = record.seen
            # Its cloud does not know until when it was there; its workers were heard until then.
            ended_at_s = max(seen.launched_at_s, now_s - min((member.silent_s for member in crew), default=0.0))
            self._ledger.record_interval(name, record.offer.name, seen.price_usd_per_hour, seen.launched_at_s, ended_at_s)
        if not (record.lost or record.stopping or record.failed) and self._is_excused(crew):
            log.info("%s of %s is gone, since its workers had no more to do or no hub", name, record.offer.name)
            expected = {known: offer for known, offer in self._memory.expected.items() if known != name}
            self._memory = replace(self._memory, expected=expected)
        elif record.lost or not (record.stopping or record.failed):
            gone = "its workers fell silent" if record.lost else "its cloud does not list it any more"
            ending = (ended.ending if ended else "") or gone
            log.warning("%s of %s is gone: %s", name, record.offer.name, ending)
            self._tell(partial(self._ledger.note, "worker ended", name, ending))
        del self._records[name]

    def _crews(self, machines: Container[str]) -> Mapping[str, Sequence[CrewMember]]:
        crews: dict[str, list[CrewMember]] = defaultdict(list)
        for member in self._ledger.crew():
            crews[machine_of(member.name, machines)].append(member)
        return crews

    def _is_excused(self, crew: Sequence[CrewMember]) -> bool:
        """Whether the machine's workers may be gone without anybody having taken it away, by who was heard last."""
        last = min(crew, key=lambda member: member.silent_s, default=None)
        if last is None:
            return self._without_hub
        return last.excused or (self._without_hub and last.live)

    def _observe(self, name: str, crew: Sequence[CrewMember], now_s: float) -> Machine:
        """The machine as the reconciler sees it."""
        record = self._records[name]
        if any(member.live and member.ready for member in crew) and not record.was_ready:
            record = self._records[name] = replace(record, was_ready=True)
        launched_at_s = record.seen.launched_at_s if record.seen else record.asked_at_s
        machine = partial(Machine, name, record.offer, launched_at_s=launched_at_s)
        if record.stopping:
            return machine(phase="done")
        live = any(member.live for member in crew)
        if record.failed:
            return machine(phase="lost")
        if record.draining_since_s is not None:
            phase = "draining" if live else "done"
            return Machine(name, record.offer, phase, launched_at_s, record.draining_since_s)  # type: ignore[arg-type]
        silent_s = min((member.silent_s for member in crew), default=0.0)
        if crew and not live and silent_s > self._pace.silence_timeout_s:
            if self._is_excused(crew):
                return machine(phase="done")
            self._records[name] = replace(record, lost=True)
            return machine(phase="lost")
        return machine(phase="ready" if record.was_ready else "launching")

    # --- what is to be done

    def _decide(self, machines: Sequence[Machine], now_s: float) -> list[Action]:
        """Actions by the plan, or those that end the fleet."""
        reserve_s = self._pace.drain_timeout_s + 3 * self._pace.period_s
        if not self._closing:
            self._keep_to_budget(reserve_s)
        if self._closing:
            self._memory = replace(self._memory, expected={})
            return [self._last_action(machine, now_s) for machine in machines]
        candidates, demand, limits = self._market.look(now_s)
        self._know_offers(candidates)
        machines = [replace(machine, offer=self._records[machine.name].offer) for machine in machines]
        most_usd_per_hour = min(limits.budget_usd_per_hour, self._budget.left_usd * 3600 / reserve_s)
        limits = replace(limits, budget_usd_per_hour=most_usd_per_hour)
        self._memory, actions = reconcile(self._memory, candidates, demand, limits, machines, now_s, self._pace, self._stem)
        self._say_if_short(candidates, demand, limits, now_s)
        workers = {candidate.offer.name: candidate.workers for candidate in candidates}
        for action in actions:
            if action.kind == "launch":
                self._records[action.name] = Record(action.offer, workers[action.offer.name], now_s)
        return actions

    def _say_if_short(self, candidates: Sequence[Candidate], demand: Demand, limits: Limits, now_s: float) -> None:
        """Once for each plan that gives less than is needed."""
        memory, needed = self._memory, demand.needed_groups_per_s
        if memory.goal_groups_per_s >= needed * (1 - TOLERANCE):
            self._short = None
        elif self._short != (short := (memory.goal_groups_per_s, memory.asked_groups_per_s)):
            self._short = short
            blocked = sum(now_s < setback.blocked_until_s for setback in memory.setbacks.values())
            told = f"{number(needed)} groups/s are needed, and machines for {number(memory.goal_groups_per_s)} are planned"
            log.warning("%s: %s", told, why_less(candidates, demand, limits, blocked))

    def _keep_to_budget(self, reserve_s: float) -> None:
        """End while what is left of the budget lasts for the time that it takes."""
        usd_per_hour = math.fsum(record.offer.price_usd_per_hour for record in self._records.values())
        if self._budget.lasts_s(usd_per_hour) <= reserve_s:
            spent = f"activation.budget_usd = {self._budget.limit_usd:g} lasts no longer at {usd_per_hour:g} USD/h"
            self._give_in(f"{spent}: raise it to go on")

    def _know_offers(self, candidates: Sequence[Candidate]) -> None:
        """What was found running has only its offer's name until the offer is seen."""
        known = {candidate.offer.name: candidate.offer for candidate in candidates}
        for name, record in self._records.items():
            if record.offer.name in known and not record.offer.region:
                self._records[name] = replace(record, offer=known[record.offer.name])

    def _last_action(self, machine: Machine, now_s: float) -> Action:
        """What is done with a machine of a fleet that ends."""
        in_time = machine.phase == "draining" and now_s - machine.draining_since_s <= self._pace.drain_timeout_s
        waits = not self._without_hub and (machine.phase == "ready" or in_time)
        return Action("drain" if waits else "stop", machine.name, machine.offer, self._closing)

    def _carry_out(self, actions: Sequence[Action], now_s: float) -> None:
        """What is intended is on the disk before anything is done."""
        for action in actions:
            record = self._records[action.name]
            if action.kind == "drain" and record.draining_since_s is None:
                self._records[action.name] = replace(record, draining_since_s=now_s)
            elif action.kind == "stop":
                self._records[action.name] = replace(record, stopping=True)
            if action.kind != "keep" and not (action.kind == "stop" and record.stopping):
                log.info("%s %s of %s: %s", action.kind, action.name, action.offer.name, action.sentence)
        self._save()
        for action in actions:
            record = self._records[action.name]
            if action.kind == "drain":
                self._ledger.drain(action.name)
            elif action.kind == "stop":
                self._submit("stop", action.name, partial(self._cloud.stop, self._run_id, action.name))
            elif record.seen is None:
                call = partial(self._cloud.launch, self._run_id, action.name, record.offer, record.workers)
                self._submit("launch", action.name, call)

    def _submit(self, kind: JobKind, name: str, call: Callable[[], None]) -> None:
        """Unless the same is under way."""
        if (kind, name) not in self._jobs:
            self._jobs[kind, name] = self._executor.submit(call)

    def _is_busy(self, name: str) -> bool:
        return ("launch", name) in self._jobs or ("stop", name) in self._jobs

    def _save(self) -> None:
        state = FleetState(self._memory, dict(self._records))
        if state != self._saved:
            save_state(self._file, state)
            self._saved = state

    def _tell(self, message: Callable[[], None]) -> None:
        """A note must not keep the fleet from its work; what could not be told is logged."""
        try:
            message()
        except UserError as error:
            log.error("the ledger could not be told: %s", error)


def _looking_for_more(memory: Memory) -> Memory:
    """A plan that gives less than was asked for is made anew at once: whoever starts a fleet may have changed its limits."""
    short = memory.goal_groups_per_s < memory.asked_groups_per_s
    return replace(memory, searched_at_s=-math.inf) if short else memory
