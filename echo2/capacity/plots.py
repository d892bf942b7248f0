"""Plots of a plan: learner utilisation against the pool, S and D, with the rules beside each other.

Invariants: each panel changes one number and keeps all others at the plan's values; every curve is the closed form's, so the
rules differ only in the publish interval that they take; where a rule has no allowed interval, its curve has a gap. The figure
is given by the caller: nothing here imports matplotlib or writes a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from echo2.capacity.dials import Situation
from echo2.capacity.model import Links, ceiling, required_throughput
from echo2.capacity.plan import Plan

INTERVALS = 40
"""Stretches that a curve over a continuous quantity is made of."""

MOST_STALENESS_BOUNDS = 16
"""Values of S that a panel shows beside the plan's own; a longer axis leaves some out."""

MOST_INTERVALS = 8
"""κ that are tried for the best one at a point, beside those of the other rules; a longer range leaves some out."""

SIZE_INCHES = (13.5, 5.0)
CONFIGURED, BEST, SERIAL, INK, FAINT = "#14607a", "#f6b26b", "#d1345b", "#2b2b2b", "#8a8a8a"


@dataclass(frozen=True, slots=True)
class Panel:
    """Utilisation U under the three rules over one quantity; NaN where a rule has no allowed publish interval."""

    quantity: str
    """What changes: words, symbol, unit."""
    values: tuple[float, ...]
    configured: tuple[float, ...]
    """Overlap at the configured κ."""
    best: tuple[float, ...]
    """Overlap at the best κ of each point."""
    serial: tuple[float, ...]
    """The serial rule's κ = S − 1."""
    now: float
    """The plan's own value."""


def panels(plan: Plan) -> tuple[Panel, Panel, Panel]:
    """Utilisation against μ in groups/s, S in steps and D in seconds, whose two parts keep their shares."""
    workload, links, latency = plan.workload, plan.links, plan.terms.latency
    now = Situation(workload, links, plan.terms.slots, latency)
    share = links.transfer_s / links.latency_s if links.latency_s else 0.0
    rate = plan.terms.groups_per_s / plan.terms.slots

    def with_bound(S: int) -> Situation:
        return replace(now, workload=replace(workload, staleness_bound=S, publish_interval=1))

    def with_dissemination(D: float) -> Situation:
        return replace(now, links=Links(D * share, D * (1 - share)))

    pools = ((slots * rate, replace(now, slots=slots)) for slots in _pools(plan))
    bounds = ((S, with_bound(S)) for S in _staleness_bounds(plan))
    latencies = ((D, with_dissemination(D)) for D in _latencies_s(plan))
    return (
        _panel("throughput of the pool μ (groups/s)", plan.terms.slots * rate, plan, pools),
        _panel("staleness bound S (steps)", workload.staleness_bound, plan, bounds),
        _panel("dissemination latency D (s)", links.latency_s, plan, latencies),
    )


def plot_plan(plan: Plan, figure: Any) -> None:
    """Draw `panels` on an empty matplotlib `figure`, which gets its size and layout here."""
    figure.set_size_inches(SIZE_INCHES)
    figure.set_layout_engine("constrained", wspace=0.04)
    axes = figure.subplots(1, 3, sharey=True)
    for axis, panel in zip(axes, panels(plan), strict=True):
        _draw_panel(axis, panel, plan)
    axes[0].set_ylabel("learner utilisation U = T/τ (%)", color=INK)
    _draw_pools(axes[0], plan)
    axes[1].xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(_title(plan), x=0.01, ha="left", fontsize=11, color=INK)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)


