"""The closed form against an independent recurrence, its properties, and what it refuses."""

from __future__ import annotations

import doctest
import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from echo2.capacity import admission, dials, model, provisioning, transfer
from echo2.capacity.model import (
    Links,
    Workload,
    binding_term,
    predict,
    required_throughput,
    serial_rule,
    step_time_s,
    utilisation,
)
from echo2.errors import UserError

seeded = settings(derandomize=True, deadline=None)

EXAMPLE = Workload(
    learner_step_s=1.0, groups_per_batch=32, staleness_bound=4, publish_interval=2, group_latency_s=0.8, accepted_share=1.0
)
EXAMPLE_LINKS = Links(transfer_s=2.0, fixed_s=0.0)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    bound = draw(st.integers(0, 8))
    return Workload(
        learner_step_s=draw(st.floats(0.1, 10.0)),
        groups_per_batch=draw(st.integers(1, 64)),
        staleness_bound=bound,
        publish_interval=draw(st.integers(1, bound + 1)),
        group_latency_s=draw(st.floats(0.0, 30.0)),
        accepted_share=draw(st.floats(0.1, 1.0)),
    )


links_of_any_speed = st.builds(Links, transfer_s=st.floats(0.0, 30.0), fixed_s=st.floats(0.0, 10.0))
throughputs = st.floats(0.5, 500.0)


def recurrence_ends_s(workload: Workload, links: Links, groups_per_s: float, steps: int) -> list[float]:
    """Ends of the steps, batch by batch: the links carry snapshots one after the other, the pool never stops."""
    T, S, interval = workload.learner_step_s, workload.staleness_bound, workload.publish_interval
    ends: list[float] = []
    sent_s: dict[int, float] = {}
    learner_free_s, batch_s, links_free_s = 0.0, 0.0, 0.0
    for t in range(steps):
        snapshot = interval * math.ceil((t - S) / interval)
        arrival_s = 0.0
        if snapshot > 0:
            if snapshot not in sent_s:
                sent_s[snapshot] = max(ends[snapshot - 1], links_free_s)
                links_free_s = sent_s[snapshot] + links.transfer_s
            arrival_s = sent_s[snapshot] + links.transfer_s + links.fixed_s
        pool_s = workload.groups_per_batch / (workload.accepted_share * groups_per_s)
        batch_s = max(arrival_s + workload.group_latency_s, batch_s + pool_s)
        learner_free_s = max(learner_free_s, batch_s) + T
        ends.append(learner_free_s)
    return ends


@pytest.mark.parametrize("module", [admission, model, dials, provisioning, transfer])
def test_numbers_worked_by_hand_in_the_docstrings_hold(module: object) -> None:
    outcome = doctest.testmod(module)  # type: ignore[arg-type]
    assert outcome.attempted > 0
    assert outcome.failed == 0


@seeded
@given(workload=workloads(), links=links_of_any_speed, groups_per_s=throughputs)
def test_closed_form_is_the_long_run_step_time_of_the_recurrence(workload: Workload, links: Links, groups_per_s: float) -> None:
    """Over whole loops, after the start-up: 2,520 is a multiple of every P up to 10, and S ≤ 8 allows no longer one."""
    steps, window = 4 * 2520, 2520
    ends = recurrence_ends_s(workload, links, groups_per_s, steps)
    observed_s = (ends[-1] - ends[-1 - window]) / window
    assert observed_s == pytest.approx(step_time_s(workload, links, groups_per_s), rel=1e-9)


@seeded
@given(workload=workloads(), links=links_of_any_speed, groups_per_s=throughputs)
def test_a_whole_run_never_strays_from_its_predicted_pace(workload: Workload, links: Links, groups_per_s: float) -> None:
    pace_s = step_time_s(workload, links, groups_per_s)
    ends = recurrence_ends_s(workload, links, groups_per_s, 2000)
    generation_s = workload.groups_per_batch / (workload.accepted_share * groups_per_s)
    latest_s = workload.learner_step_s + links.latency_s + workload.group_latency_s + generation_s
    earliest_s = -(workload.staleness_bound + 1) * pace_s
    strayed_s = [end - (t + 1) * pace_s for t, end in enumerate(ends)]
    assert earliest_s * (1 + 1e-6) <= min(strayed_s)
    assert max(strayed_s) <= latest_s * (1 + 1e-6)


