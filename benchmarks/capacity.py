"""How far the capacity model can be trusted: closed form, provisioning rule and serial rule, judged by the twin.

    python -m benchmarks.capacity [--quick] [--json FILE]

Random workloads: S 0 to 12, κ 1 to S + 1, B 4 to 512, D 0 to 8 T, L 0.1 to 6 T, latency cv 0 to 1, α 0.5 to 1, pools of 1 to
1,000 slots. Three things are measured against the discrete-event simulation of the same pipeline:

- the closed form for random latencies (`echo2.capacity.slow_end`): relative error of its step time. Beside it stands the closed
  form of `echo2.capacity.model` fed with the mean latency, which is what a model without a slow end would say;
- the provisioning rule at target utilisation 0.97: whether its pool reaches 0.95, and its size over the twin's own minimum,
  the fewest slots with which the simulation reaches 0.97 at the rule's κ, with another seed than those that the rule asks the
  twin with. 1.00 is the limit: less only reaches less;
- the peer: the serial rule, κ = S − 1 and κB/(αμ) + D ≤ κT, by the same measure. It exists for S ≥ 2 only.

The twin's own speed is in rollouts per second of one core, eight members to a group, for a pool of 64 workers. At the end the
twin itself is held against whole runs, as `python -m benchmarks.stack` does; `--quick` leaves that out.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from benchmarks import stack
from echo2.capacity.latencies import Lognormal
from echo2.capacity.model import Links, Workload, serial_rule, step_time_s
from echo2.capacity.pool import Pool, WorkerKind
from echo2.capacity.provisioning import provision
from echo2.capacity.simulation import simulate
from echo2.capacity.slow_end import loaded_step_time_s

TARGET = 0.97
ACCEPTABLE = 0.95
MEMBERS = 8
MOST_SLOTS = 20_000


@dataclass(frozen=True, slots=True)
class Case:
    """A random workload and the pool that it is given."""

    workload: Workload
    links: Links
    latency: Lognormal
    slots: int
    seed: int

    def observed_step_s(self, slots: int, steps: int) -> float:
        """Step time in the twin with so many slots; its links carry the newest snapshot, as the workers fetch it."""
        pool = Pool((WorkerKind(1, slots=slots),))
        return simulate(self.workload, self.links, pool, steps, self.seed, latency=self.latency, carry="newest").step_time_s

    def reaches(self, utilisation: float, slots: int, steps: int) -> bool:
        """Whether the twin's learner is that busy with so many slots."""
        return self.workload.learner_step_s / self.observed_step_s(slots, steps) >= utilisation


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of the step time for one case."""

    bound: int
    closed_form: float
    mean_latency: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The rule's pool for one feasible case, in the twin."""

    reached: bool
    over_minimum: float
    serial_over_minimum: float | None


def random_case(seed: int) -> Case:
    """Sizes, latencies and pools are drawn evenly in the logarithm, everything else evenly; T = 1 s."""
    draw = random.Random(seed)
    bound = draw.randint(0, 12)
    latency_s, dissemination_s, transfer_share = _log_uniform(draw, 0.1, 6.0), draw.uniform(0.0, 8.0), draw.random()
    workload = Workload(
        learner_step_s=1.0,
        groups_per_batch=round(_log_uniform(draw, 4, 512)),
        staleness_bound=bound,
        publish_interval=draw.randint(1, bound + 1),
        group_latency_s=latency_s,
        accepted_share=draw.uniform(0.5, 1.0),
    )
    links = Links(dissemination_s * transfer_share, dissemination_s * (1 - transfer_share))
    return Case(workload, links, Lognormal(latency_s, draw.uniform(0.0, 1.0)), round(_log_uniform(draw, 1, 1000)), seed)


def step_time_errors(case: Case, steps: int) -> Errors:
    """Both closed forms against the twin."""
    observed_s = case.observed_step_s(case.slots, steps)
    with_slow_end_s = loaded_step_time_s(case.workload, case.links, case.slots, case.latency)
    with_mean_s = step_time_s(case.workload, case.links, case.slots / case.latency.mean_s)
    return Errors(case.workload.staleness_bound, abs(with_slow_end_s / observed_s - 1), abs(with_mean_s / observed_s - 1))


def verdict_on_rule(case: Case, steps: int) -> Verdict | None:
    """None where the rule says that no pool reaches the target."""
    pool = provision(case.workload, case.links, TARGET, latency=case.latency)
    if not pool.reachable:
        return None
    case, slots = replace(case, workload=replace(case.workload, publish_interval=pool.publish_interval)), pool.units
    least = least_slots(case, slots, steps)
    reached = slots >= (least or math.inf) or case.reaches(ACCEPTABLE, slots, steps)
    if least is None:
        return Verdict(reached, math.nan, None)
    serial = serial_rule(case.workload, case.links) if case.workload.staleness_bound >= 2 else None
    serial_slots = None
    if serial is not None and serial.groups_per_s is not None:
        serial_slots = math.ceil(serial.groups_per_s * case.latency.mean_s)
    return Verdict(reached, slots / least, None if serial_slots is None else serial_slots / least)


