"""What the reconciler makes of real spot machines: utilisation, cost and preemptions over all multi-zone traces.

    python -m benchmarks.spot [--quick] [--json FILE]

A run with the shape of Qwen3-8B, 32 groups of 8 completions of 8,192 tokens a step, S = 4, κ = 1, a learner's step of 109 s,
rents the machine of the shipped catalog that is cheapest per rollout, one H200, in the zones of each set of traces that is
shipped (`clouds/spot_traces`). The need takes 9 machines. Where a zone was asked for fewer at a time, as many stand behind each
machine of the trace as let the zone at its best hold the whole fleet: they come and go together, which is as hard as it gets.

Each set is replayed three times, with the same machine, need and limits, and the twin for hub and learner:

- reconciler: `clouds/reconciler.py` as `echo2 fleet` runs it, spot and on demand, without a cap on the share of one zone;
- on demand: the same without spot machines, for two days at most, since nothing happens to them;
- unreplaced: spot machines alone, and nobody replaces them once all were up.

Utilisation is over the whole time, the first start included; cost is rent and traffic per learner step. "Hindsight" is what
nobody can beat who keeps the fleet up: spot machines whenever the traces have any, on demand the rest, started in no time. A
set allows the goal of 0.6 of the cost on demand where hindsight does. Sets run in parallel. With --quick two days of each are
replayed, so that some are all bad weather.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from clouds.comparison import Comparison, compare, machines_for
from clouds.replay import Replayed
from clouds.replay_market import TracedMarket, choose_kind
from clouds.traces import SHIPPED, TraceSet, read_traces
from echo2.capacity.plan import make_plan
from echo2.capacity.tables import duration, number, percent, table
from echo2.config import load_config
from echo2.errors import UserError

CONFIG = Path("examples/rented.toml")
SETTINGS = (
    "batch.groups=32",
    "sampling.max_completion_tokens=16384",
    "worker.engine=vllm",
    "worker.slots=12",
    "capacity.group_latency_s=200.0",
    "capacity.worker_groups_per_s=0.05",
    "activation.completion_tokens=8192",
    "activation.max_domain_share=1.0",
)
LEAST_UTILISATION, MOST_COST = 0.95, 0.6
QUICK_S = 2 * 86400.0


def replay(traces: TraceSet, most_s: float) -> Comparison:
    """One set, three times."""
    config = load_config([CONFIG], SETTINGS)
    plan = make_plan(config)
    kind = choose_kind(config, plan)
    market = TracedMarket(config, plan, traces, kind, "on-demand")
    fleet = math.ceil(market.demand.needed_groups_per_s / market.on_demand[0].effective_groups_per_s)
    return compare(config, plan, traces, kind, machines_for(traces, fleet), most_s, without_replacement=True)


def allows(found: Comparison) -> bool:
    """Whether the goal for the cost can be reached on these traces at all."""
    return found.hindsight_share <= MOST_COST


def render(found: Sequence[Comparison]) -> str:
    """The table of all sets, and the reasons where a goal is out of reach."""
    columns = ("traces", "time", "way", "U", "USD per step", "of on demand", "preempted", "launches", "not had", "idle")
    rows = [row for each in found for row in (*_rows(each), ("",) * len(columns))]
    return "\n\n".join([table(columns, rows[:-1]), *map(_reason, (each for each in found if not allows(each)))])


def _rows(found: Comparison) -> list[tuple[str, ...]]:
    ways = {"reconciler": found.reconciler, "on demand": found.on_demand, "unreplaced": found.unreplaced}
    rows = [_row(found, name, way) for name, way in ways.items() if way is not None]
    rows.append(("", "", "hindsight", "", "", percent(found.hindsight_share), "", "", "", ""))
    rows[0] = (found.traces.name, duration(found.reconciler.duration_s), *rows[0][2:])
    return rows


def _row(found: Comparison, name: str, way: Replayed) -> tuple[str, ...]:
    total = way.total
    cost = (number(way.usd_per_step), percent(found.cost_share(way))) if way.steps else ("–", "–")
    counts = map(str, (total.preempted, total.launches, total.failed))
    return "", "", name, percent(way.utilisation), *cost, *counts, percent(total.idle_share)


def _reason(found: Comparison) -> str:
    name, enough, none, goal = found.traces.name, *map(percent, (found.enough_share, found.none_share, MOST_COST))
    return (
        f"{name}: the zones had all {found.fleet} machines for {enough} of the time, none for {none}, so not even\n"
        f"with hindsight is {goal} of the cost on demand to be had; the reconciler rents on demand what is missing, and\n"
        "goes back once it can"
    )


def figures_of(found: Sequence[Comparison]) -> dict[str, float]:
    """The figures; costs are over the sets that allow the goal, and over all."""
    costs = {each.traces.name: each.cost_share(each.reconciler) for each in found}
    return {
        "traces": len(found),
        "traces_that_allow": sum(map(allows, found)),
        "utilisation_min": min(each.reconciler.utilisation for each in found),
        "cost_over_on_demand_max": max((costs[each.traces.name] for each in found if allows(each)), default=math.nan),
        "cost_over_on_demand_max_all": max(costs.values()),
        "cost_over_hindsight_max": max(costs[each.traces.name] / each.hindsight_share for each in found),
    }


def measure(quick: bool) -> dict[str, float]:
    """All figures; prints the tables."""
    sets = sorted((each for each in read_traces(SHIPPED) if len(each.zones) > 1), key=lambda each: -each.duration_s)
    most_s = QUICK_S if quick else math.inf
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as executor:
        found = list(executor.map(partial(replay, most_s=most_s), sets))
    print(f"{found[0].fleet} × {found[0].machine}\n")
    print(render(found))
    return figures_of(found)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spot", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two days of each set")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    try:
        figures = measure(arguments.quick)
    except UserError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print()
    for name, value in figures.items():
        print(f"{name:<28}{value:.4g}")
    goal = f"U ≥ {LEAST_UTILISATION} everywhere, cost ≤ {MOST_COST} where hindsight allows"
    reached = figures["utilisation_min"] >= LEAST_UTILISATION and figures["cost_over_on_demand_max"] <= MOST_COST
    verdict = "two days are too few to tell" if arguments.quick else "reached" if reached else "missed"
    print(f"goal: {goal}: {verdict}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"figures": figures}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
