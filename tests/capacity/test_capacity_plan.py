"""Plans from a configuration and from measurements, their dials and their text."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.capacity.dials import dials
from echo2.capacity.model import Links, Workload, predict
from echo2.capacity.plan import Terms, estimate_terms, make_plan, predict_run, render_plan
from echo2.config import Config, load_config
from echo2.errors import UserError

seeded = settings(derandomize=True, deadline=None)
whole_ms = st.integers(0, 20_000).map(lambda ms: ms / 1000)


def example(*overrides: str) -> Config:
    """T = 1, B = 32, L = 0.8, S = 4, D = 2, α = 1, with one slot (1.25 groups/s) per worker."""
    return load_config(
        [],
        [
            "batch.groups=32",
            "staleness.bound=4",
            "staleness.publish_interval=2",
            "fleet.workers=26",
            "capacity.learner_step_s=1.0",
            "capacity.group_latency_s=0.8",
            "capacity.worker_groups_per_s=1.25",
            "capacity.accepted_share=1.0",
            "capacity.transfer_s=2.0",
            "capacity.dissemination_fixed_s=0.0",
            *overrides,
        ],
    )


def test_estimates_come_from_the_configuration_and_say_so() -> None:
    plan = make_plan(example())
    assert plan.terms.source == "estimate"
    assert plan.terms.groups_per_s == 26 * 1.25
    assert plan.workload == Workload(1.0, 32, 4, 2, 0.8, 1.0)
    assert plan.links == Links(2.0, 0.0)
    assert "1 s          estimate from [capacity]" in render_plan(make_plan(Config()))


def test_the_example_keeps_the_learner_busy_with_26_workers_where_the_serial_rule_wants_77_and_stalls() -> None:
    plan = make_plan(example("capacity.target_utilisation=1.0"))
    assert plan.prediction.utilisation == 1
    assert plan.needed_workers == 26
    assert plan.best_interval.steps == 2
    assert plan.at_serial is not None
    assert plan.at_serial.utilisation == pytest.approx(3 / 3.8)
    assert "serial, κB/(αμ) + D ≤ κT  3  96        77       78.95 %" in render_plan(plan)


def test_a_run_lasts_its_steps_and_costs_its_workers() -> None:
    plan = make_plan(example("run.steps=7200", "fleet.price_usd_per_hour=0.5"))
    assert plan.duration_s == 7200
    assert plan.workers_usd == pytest.approx(2 * 26 * 0.5)
    text = render_plan(plan)
    assert "2 h 0 min" in text
    assert "26.00 USD" in text


def test_measured_terms_replace_the_estimates_and_are_labelled() -> None:
    config = example()
    measured = replace(estimate_terms(config), learner_step_s=2.0, groups_per_s=8.0, workers=4, source="measured")
    plan = make_plan(config, measured)
    assert plan.prediction == predict_run(config, measured)
    assert plan.prediction.step_time_s == 4.0
    assert plan.prediction.utilisation == 0.5
    assert plan.needed_workers == 8
    text = render_plan(plan)
    assert "measured in this run: 4 × 2 groups/s per worker" in text
    assert "estimate" not in text


def test_without_configured_workers_the_plan_takes_what_the_target_needs() -> None:
    plan = make_plan(example("fleet.workers=0", "capacity.target_utilisation=0.97"))
    assert plan.terms.workers == math.ceil(0.97 * 25.6)
    assert plan.prediction.utilisation >= 0.97
    assert "planned with 25, since fleet.workers = 0 leaves it open" in render_plan(plan)


def test_a_target_out_of_reach_is_said_with_the_best_that_can_be_had() -> None:
    text = render_plan(make_plan(example("staleness.publish_interval=3")))
    assert "97 % is out of reach of any pool; this gives the best, 78.95 %" in text
    assert "short by 0.8 s; the learner waits 0.2667 s per step" in text


def test_links_that_no_interval_suits_are_said_with_the_interval_they_need() -> None:
    text = render_plan(make_plan(example("capacity.transfer_s=7.0")))
    assert "links need κ ≥ 7, above S + 1 = 5" in text
    assert "κ     2 steps        no value is enough" in text


def test_each_dial_names_the_value_that_lifts_the_binding_term() -> None:
    lines = render_plan(make_plan(example("staleness.publish_interval=3"))).splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("dial")) :]
    assert [" ".join(line.split()) for line in table[1:6]] == [
        "S 4 steps at least 5 steps: lifts the binding term",
        "κ 3 steps at least 2 steps: lifts the binding term",
        "D 2 s at most 1.2 s: lifts the binding term",
        "L 0.8 s at most 0 s: lifts the binding term",
        "μ 32.5 groups/s not alone: at 32 groups/s freshness binds, U = 78.95 %",
    ]


def test_a_dial_that_is_not_enough_alone_says_what_would_bind_next() -> None:
    text = render_plan(make_plan(example("fleet.workers=16", "staleness.publish_interval=3")))
    assert "not alone: at 5 steps generation binds, U = 62.5 %" in text


@seeded
@given(
    learner_step_s=st.floats(0.1, 10.0),
    bound=st.integers(0, 6),
    interval=st.integers(1, 7),
    group_latency_s=whole_ms,
    transfer_s=whole_ms,
    fixed_s=whole_ms,
    groups_per_s=st.floats(1.0, 200.0),
)
def test_every_dial_said_to_keep_the_learner_busy_does_and_a_little_less_does_not(
    learner_step_s: float,
    bound: int,
    interval: int,
    group_latency_s: float,
    transfer_s: float,
    fixed_s: float,
    groups_per_s: float,
) -> None:
    workload = Workload(learner_step_s, 32, bound, min(interval, bound + 1), group_latency_s, 0.8)
    links = Links(transfer_s, fixed_s)

    def stalls(symbol: str, value: float) -> bool:
        scale = value / links.latency_s if symbol == "D" and links.latency_s else 1.0
        changed = {
            "S": lambda: predict(replace(workload, staleness_bound=value), links, groups_per_s),
            "κ": lambda: predict(replace(workload, publish_interval=value), links, groups_per_s),
            "D": lambda: predict(workload, Links(transfer_s * scale, fixed_s * scale), groups_per_s),
            "L": lambda: predict(replace(workload, group_latency_s=value), links, groups_per_s),
            "μ": lambda: predict(workload, links, value),
        }
        return changed[symbol]().binding.name != "learner"

    for dial in dials(workload, links, groups_per_s):
        if not dial.keeps_busy:
            continue
        assert dial.limit is not None
        if not (dial.symbol == "D" and links.latency_s == 0):
            assert not stalls(dial.symbol, dial.limit)
            if dial.symbol in ("S", "κ"):
                least = workload.publish_interval - 1 if dial.symbol == "S" else 1
                assert dial.limit == least or stalls(dial.symbol, dial.limit - 1)
            elif dial.limit > 1e-3:
                assert stalls(dial.symbol, dial.limit * (1.01 if dial.symbol in ("D", "L") else 0.99))


def test_dissemination_must_shrink_until_the_links_carry_it_too() -> None:
    """Freshness would allow D = 6 − 0.8 s, but two thirds of D occupy the links, for at most κ·T = 1 s."""
    by_symbol = {dial.symbol: dial for dial in dials(Workload(1.0, 32, 6, 1, 0.8, 1.0), Links(2.0, 1.0), groups_per_s=32.0)}
    assert by_symbol["D"].limit == pytest.approx(1.5)
    assert by_symbol["D"].keeps_busy


def test_a_pool_of_no_workers_is_refused() -> None:
    with pytest.raises(UserError, match="workers = 0 make no pool"):
        Terms(1.0, 1.0, 10.0, 0.8, 0.1, 0.2, workers=0, source="measured")


def test_a_measurement_that_cannot_be_is_refused_by_name() -> None:
    terms = replace(estimate_terms(example()), groups_per_s=0.0)
    with pytest.raises(UserError, match=r"groups_per_s \(μ\) = 0\.0"):
        make_plan(example(), terms)


def test_planning_loads_nothing_heavy() -> None:
    loaded = "import sys, echo2.capacity.plan; print(sorted({'torch', 'numpy', 'pydantic', 'httpx'} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.strip() == "[]"