def least_slots(case: Case, guess: int, steps: int) -> int | None:
    """The twin's own minimum pool, by bisection outwards from a guess; None where MOST_SLOTS do not reach the target."""
    low, high = 0, guess
    while not case.reaches(TARGET, high, steps):
        if high == MOST_SLOTS:
            return None
        low, high = high, min(MOST_SLOTS, high + high // 8 + 1)
    step = guess // 16 + 1
    while high - step > low and case.reaches(TARGET, high - step, steps):
        high, step = high - step, 2 * step
    low = max(low, high - step)
    while high - low > max(1, guess // 200):
        middle = (low + high) // 2
        if case.reaches(TARGET, middle, steps):
            high = middle
        else:
            low = middle
    return high


def serial_utilisation(cases: Sequence[Case], steps: int) -> list[float]:
    """What the serial rule's own κ and pool reach in the twin, where the rule can be met."""
    reached = []
    for case in cases:
        if case.workload.staleness_bound < 2:
            continue
        rule = serial_rule(case.workload, case.links)
        if rule.groups_per_s is None:
            continue
        own = replace(case, workload=replace(case.workload, publish_interval=rule.publish_interval))
        slots = math.ceil(rule.groups_per_s * case.latency.mean_s)
        if slots <= MOST_SLOTS:
            reached.append(case.workload.learner_step_s / own.observed_step_s(slots, steps))
    return reached


def twin_rollouts_per_s(steps: int) -> float:
    """Rollouts that one core simulates per second, 64 workers of four slots."""
    workload, pool = Workload(1.0, 64, 4, 2, 2.0, 0.8), Pool((WorkerKind(64, slots=4),))
    started_s = time.process_time()
    result = simulate(workload, Links(1.0, 0.5), pool, steps, 0, latency=Lognormal(2.0, 0.5))
    return result.leased * MEMBERS / (time.process_time() - started_s)


def percentile_95(values: Sequence[float]) -> float:
    """The smallest value that 95 % of the values do not exceed."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def _log_uniform(draw: random.Random, low: float, high: float) -> float:
    return math.exp(draw.uniform(math.log(low), math.log(high)))


def measure(cases: Sequence[Case], steps: int) -> dict[str, float]:
    """All figures; prints the tables as it goes."""
    errors = [step_time_errors(case, steps) for case in cases]
    print(f"{len(cases)} random workloads, {steps} simulated steps each\n")
    print(f"{'step time against the twin':<44}{'cases':>8}{'median':>10}{'p95':>10}")
    for name, chosen in (("S ≥ 1", [e for e in errors if e.bound]), ("S = 0", [e for e in errors if not e.bound])):
        for form, values in (
            ("closed form with the slow end", [e.closed_form for e in chosen]),
            ("closed form with the mean latency", [e.mean_latency for e in chosen]),
        ):
            print(f"{name + ', ' + form:<44}{len(values):>8}{median(values):>10.2%}{percentile_95(values):>10.2%}")
    verdicts = [verdict for case in cases if (verdict := verdict_on_rule(case, steps)) is not None]
    ratios = [v.over_minimum for v in verdicts if not math.isnan(v.over_minimum)]
    serial_ratios = [v.serial_over_minimum for v in verdicts if v.serial_over_minimum is not None]
    serial_reached = serial_utilisation(cases, steps)
    reached_share = fmean(v.reached for v in verdicts)
    speed = twin_rollouts_per_s(1000)
    print(f"\n{'pool for U = 0.97 over the twin’s minimum':<44}{'cases':>8}{'median':>10}{'p95':>10}")
    for name, values in (("rule", ratios), ("serial rule", serial_ratios)):
        print(f"{name:<44}{len(values):>8}{median(values):>10.3f}{percentile_95(values):>10.3f}")
    print(f"\nrule: U ≥ {ACCEPTABLE} in {reached_share:.2%} of {len(verdicts)} feasible workloads")
    serial_share = fmean(u >= ACCEPTABLE for u in serial_reached)
    print(f"serial rule, its own κ: U ≥ {ACCEPTABLE} in {serial_share:.2%} of {len(serial_reached)} where it can be met")
    print(f"twin: {speed:,.0f} rollouts/s on one core")
    with_slack = [e.closed_form for e in errors if e.bound]
    return {
        "closed_form_median_error": median(with_slack),
        "closed_form_p95_error": percentile_95(with_slack),
        "rule_reaches_target_share": reached_share,
        "pool_over_minimum_median": median(ratios),
        "pool_over_minimum_p95": percentile_95(ratios),
        "serial_pool_over_minimum_median": median(serial_ratios),
        "twin_rollouts_per_s": speed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capacity", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="100 workloads instead of 1,000")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    figures = measure(
        [random_case(seed) for seed in range(100 if arguments.quick else 1000)], steps=160 if arguments.quick else 240
    )
    if not arguments.quick:
        print("\nthe simulation against whole runs:")
        figures |= stack.measure(quick=False)
    if arguments.json:
        arguments.json.write_text(json.dumps({"figures": figures}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
