"""Plans from a configuration and from measurements, their dials and their text."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from plan_example import example

from echo2.capacity.latencies import Lognormal
from echo2.capacity.model import Links, Workload
from echo2.capacity.plan import Plan, make_plan, render_plan
from echo2.capacity.tables import percent
from echo2.capacity.terms import TERM_NAMES, Terms, estimate_terms, predict_run
from echo2.config import Config, load_config
from echo2.errors import UserError

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"


def rows(text: str, table: str) -> list[str]:
    """The rows of one table with single blanks."""
    lines = text.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith(table)) + 1
    end = next((place for place in range(start, len(lines)) if not lines[place]), len(lines))
    return [" ".join(line.split()) for line in lines[start:end]]


def test_estimates_come_from_the_configuration_and_say_so() -> None:
    plan = make_plan(example("capacity.group_latency_cv=0.5"))
    assert plan.terms.groups_per_s == 26 * 1.25
    assert plan.terms.latency == Lognormal(0.8, 0.5)
    assert plan.workload == Workload(1.0, 32, 4, 2, 0.8, 1.0)
    assert plan.links == Links(2.0, 0.0)
    assert "T learner's work per step 1 s estimate from [capacity]" in rows(render_plan(make_plan(Config())), "term")


def test_the_example_needs_32_slots_where_the_serial_rule_wants_77_and_stalls() -> None:
    plan = make_plan(example("capacity.target_utilisation=1.0", "fleet.workers=32"))
    assert plan.prediction.utilisation == 1
    assert plan.simulated.utilisation == pytest.approx(1)
    assert plan.workers_for(plan.configured.groups_per_s) == 32
    assert plan.best.publish_interval == 2
    assert plan.serial_prediction is not None
    assert plan.serial_prediction.utilisation == pytest.approx(3 / 3.8)
    assert "serial, κB/(αμ) + D ≤ κT 3 96 77 78.9 %" in rows(render_plan(plan), "rule")


def test_a_pool_that_needs_two_waves_for_a_batch_is_told_the_slow_end_and_the_wait() -> None:
    """26 slots complete 32.5 groups per second, but a batch of 32 takes 1.6 s of the 2 s that freshness leaves with D."""
    plan = make_plan(example())
    assert plan.slow_end_s == pytest.approx(1.6)
    assert plan.prediction.step_time_s == pytest.approx(1.15)
    assert plan.simulated.step_time_s == pytest.approx(1.15, rel=0.01)
    text = render_plan(plan)
    assert "W = 1.6 s: until a batch is whole, at the pace of T; an idle pool takes 1.6 s for one" in text
    assert "binding term freshness short by 0.6 s; the learner waits 0.15 s per step" in rows(text, "prediction")


def test_a_run_lasts_its_steps_and_costs_its_workers() -> None:
    plan = make_plan(example("run.steps=7200", "fleet.workers=32", "fleet.price_usd_per_hour=0.5"))
    assert plan.duration_s == pytest.approx(7200)
    assert plan.workers_usd == pytest.approx(2 * 32 * 0.5)
    text = render_plan(plan)
    assert "2 h 0 min" in text
    assert "32.00 USD" in text


def test_workers_without_a_price_are_not_said_to_cost_nothing() -> None:
    assert "USD" not in render_plan(make_plan(example("fleet.workers=32")))


def in_calls(*settings: str) -> Plan:
    """Of two workers that generate in calls, on which no pool reaches the target."""
    return make_plan(load_config([DEMO], [*settings]))


def test_both_rules_are_told_by_the_same_measure() -> None:
    plan = in_calls()
    overlap, serial = (row.split() for row in rows(render_plan(plan), "rule"))
    # The same κ and workers that are no faster: they cannot keep the learner busier.
    assert serial[-5] == overlap[-5] == "1" and float(serial[-4]) < float(overlap[-4]) and serial[-3] == overlap[-3] == "3"
    assert float(serial[-2]) <= float(overlap[-2])


def test_a_pool_in_calls_for_a_target_out_of_reach_is_not_called_the_best_where_a_larger_one_is_better() -> None:
    plan = in_calls()
    largest = plan.configured.largest
    assert largest is not None and largest.utilisation > plan.configured.simulated.utilisation
    workers = plan.workers_for(largest.groups_per_s)
    assert in_calls(f"fleet.workers={workers}").simulated.utilisation == largest.utilisation
    own, more = percent(plan.configured.simulated.utilisation), percent(largest.utilisation)
    text = render_plan(plan)
    assert f"97 % is out of reach of any pool; this gives {own}, {workers} workers {more}" in text
    assert "the best" not in text


def test_measured_terms_replace_the_estimates_and_are_labelled() -> None:
    config = example()
    known = dict.fromkeys(TERM_NAMES, "measured in runs/x: 1 … 3 (95 %, 40 steps)")
    measured = replace(estimate_terms(config, 4), learner_step_s=2.0, groups_per_s=8.0, provenance=known)
    plan = make_plan(config, measured)
    assert plan.simulated == predict_run(config, measured)
    assert plan.prediction.binding.name == "generation"
    assert plan.simulated.step_time_s == pytest.approx(4.0)
    text = render_plan(plan)
    assert "measured in runs/x: 1 … 3 (95 %, 40 steps): 4 × 2 groups/s per worker" in text
    assert "estimate" not in text


def test_without_configured_workers_the_plan_takes_what_the_target_needs() -> None:
    plan = make_plan(example("fleet.workers=0", "capacity.target_utilisation=0.97"))
    assert plan.terms.workers == plan.configured.slots == 32
    assert plan.prediction.utilisation >= 0.97
    assert "needed workers 32 planned with 32, since fleet.workers = 0 leaves it open" in rows(render_plan(plan), "prediction")


def test_a_target_out_of_reach_is_said_with_the_best_that_can_be_had() -> None:
    text = render_plan(make_plan(example("staleness.publish_interval=3", "fleet.workers=40")))
    assert "97 % is out of reach of any pool; this gives the best, 78.95 %" in text
    assert "short by 0.8 s; the learner waits 0.2667 s per step" in text


def test_links_that_carry_fewer_snapshots_than_are_published_are_told() -> None:
    text = render_plan(make_plan(example("capacity.transfer_s=3.0", "staleness.bound=6", "fleet.workers=64")))
    assert "the links carry one snapshot in 4 steps, so workers skip some of κ = 2" in text


def test_each_dial_names_the_value_that_reaches_the_target() -> None:
    plan = make_plan(example("staleness.publish_interval=3", "fleet.workers=96", "capacity.target_utilisation=1.0"))
    assert rows(render_plan(plan), "dial") == [
        "S 4 steps at least 5 steps",
        "κ 3 steps at least 2 steps",
        "D 2 s at most 1.2 s",
        "L 0.8 s at most 0 s",
        "μ 120 groups/s does not help: freshness binds",
        "B 32 groups at least 45 groups",
    ]


def test_a_dial_that_is_not_enough_alone_says_what_would_bind_next() -> None:
    told = rows(render_plan(make_plan(example("staleness.publish_interval=3"))), "dial")
    assert "κ 3 steps not alone: at 2 steps U = 86.96 %, freshness binds" in told
    assert "S 4 steps at least 7 steps" in told


def test_the_staleness_to_expect_is_told_with_its_distribution() -> None:
    told = next(row for row in rows(render_plan(make_plan(example("fleet.workers=32"))), "prediction") if "staleness" in row)
    assert told.startswith("staleness 3.") and "at most 4" in told and "%" in told


def test_a_pool_of_no_workers_or_no_throughput_is_refused() -> None:
    with pytest.raises(UserError, match="workers = 0 make no pool"):
        replace(estimate_terms(example(), 1), workers=0)
    for impossible in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match=rf"groups_per_s \(μ\) = {impossible!r} is not a finite number above 0"):
            replace(estimate_terms(example(), 1), groups_per_s=impossible)


def test_more_workers_have_the_speed_of_those_that_were_measured() -> None:
    terms: Terms = estimate_terms(example(), 4)
    assert terms.with_workers(6).groups_per_s == pytest.approx(6 * 1.25)
    assert terms.with_workers(6).slots == 6


def test_planning_loads_nothing_heavy() -> None:
    heavy = {"torch", "numpy", "pydantic", "httpx", "socket", "asyncio"}
    loaded = f"import sys, echo2.capacity.plan; print(sorted({heavy} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.strip() == "[]"
