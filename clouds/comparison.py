"""What a replay is worth: the reconciler beside machines on demand alone, spot machines without replacement, and hindsight.

Invariants: all have the same demand and limits, the same machine, and the same traces; what is shown is what was replayed.

**With hindsight.** Whoever knew the traces beforehand, and started machines in no time, would rent spot machines whenever there
are any, and on demand the rest of the N that the need takes: s·p + (1 − s)·q for the mean share s of N that the zones have, and
p and q the least prices of a machine. No policy costs less that keeps N machines up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from clouds.replay import SAMPLES, Replay, Replayed, Tally
from clouds.replay_market import Kind, TracedMarket
from clouds.traces import TraceSet
from echo2.capacity.plan import Plan
from echo2.capacity.tables import counted, duration, number, percent, quantity, table
from echo2.config import Config
from echo2.errors import UserError

STEADY_S = 2 * 86400.0
"""Longest replay of machines on demand alone, to which nothing happens."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One set of traces, and what became of the run on it."""

    traces: TraceSet
    machine: str
    """What is rented."""
    fleet: int
    """N: machines that the need takes, none of them lost."""
    machines_each: int
    """Machines that stand behind each of the traces."""
    reconciler: Replayed
    on_demand: Replayed
    unreplaced: Replayed | None
    """Spot machines that nobody replaces once all were up; None where that was not asked for."""
    enough_share: float
    """Share of the time in which the zones had N spot machines."""
    none_share: float
    """Share of the time in which they had none."""
    hindsight_share: float
    """Least cost with hindsight, as a share of that on demand."""

    def cost_share(self, replayed: Replayed) -> float:
        """USD per step over those of machines on demand alone; NaN where these end no step."""
        return replayed.usd_per_step / self.on_demand.usd_per_step if self.on_demand.steps else math.nan


def compare(
    config: Config,
    plan: Plan,
    traces: TraceSet,
    kind: Kind,
    machines_each: int = 1,
    most_s: float = math.inf,
    without_replacement: bool = False,
) -> Comparison:
    """Replay the traces, for `most_s` at most. Raises UserError where no plan can be made, or no step comes to its end."""
    market = TracedMarket(config, plan, traces, kind)
    on_demand = min(market.on_demand, key=lambda each: each.usd_per_hour)
    fleet = math.ceil(market.demand.needed_groups_per_s / on_demand.effective_groups_per_s)
    spot_share = traces.mean(lambda machines: min(fleet, machines * machines_each) / fleet, most_s)
    price_share = min(each.usd_per_hour for each in market.spot) / on_demand.usd_per_hour
    steady = TracedMarket(config, plan, traces, kind, "on-demand")

    def replayed(rented: TracedMarket, replacement: bool, longest_s: float) -> Replayed:
        seed = config.run.seed
        replay = Replay(config, plan, traces, rented, machines_each=machines_each, replaces=replacement, seed=seed)
        return replay.run(longest_s)

    reconciler = replayed(market, True, most_s)
    _check_worked(reconciler, market, min(each.start_up_s for each in (*market.spot, *market.on_demand)))
    return Comparison(
        traces=traces,
        machine=f"{on_demand.offer.cloud} {on_demand.offer.instance_type} ({on_demand.offer.hardware})",
        fleet=fleet,
        machines_each=machines_each,
        reconciler=reconciler,
        on_demand=replayed(steady, True, min(most_s, STEADY_S)),
        unreplaced=replayed(TracedMarket(config, plan, traces, kind, "spot"), False, most_s) if without_replacement else None,
        enough_share=traces.mean(lambda machines: machines * machines_each >= fleet, most_s),
        none_share=traces.mean(lambda machines: machines == 0, most_s),
        hindsight_share=spot_share * price_share + 1 - spot_share,
    )


def _check_worked(replayed: Replayed, market: TracedMarket, start_up_s: float) -> None:
    """Raises UserError where nothing was rented, or no step ended: shares of nothing are no results."""
    if not replayed.total.hours:
        why = market.activation.obstacle or "no machine could be had while the zones were watched"
        raise UserError(
            f"nothing was rented in the replay of {replayed.traces}: {why}; change [activation] or take other traces"
        )
    if not replayed.steps:
        raise UserError(
            f"no learner step ended in the replay of {replayed.traces}, which lasts {duration(replayed.duration_s)}: a step "
            f"takes T = {quantity(replayed.learner_step_s, 's')} and the start of a machine {quantity(start_up_s, 's')} before "
            f"it; take longer traces, or raise the limits of [activation]"
        )


def machines_for(traces: TraceSet, fleet: int) -> int:
    """Machines to stand behind each traced one for a zone at its best to hold the fleet."""
    return math.ceil(fleet / max(1, traces.most_machines))


def render_comparison(found: Comparison) -> str:
    """Everything, as text without a final line break."""
    traces, replayed = found.traces, found.reconciler
    many = "" if found.machines_each == 1 else f", {found.machines_each} machines for each one traced"
    head = f"Replay of {traces.name}: {duration(replayed.duration_s)} in {counted(len(traces.zones), 'zone')}{many}"
    columns = ("place", "had any", "launches", "not had", "preempted", "machine hours", "USD", "idle")
    return "\n\n".join(
        [
            f"{head}\nof {found.machine}, of which the need takes {found.fleet}",
            table(("figure", "value", ""), _figure_rows(found)),
            table(columns, [*_place_rows(found), _row("all", "", replayed.total)]),
        ]
    )


