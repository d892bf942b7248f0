"""The closed form for random latencies: hand-worked cases, order statistics drawn one by one, and the twin."""

from __future__ import annotations

import doctest
import heapq
import random
from statistics import fmean, median

import pytest

from echo2.capacity import latencies, pool, simulation, slow_end
from echo2.capacity.latencies import Constant, Empirical, Latency, Lognormal
from echo2.capacity.model import Links, Workload, step_time_s
from echo2.capacity.pool import Pool, WorkerKind
from echo2.capacity.simulation import simulate
from echo2.capacity.slow_end import loaded_step_time_s, needed_slots, predict_pool, reaches, slow_end_latency_s
from echo2.errors import UserError


def drawn_makespan_s(latency: Latency, groups: int, slots: int, accepted_share: float) -> float:
    """Mean time to fill a batch on an idle pool, drawn 400 times."""
    generator = random.Random(7)
    draw = latency.sampler(generator)
    times_s = []
    for _ in range(400):
        free_s, ends_s = [0.0] * slots, []
        for _ in range(groups):
            end_s = heapq.heappop(free_s) + draw()
            while generator.random() >= accepted_share:
                end_s += draw()
            heapq.heappush(free_s, end_s)
            ends_s.append(end_s)
        times_s.append(max(ends_s))
    return fmean(times_s)


@pytest.mark.parametrize("module", [latencies, pool, simulation, slow_end])
def test_examples_in_the_documentation_are_right(module) -> None:
    failed, tried = doctest.testmod(module)
    assert tried > 0 and failed == 0


@pytest.mark.parametrize(("slots", "waves"), [(1, 12), (5, 3), (6, 2), (11, 2), (12, 1), (500, 1)])
def test_constant_latencies_pass_in_whole_waves(slots: int, waves: int) -> None:
    assert slow_end_latency_s(Constant(0.5), groups_per_batch=12, slots=slots) == pytest.approx(waves * 0.5, rel=1e-6)


@pytest.mark.parametrize("latency", [Lognormal(2.0, 0.3), Lognormal(0.7, 1.0), Empirical((1.0, 1.5, 2.0, 6.0))])
@pytest.mark.parametrize(("groups", "slots", "accepted_share"), [(16, 16, 1.0), (256, 300, 1.0), (64, 64, 0.6), (128, 16, 0.8)])
def test_the_slow_end_is_the_mean_of_the_slowest_draw(latency, groups: int, slots: int, accepted_share: float) -> None:
    drawn_s = drawn_makespan_s(latency, groups, slots, accepted_share)
    assert slow_end_latency_s(latency, groups, slots, accepted_share) == pytest.approx(drawn_s, rel=0.12)


def test_synchronous_training_waits_for_the_slow_end() -> None:
    workload, links, latency = Workload(1.0, 64, 0, 1, 1.0, 1.0), Links(1.0, 0.5), Lognormal(1.0, 0.6)
    slow_end_s = slow_end_latency_s(latency, 64, slots=80)
    assert slow_end_s > 2.5 * latency.mean_s
    assert loaded_step_time_s(workload, links, 80, latency) == pytest.approx(1.0 + 1.5 + slow_end_s, rel=1e-4)


@pytest.mark.parametrize(("bound", "interval"), [(1, 1), (2, 1), (3, 2), (4, 5), (6, 3)])
def test_constant_latencies_and_plenty_of_slots_give_the_closed_form(bound: int, interval: int) -> None:
    workload, links = Workload(1.0, 8, bound, interval, 2.0, 1.0), Links(1.5, 2.5)
    expected_s = step_time_s(workload, links, groups_per_s=10_000.0)
    assert loaded_step_time_s(workload, links, 20_000, Constant(2.0)) == pytest.approx(expected_s, rel=1e-6)


def test_waves_of_constant_latency_agree_with_the_twin() -> None:
    draw, errors = random.Random(3), []
    for seed in range(60):
        bound = draw.randint(1, 8)
        workload = Workload(1.0, draw.randint(4, 32), bound, draw.randint(1, bound + 1), draw.uniform(0.1, 4.0), 1.0)
        links = Links(draw.uniform(0.0, 2.0), draw.uniform(0.0, 3.0))
        slots = max(1, round(draw.uniform(0.5, 2.0) * workload.groups_per_batch * workload.group_latency_s))
        observed_s = simulate(workload, links, Pool((WorkerKind(slots),)), 200, seed).step_time_s
        errors.append(abs(loaded_step_time_s(workload, links, slots, Constant(workload.group_latency_s)) / observed_s - 1))
    assert median(errors) < 0.001
    assert sorted(errors)[56] < 0.05


def random_workload(draw: random.Random) -> tuple[Workload, Links, Lognormal]:
    bound, latency_s = draw.randint(1, 12), draw.uniform(0.1, 4.0)
    workload = Workload(1.0, draw.randint(4, 100), bound, draw.randint(1, bound + 1), latency_s, draw.uniform(0.5, 1.0))
    return workload, Links(draw.uniform(0.0, 3.0), draw.uniform(0.0, 3.0)), Lognormal(latency_s, draw.uniform(0.0, 1.0))


