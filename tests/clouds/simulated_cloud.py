"""A cloud that obeys the reconciler, except where it is told to fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from clouds.reconciler import Action, Machine, Memory, reconcile
from echo2.capacity.activation import Demand
from echo2.capacity.limits import Limits
from echo2.capacity.offers import Candidate, Offer
from echo2.config_activation import PaceSection

PERIOD_S = 30.0
DRAIN_S = 45.0


def candidate(name: str, rate: float, usd: float, *, spot: bool = True, start_up_s: float = 120.0) -> Candidate:
    """An offer of the cloud and zone in `name`, such as `a/n1`, that makes `rate` groups/s for `usd` an hour."""
    cloud, zone = name.split("/")
    offer = Offer(cloud, usd, cloud, zone, f"m{rate:g}", "G", 1, spot=spot)
    return Candidate(offer, 1, rate, 20.0, 10.0, 0.0, start_up_s, 0.0)


def demand(groups_per_s: float) -> Demand:
    return Demand(groups_per_s, margin=0.0, learner_step_s=30.0, slack_steps=2, members=8)


class SimulatedCloud:
    """Machines, and a reconciliation every `PERIOD_S`."""

    def __init__(self, candidates: Sequence[Candidate], groups_per_s: float, limits: Limits, pace: PaceSection) -> None:
        self.candidates, self.demand, self.limits, self.pace = list(candidates), demand(groups_per_s), limits, pace
        self.now_s, self.memory = 0.0, Memory()
        self.machines: dict[str, Machine] = {}
        self.launches: list[tuple[float, str]] = []
        """When, and of which offer."""
        self.fails: Callable[[Offer], bool] = lambda offer: False
        """Whether a launch of this offer fails now."""
        self.hangs: Callable[[Offer], bool] = lambda offer: False
        """Whether its machines never become ready."""

    def tick(self) -> list[Action]:
        """One reconciliation, and what comes of it until the next."""
        self.memory, actions = reconcile(
            self.memory, self.candidates, self.demand, self.limits, list(self.machines.values()), self.now_s, self.pace
        )
        for action in actions:
            self._obey(action)
        self.now_s += PERIOD_S
        for name, machine in list(self.machines.items()):
            self.machines[name] = self._aged(machine)
        return actions

    def run(self, duration_s: float) -> list[Action]:
        """All actions of that time."""
        return [action for _ in range(round(duration_s / PERIOD_S)) for action in self.tick()]

    def preempt(self, name: str) -> None:
        """The cloud takes the machine back."""
        del self.machines[name]

    def ready(self) -> float:
        """Throughput of the machines that are ready."""
        rates = {c.offer.name: c.effective_groups_per_s for c in self.candidates}
        return sum(rates[m.offer.name] for m in self.machines.values() if m.phase == "ready")

    def counts(self) -> Counter[str]:
        """Machines by offer, whatever they do."""
        return Counter(machine.offer.name for machine in self.machines.values())

    def _obey(self, action: Action) -> None:
        if action.kind == "launch":
            assert action.name not in self.machines, "names are given once at a time"
            self.launches.append((self.now_s, action.offer.name))
            if not self.fails(action.offer):
                self.machines[action.name] = Machine(action.name, action.offer, "launching", self.now_s)
        elif action.kind == "stop":
            del self.machines[action.name]
        elif action.kind == "drain" and self.machines[action.name].phase == "ready":
            self.machines[action.name] = replace(self.machines[action.name], phase="draining", draining_since_s=self.now_s)

    def _aged(self, machine: Machine) -> Machine:
        start_up_s = next(c.start_up_s for c in self.candidates if c.offer.name == machine.offer.name)
        if machine.phase == "launching" and not self.hangs(machine.offer) and self.now_s - machine.launched_at_s >= start_up_s:
            return replace(machine, phase="ready")
        if machine.phase == "draining" and self.now_s - machine.draining_since_s >= DRAIN_S:
            return replace(machine, phase="done")
        return machine