@seeded
@given(
    workload=workloads(),
    links=links_of_any_speed,
    groups_per_s=throughputs,
    factor=st.floats(1.0, 10.0),
    longer=st.floats(0, 10.0),
)
def test_slower_terms_never_make_the_step_shorter(
    workload: Workload, links: Links, groups_per_s: float, factor: float, longer: float
) -> None:
    now_s = step_time_s(workload, links, groups_per_s)
    slower = (
        (replace(workload, learner_step_s=workload.learner_step_s * factor), links, groups_per_s),
        (replace(workload, group_latency_s=workload.group_latency_s + longer), links, groups_per_s),
        (replace(workload, accepted_share=workload.accepted_share / factor), links, groups_per_s),
        (workload, replace(links, transfer_s=links.transfer_s + longer), groups_per_s),
        (workload, replace(links, fixed_s=links.fixed_s + longer), groups_per_s),
        (workload, links, groups_per_s / factor),
    )
    for arguments in slower:
        assert step_time_s(*arguments) >= now_s * (1 - 1e-12)


@seeded
@given(workload=workloads(), links=links_of_any_speed, groups_per_s=throughputs)
def test_learner_is_busy_exactly_when_the_rule_holds(workload: Workload, links: Links, groups_per_s: float) -> None:
    T, S, interval = workload.learner_step_s, workload.staleness_bound, workload.publish_interval
    shares = (
        workload.accepted_share * groups_per_s / (workload.groups_per_batch / T),
        ((S + 1 - interval) * T + T) / (links.latency_s + workload.group_latency_s + T),
        interval * T / links.transfer_s if links.transfer_s else math.inf,
    )
    assume(all(abs(share - 1) > 1e-6 for share in shares))
    prediction = predict(workload, links, groups_per_s)
    assert 0 < prediction.utilisation <= 1
    assert (prediction.utilisation == 1) == all(share > 1 for share in shares)
    assert (prediction.binding.name == "learner") == (prediction.utilisation == 1)
    assert prediction.utilisation == utilisation(workload, links, groups_per_s)


@seeded
@given(workload=workloads(), links=links_of_any_speed, groups_per_s=throughputs)
def test_a_binding_term_other_than_the_learner_is_short_of_something(
    workload: Workload, links: Links, groups_per_s: float
) -> None:
    binding = binding_term(workload, links, groups_per_s)
    assert binding.slack == 0 if binding.name == "learner" else binding.slack < 0


@seeded
@given(workload=workloads(), links=links_of_any_speed)
def test_synchronous_training_pays_every_latency_at_every_step(workload: Workload, links: Links) -> None:
    synchronous = replace(workload, staleness_bound=0, publish_interval=1)
    assert step_time_s(synchronous, links, 10 * required_throughput(workload)) == pytest.approx(
        workload.learner_step_s + links.latency_s + workload.group_latency_s
    )


def test_the_largest_interval_stops_once_per_interval_for_everything() -> None:
    workload = replace(EXAMPLE, staleness_bound=3, publish_interval=4)
    assert 4 * step_time_s(workload, EXAMPLE_LINKS, 1000.0) == pytest.approx(4 * 1.0 + 2.0 + 0.8)


def test_without_dissemination_latency_one_step_of_staleness_hides_generation() -> None:
    workload = replace(EXAMPLE, staleness_bound=1, publish_interval=1)
    assert utilisation(workload, Links(0.0, 0.0), required_throughput(workload)) == 1


def test_a_pool_one_slot_short_binds_on_generation_and_one_more_slot_frees_the_learner() -> None:
    short, enough = (slots / EXAMPLE.group_latency_s for slots in (25, 26))
    assert binding_term(EXAMPLE, EXAMPLE_LINKS, short).name == "generation"
    assert step_time_s(EXAMPLE, EXAMPLE_LINKS, short) == pytest.approx(1.024)
    assert predict(EXAMPLE, EXAMPLE_LINKS, enough).binding.name == "learner"