def _panel(quantity: str, now: float, plan: Plan, points: Iterable[tuple[float, Situation]]) -> Panel:
    """The curves through `points`."""
    values, configured, best, serial = [], [], [], []
    for value, situation in points:
        S, κ = situation.workload.staleness_bound, plan.workload.publish_interval
        tried = {*range(1, S + 2, -(-(S + 1) // MOST_INTERVALS)), κ, S - 1, S + 1} & {*range(1, S + 2)}
        each = {k: replace(situation, workload=replace(situation.workload, publish_interval=k)).utilisation for k in tried}
        values.append(value)
        configured.append(each.get(κ, math.nan))
        best.append(max(each.values()))
        serial.append(each.get(S - 1, math.nan))
    return Panel(quantity, tuple(values), tuple(configured), tuple(best), tuple(serial), now)


def _pools(plan: Plan) -> list[float]:
    """Slots from almost none to beyond the plan's pool, the needed one, and the serial rule's unless it would dwarf them."""
    last = 1.25 * max(plan.terms.slots, plan.configured.slots, required_throughput(plan.workload) * plan.terms.latency.mean_s)
    serial = serial_slots(plan)
    if serial is not None and serial <= 4 * last:
        last = max(last, 1.1 * serial)
    return sorted({*(last * place / INTERVALS for place in range(1, INTERVALS + 1)), plan.terms.slots})


def serial_slots(plan: Plan) -> float | None:
    """Slots that the serial rule asks for; None where no pool satisfies it."""
    rate = plan.serial.groups_per_s
    return None if rate is None else rate * plan.terms.latency.mean_s


def _staleness_bounds(plan: Plan) -> list[int]:
    """From 0 to beyond the plan's S and the S that keeps the learner busy."""
    S = plan.workload.staleness_bound
    last = max(8, 2 * S, *(ceiling(dial.limit) + 2 for dial in plan.dials if dial.symbol == "S" and dial.limit is not None))
    return sorted({*range(0, last + 1, -(-last // MOST_STALENESS_BOUNDS)), S})


def _latencies_s(plan: Plan) -> list[float]:
    """From 0 to beyond the plan's D and what S + 1 steps hide."""
    last = max(2 * plan.links.latency_s, 1.25 * (plan.workload.staleness_bound + 1) * plan.workload.learner_step_s)
    return sorted({*(last * place / INTERVALS for place in range(INTERVALS + 1)), plan.links.latency_s})


def _draw_panel(axis: Any, panel: Panel, plan: Plan) -> None:
    marker = {"marker": "o", "markersize": 4} if len(panel.values) <= MOST_STALENESS_BOUNDS + 2 else {}

    def curve(label: str, shares: tuple[float, ...], **style: Any) -> None:
        axis.plot(panel.values, [100 * share for share in shares], label=label, **style, **marker)

    configured = f"overlap, κ = {plan.workload.publish_interval} as configured"
    curve(configured, panel.configured, color=CONFIGURED, linewidth=2.2, zorder=3)
    curve("overlap, best κ at each point", panel.best, color=BEST, linewidth=6, solid_capstyle="round", zorder=2)
    curve("serial rule's κ = S − 1", panel.serial, color=SERIAL, linewidth=1.8, linestyle=(0, (3, 3)), zorder=4)
    target = 100 * plan.target_utilisation
    axis.axhline(target, color=FAINT, linewidth=1, linestyle=":", label=f"target {target:.4g} %", zorder=1)
    here = {"marker": "o", "markersize": 11, "markeredgewidth": 2, "zorder": 5, "clip_on": False}
    now = ([panel.now], [100 * plan.prediction.utilisation])
    axis.plot(*now, **here, linestyle="none", color=INK, markeredgecolor="white", label="this plan")
    axis.set_xlabel(panel.quantity, color=INK)
    axis.set_ylim(0, 104)
    axis.set_xlim(left=0 if panel.values[0] else -0.02 * panel.values[-1], right=1.02 * panel.values[-1])
    axis.grid(alpha=0.25)
    axis.tick_params(colors=INK)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_pools(axis: Any, plan: Plan) -> None:
    """Workers on top of the pool's panel, the serial rule's own pool, and what each rule asks for."""
    per_worker = plan.terms.groups_per_s / plan.terms.workers
    top = axis.secondary_xaxis("top", functions=(lambda μ: μ / per_worker, lambda workers: workers * per_worker))
    top.set_xlabel("workers", color=INK)
    top.tick_params(colors=INK)
    needed, serial = plan.configured, plan.serial
    overlap = f"{100 * needed.prediction.utilisation:.4g} % needs {needed.groups_per_s:.4g} groups/s"
    if not needed.reachable:
        overlap = f"{100 * plan.target_utilisation:.4g} % is out of reach of any pool at κ = {plan.workload.publish_interval}"
    note = {"transform": axis.transAxes, "ha": "right", "fontsize": 9}
    axis.text(0.98, 0.11, overlap, color=CONFIGURED, **note)
    if serial.groups_per_s is None or plan.serial_prediction is None:
        axis.text(0.98, 0.05, "no pool meets the serial rule", color=SERIAL, **note)
        return
    axis.text(0.98, 0.05, f"the serial rule asks for {serial.groups_per_s:.4g} groups/s", color=SERIAL, **note)
    if serial.groups_per_s <= axis.get_xlim()[1]:
        there = ([serial.groups_per_s], [100 * plan.serial_prediction.utilisation])
        axis.plot(*there, marker="D", markersize=9, color=SERIAL, markeredgecolor="white", linestyle="none", zorder=5)


def _title(plan: Plan) -> str:
    workload, links, terms = plan.workload, plan.links, plan.terms
    given = (
        f"T = {workload.learner_step_s:.4g} s, B = {workload.groups_per_batch}, S = {workload.staleness_bound}, "
        f"κ = {workload.publish_interval}, L = {terms.latency.mean_s:.4g} s (cv {terms.latency.cv:.3g}), "
        f"D = {links.transfer_s:.4g} + {links.fixed_s:.4g} s, α = {workload.accepted_share:.4g}, "
        f"μ = {terms.groups_per_s:.4g} groups/s"
    )
    return f"Run {plan.run_name}, T {terms.provenance['T']}: {given}"