def _figure_rows(found: Comparison) -> Iterator[tuple[str, str, str]]:
    replayed, total = found.reconciler, found.reconciler.total
    spot_hours = math.fsum(replayed.places[z.zone].hours for z in found.traces.zones if z.zone in replayed.places)
    yield "learner utilisation U", percent(replayed.utilisation), f"{percent(found.on_demand.utilisation)} on demand alone"
    yield "steps", f"{replayed.steps:,}", f"staleness at most {replayed.staleness_max}"
    beside = "on demand alone no step would have ended"
    if found.on_demand.steps:
        beside = f"{percent(found.cost_share(replayed))} of the {number(found.on_demand.usd_per_step)} USD on demand alone"
    yield "rent and traffic", f"{number(replayed.usd_per_step)} USD per step", beside
    yield "with hindsight", "", f"{percent(found.hindsight_share)} of on demand alone, had starts taken no time"
    yield "per 1,000 rollouts", f"{number(replayed.usd_per_1000_rollouts)} USD", f"{replayed.rollouts:,} were trained"
    yield "spot share", percent(spot_hours / total.hours), "of the machine hours"
    yield (
        "preempted",
        str(total.preempted),
        f"{quantity(total.preempted / spot_hours, 'per spot machine hour') if spot_hours else '–'}",
    )
    yield "idle share", percent(total.idle_share), "of what was paid: starts, no leases, lost work"
    yield "zones had the fleet", percent(found.enough_share), f"of the time, and no machine {percent(found.none_share)} of it"


def _place_rows(found: Comparison) -> Iterator[tuple[str, ...]]:
    had = {zone.zone: TraceSet("", "", (zone,)).mean(lambda machines: machines > 0) for zone in found.traces.zones}
    for place, tally in found.reconciler.places.items():
        yield _row(place if place in had else f"{place} on demand", percent(had[place]) if place in had else "", tally)


def _row(place: str, had: str, tally: Tally) -> tuple[str, ...]:
    counts = map(str, (tally.launches, tally.failed, tally.preempted))
    return place, had, *counts, number(tally.hours), f"{tally.usd:,.2f}", percent(tally.idle_share)


def describe_comparison(found: Comparison) -> dict[str, Any]:
    """Everything, for JSON."""
    ways = {"reconciler": found.reconciler, "on_demand": found.on_demand, "unreplaced": found.unreplaced}
    return {
        "traces": found.traces.name,
        "machine": found.machine,
        "fleet": found.fleet,
        "machines_each": found.machines_each,
        "enough_share": found.enough_share,
        "none_share": found.none_share,
        "hindsight_share": found.hindsight_share,
        **{name: _describe(found, way) for name, way in ways.items() if way is not None},
    }


def _describe(found: Comparison, replayed: Replayed) -> dict[str, Any]:
    figures = ("duration_s", "steps", "rollouts", "utilisation", "usd_per_step", "usd_per_1000_rollouts", "staleness_max")
    return {
        **{name: _finite(getattr(replayed, name)) for name in figures},
        "cost_share": _finite(found.cost_share(replayed)),
        "total": _tally(replayed.total),
        "places": {place: _tally(tally) for place, tally in replayed.places.items()},
        "samples": [asdict(sample) for sample in replayed.samples],
    }


def _tally(tally: Tally) -> dict[str, float]:
    return asdict(tally) | {"idle_share": tally.idle_share}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def plot_comparisons(found: Sequence[Comparison], figure: Any) -> None:
    """Draw for each set the spot machines to be had, the machines that work, and the utilisation, into a matplotlib figure."""
    figure.set_size_inches(13.5, 3.2 * len(found))
    figure.set_layout_engine("constrained")
    for row, (each, axes) in enumerate(zip(found, figure.subplots(len(found), 3, squeeze=False), strict=True)):
        samples, replayed = each.reconciler.samples, each.reconciler
        days = [sample.at_s / 86400 for sample in samples]
        axes[0].step(days, [sample.available for sample in samples], where="post", color="#8a8a8a", linewidth=0.8)
        axes[0].set_ylabel(f"{each.traces.name}\nspot machines to be had")
        spot, on_demand = [sample.spot for sample in samples], [sample.on_demand for sample in samples]
        axes[1].stackplot(days, spot, on_demand, labels=("spot", "on demand"), colors=("#14607a", "#f6b26b"), step="post")
        axes[1].axhline(each.fleet, color="#2b2b2b", linewidth=0.8, linestyle=":")
        axes[1].set_ylabel("machines that work")
        ends, busy = _utilisations(replayed)
        axes[2].plot(ends, busy, color="#14607a", linewidth=0.8)
        axes[2].set_ylim(0.0, 1.02)
        axes[2].set_ylabel("learner utilisation U")
        if not row:
            axes[1].legend(frameon=False, ncols=2, loc="upper right")
        for axis in axes:
            axis.set_xlabel("days")


def _utilisations(replayed: Replayed) -> tuple[list[float], list[float]]:
    """Days, and the utilisation up to each since the one before; each spans as many samples as some twenty steps take."""
    samples = replayed.samples
    stride = max(1, math.ceil(20 * replayed.learner_step_s * SAMPLES / replayed.duration_s))
    marks = samples[::stride]
    pairs = list(pairwise(marks))
    busy = [min(1.0, (b.steps - a.steps) * replayed.learner_step_s / (b.at_s - a.at_s)) for a, b in pairs]
    return [b.at_s / 86400 for _, b in pairs], busy