def test_snapshots_longer_than_their_interval_bind_on_the_links_however_large_the_bound() -> None:
    prediction = predict(replace(EXAMPLE, staleness_bound=40, publish_interval=1), EXAMPLE_LINKS, 1000.0)
    assert prediction.binding.name == "links"
    assert prediction.step_time_s == 2.0
    assert prediction.slack == -1.0


def test_serial_rule_asks_for_three_times_the_pool_and_still_stalls() -> None:
    rule = serial_rule(EXAMPLE, EXAMPLE_LINKS)
    assert rule.groups_per_s is not None
    assert math.ceil(rule.groups_per_s * EXAMPLE.group_latency_s) == 77
    serial = predict(replace(EXAMPLE, publish_interval=rule.publish_interval), EXAMPLE_LINKS, rule.groups_per_s)
    assert serial.binding.name == "freshness"
    assert serial.utilisation == pytest.approx(3 / 3.8)
    assert math.ceil(required_throughput(EXAMPLE) * EXAMPLE.group_latency_s) == 26
    assert utilisation(EXAMPLE, EXAMPLE_LINKS, 26 / 0.8) == 1


@pytest.mark.parametrize(
    ("bound", "links", "obstacle"),
    [(1, EXAMPLE_LINKS, "κ = S − 1 = 0 is below 1"), (3, EXAMPLE_LINKS, "D = 2 s leaves nothing of κ·T = 2 s")],
)
def test_serial_rule_says_why_no_pool_satisfies_it(bound: int, links: Links, obstacle: str) -> None:
    rule = serial_rule(replace(EXAMPLE, staleness_bound=bound, publish_interval=1), links)
    assert rule.groups_per_s is None
    assert rule.obstacle == obstacle


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "learner_step_s",
            0.0,
            "learner_step_s (T) = 0.0 is not a finite number above 0: give the seconds of learner work per step",
        ),
        ("learner_step_s", math.nan, "learner_step_s (T) = nan is not a finite number above 0"),
        ("learner_step_s", -1.0, "learner_step_s (T) = -1.0 is not"),
        ("learner_step_s", math.inf, "learner_step_s (T) = inf is not"),
        ("groups_per_batch", 0, "groups_per_batch (B) = 0 is not a whole number from 1 up"),
        ("groups_per_batch", math.nan, "groups_per_batch (B) = nan is not a whole number from 1 up"),
        ("staleness_bound", -1, "staleness_bound (S) = -1 is not a whole number from 0 up"),
        ("publish_interval", 0, "publish_interval (κ) = 0 is not a whole number from 1 up"),
        ("publish_interval", 6, "publish_interval (κ) = 6 exceeds staleness_bound (S) + 1 = 5"),
        ("group_latency_s", -0.1, "group_latency_s (L) = -0.1 is not a finite number from 0 up"),
        ("group_latency_s", math.nan, "group_latency_s (L) = nan is not"),
        ("accepted_share", 0.0, "accepted_share (α) = 0.0 is not above 0 and at most 1"),
        ("accepted_share", math.nan, "accepted_share (α) = nan is not"),
        ("accepted_share", 1.5, "accepted_share (α) = 1.5 is not"),
    ],
)
def test_an_impossible_workload_is_refused_by_name_and_value(field: str, value: float, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        replace(EXAMPLE, **{field: value})
    assert str(refusal.value).startswith(message)


def test_an_interval_beyond_the_bound_is_refused_with_both_ways_out() -> None:
    with pytest.raises(UserError, match=r"lower κ to 5 or raise S to 5"):
        replace(EXAMPLE, publish_interval=6)


@pytest.mark.parametrize("field", ["transfer_s", "fixed_s"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_impossible_links_are_refused_by_name_and_value(field: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"{field} \(D_\w+\) = {value!r} is not a finite number from 0 up"):
        replace(EXAMPLE_LINKS, **{field: value})


@pytest.mark.parametrize("groups_per_s", [0.0, -1.0, math.nan, math.inf])
def test_an_impossible_throughput_is_refused_by_name_and_value(groups_per_s: float) -> None:
    with pytest.raises(UserError, match=rf"groups_per_s \(μ\) = {groups_per_s!r} is not a finite number above 0"):
        predict(EXAMPLE, EXAMPLE_LINKS, groups_per_s)