def test_random_latencies_agree_with_the_twin() -> None:
    draw, errors = random.Random(11), []
    for seed in range(60):
        workload, links, latency = random_workload(draw)
        slots = max(1, round(draw.uniform(0.5, 3.0) * workload.groups_per_batch * latency.mean_s / workload.accepted_share))
        observed_s = simulate(
            workload, links, Pool((WorkerKind(1, slots=slots),)), 200, seed, latency=latency, carry="newest"
        ).step_time_s
        errors.append(abs(loaded_step_time_s(workload, links, slots, latency) / observed_s - 1))
    assert median(errors) < 0.02
    assert sorted(errors)[56] < 0.10


def test_the_terms_of_a_prediction_make_its_step_time_and_a_negative_slack_is_a_wait() -> None:
    draw = random.Random(11)
    for _ in range(40):
        workload, links, latency = random_workload(draw)
        prediction = predict_pool(workload, links, draw.randint(1, 300), latency)
        slowest_s = max(term.step_time_s for term in prediction.conditions)
        assert prediction.step_time_s == slowest_s
        assert prediction.utilisation == pytest.approx(workload.learner_step_s / slowest_s)
        for term in prediction.conditions[1:]:
            assert (term.slack < -1e-6) == (term.step_time_s > workload.learner_step_s * (1 + 1e-6)), term
        assert (prediction.binding.name == "learner") == (slowest_s == workload.learner_step_s)


def test_what_is_predicted_term_by_term_is_what_is_predicted_at_once() -> None:
    draw = random.Random(12)
    for _ in range(40):
        workload, links, latency = random_workload(draw)
        slots = draw.randint(1, 300)
        at_once_s = loaded_step_time_s(workload, links, slots, latency)
        prediction = predict_pool(workload, links, slots, latency)
        assert prediction.step_time_s == pytest.approx(at_once_s, rel=1e-5)
        assert reaches(workload, links, slots, latency, prediction.utilisation * (1 - 1e-5))
        assert prediction.utilisation > 1 - 1e-5 or not reaches(workload, links, slots, latency, prediction.utilisation * 1.001)


@pytest.mark.parametrize(("interval", "transfer_s"), [(1, 2.0), (1, 2.7), (1, 3.8), (2, 3.5), (2, 5.8)])
def test_slow_links_carry_the_newest_snapshot_and_the_interval_acts_as_a_multiple_of_itself(interval, transfer_s) -> None:
    workload, links, pool = Workload(1.0, 16, 8, interval, 1.0, 1.0), Links(transfer_s, 0.2), Pool((WorkerKind(1, slots=40),))
    prediction = predict_pool(workload, links, 40, Constant(1.0))
    assert prediction.carried_interval % interval == 0 and prediction.carried_interval > interval
    carried = simulate(workload, links, pool, 400, 0, carry="newest")
    assert prediction.step_time_s == pytest.approx(carried.step_time_s, rel=0.05)
    in_turn = simulate(workload, links, pool, 400, 0, carry="every")
    assert in_turn.step_time_s == pytest.approx(transfer_s / interval, rel=0.01)


def test_more_slots_never_slow_the_run_and_needed_slots_are_the_fewest() -> None:
    workload, links, latency = Workload(1.0, 24, 4, 1, 1.0, 0.8), Links(0.5, 0.5), Lognormal(1.0, 0.5)
    times_s = [loaded_step_time_s(workload, links, slots, latency) for slots in (8, 16, 24, 32, 48, 96)]
    assert times_s == sorted(times_s, reverse=True)
    least = needed_slots(workload, links, latency, 0.9, most=1000)
    assert least is not None
    assert loaded_step_time_s(workload, links, least, latency) <= 1 / 0.9 + 1e-6
    assert loaded_step_time_s(workload, links, least - 1, latency) > 1 / 0.9
    with_reserve = needed_slots(workload, links, latency, 0.9, most=1000, reserve=2.0)
    assert with_reserve is not None and with_reserve > least


def test_no_pool_is_recommended_where_none_can_reach_the_target() -> None:
    synchronous = Workload(1.0, 8, 0, 1, 1.0, 1.0)
    assert needed_slots(synchronous, Links(1.0, 0.0), Constant(1.0), 0.9, most=10_000) is None


def test_impossible_numbers_are_named() -> None:
    workload = Workload(1.0, 8, 1, 1, 1.0, 1.0)
    with pytest.raises(UserError, match="slots = 0"):
        loaded_step_time_s(workload, Links(0.0, 0.0), 0, Constant(1.0))
    with pytest.raises(UserError, match="target_utilisation = nan"):
        needed_slots(workload, Links(0.0, 0.0), Constant(1.0), float("nan"), most=10)


@pytest.mark.parametrize(("mean_s", "slots", "interval"), [(3000.0, 60_000.0, 2), (20.0, 0.3, 1)])
def test_many_releases_that_are_looked_at_together_tell_what_each_of_them_would(monkeypatch, mean_s, slots, interval) -> None:
    workload, links, latency = Workload(1.0, 16, 4, interval, mean_s, 0.8), Links(0.5, 0.2), Lognormal(mean_s, 0.5)

    def freshness(most_releases: int) -> tuple[float, float]:
        monkeypatch.setattr(slow_end, "MOST_RELEASES", most_releases)
        condition = predict_pool(workload, links, slots, latency).conditions[3]
        return condition.step_time_s, condition.needed

    assert freshness(128) == pytest.approx(freshness(10**9), rel=0.01)
    assert freshness(128) != freshness(10**9)
