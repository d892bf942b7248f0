"""The provisioning rule and the dials, judged by the twin and by the closed form on both sides of each limit."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import fmean, median

import pytest

from echo2.capacity.dials import Dial, Situation, dials
from echo2.capacity.latencies import Constant, Empirical, Lognormal
from echo2.capacity.model import Links, Workload, required_throughput
from echo2.capacity.pool import Pool, PoolUnit, WorkerKind, unit_of_slots
from echo2.capacity.provisioning import provision, simulate_pool
from echo2.capacity.simulation import simulate
from echo2.capacity.slow_end import slow_end_latency_s
from echo2.errors import UserError

EXAMPLE, EXAMPLE_LINKS = Workload(1.0, 32, 4, 3, 0.8, 1.0), Links(2.0, 0.0)


def random_situation(draw: random.Random) -> Situation:
    bound = draw.randint(0, 8)
    workload = Workload(1.0, draw.randint(4, 96), bound, draw.randint(1, bound + 1), 1.0, draw.uniform(0.5, 1.0))
    links = Links(draw.uniform(0, 2), draw.uniform(0, 1.5))
    return Situation(workload, links, draw.randint(2, 300), Lognormal(draw.uniform(0.1, 2), draw.uniform(0, 1)))


def test_a_provisioned_pool_reaches_the_target_for_other_seeds_and_is_hardly_larger_than_it_must_be() -> None:
    draw, reached, over = random.Random(5), [], []
    for seed in range(30):
        case = random_situation(draw)
        pool = provision(case.workload, case.links, 0.97, latency=case.latency)
        if not pool.reachable:
            continue
        workload = replace(case.workload, publish_interval=pool.publish_interval)

        def utilisation(slots: int, workload: Workload = workload, case: Situation = case, seed: int = seed) -> float:
            only = Pool((WorkerKind(1, slots=slots),))
            return simulate(workload, case.links, only, 240, seed, latency=case.latency, carry="newest").utilisation

        reached.append(utilisation(pool.units) >= 0.95)
        least = next((slots for slots in range(pool.units, 0, -1) if utilisation(slots) < 0.97), 0) + 1
        over.append(pool.units / least)
    assert len(reached) >= 10
    assert fmean(reached) >= 0.95
    assert median(over) <= 1.05


def test_where_the_target_is_out_of_reach_the_best_that_can_be_had_is_said() -> None:
    draw, seen = random.Random(6), 0
    for _ in range(30):
        case = random_situation(draw)
        pool = provision(case.workload, case.links, 0.97, latency=case.latency)
        if pool.reachable:
            continue
        seen += 1
        assert pool.prediction.binding.name != "learner"
        for interval in range(1, case.workload.staleness_bound + 2):
            workload = replace(case.workload, publish_interval=interval)
            best = Situation(workload, case.links, beyond_use(workload), case.latency).utilisation
            assert pool.prediction.utilisation >= 0.99 * min(best, 0.97)
    assert seen >= 5


def test_the_configured_interval_can_be_asked_for_alone() -> None:
    free = provision(EXAMPLE, EXAMPLE_LINKS, 0.97)
    bound = provision(EXAMPLE, EXAMPLE_LINKS, 0.97, publish_intervals=[3])
    assert (free.publish_interval, free.reachable) == (2, True)
    assert (bound.publish_interval, bound.reachable) == (3, False)


def test_a_provision_tells_the_staleness_and_the_waste_to_expect() -> None:
    pool = provision(replace(EXAMPLE, accepted_share=0.75), EXAMPLE_LINKS, 0.97, latency=Lognormal(0.8, 0.5))
    shares = pool.simulated.staleness_shares
    assert sum(shares) == pytest.approx(1)
    assert pool.simulated.staleness_mean == pytest.approx(sum(steps * share for steps, share in enumerate(shares)))
    assert pool.simulated.staleness_max == max(steps for steps, share in enumerate(shares) if share)
    assert 0.25 <= pool.simulated.waste_share < 0.35


def beyond_use(workload: Workload) -> float:
    """Slots for twice the groups that admission lets be under way."""
    return 2.0 * (workload.staleness_bound + 1) * workload.groups_per_batch


def test_slots_beyond_twice_what_admission_lets_be_under_way_change_nothing() -> None:
    workload, latency = Workload(1.0, 8, 2, 1, 3.0, 1.0), Lognormal(3.0, 0.5)
    few, many = (
        simulate_pool(workload, Links(0.2, 0.2), slots, latency) for slots in (beyond_use(workload), 10 * beyond_use(workload))
    )
    assert few.step_time_s == pytest.approx(many.step_time_s, rel=0.01)


def test_a_pool_of_workers_in_calls_is_provisioned_in_whole_workers_and_needs_more_slots() -> None:
    workload, latency = Workload(1.0, 32, 4, 2, 0.8, 1.0), Lognormal(0.8, 0.6)
    effective = 8 * latency.mean_s / slow_end_latency_s(latency, 8, 8)
    unit = PoolUnit(8, in_calls=True, effective_slots=effective)
    in_calls = provision(workload, Links(0.5, 0.2), 0.97, latency=latency, unit=unit)
    at_once = provision(workload, Links(0.5, 0.2), 0.97, latency=latency)
    assert in_calls.reachable and at_once.reachable
    assert in_calls.slots == pytest.approx(in_calls.units * effective)
    assert 8 * in_calls.units > at_once.units
    pool = Pool((WorkerKind(in_calls.units, 8, in_calls=True),))
    own = replace(workload, publish_interval=in_calls.publish_interval)
    assert simulate(own, Links(0.5, 0.2), pool, 240, 9, latency=latency, carry="newest").utilisation >= 0.95


@pytest.mark.parametrize("latency_s", [1e-6, 4e-5, 0.02, 0.1])
def test_where_less_than_a_few_slots_are_enough_the_need_is_the_learners_and_not_a_whole_slots(latency_s: float) -> None:
    workload, latency = Workload(1.0, 4, 2, 1, latency_s, 0.8), Lognormal(latency_s, 0.5)
    least = required_throughput(workload)
    for unit in (unit_of_slots(least * latency_s), PoolUnit(1, in_calls=True, effective_slots=2.0 * latency_s)):
        pool = provision(workload, Links(0.1, 0.2), 0.97, latency=latency, unit=unit)
        assert pool.reachable
        assert least < pool.groups_per_s < 2 * least


def test_a_pool_of_any_fractional_size_completes_what_its_slots_do() -> None:
    workload = Workload(0.01, 16, 6, 1, 1.0, 1.0)
    for slots in (0.3, 2.4, 7.5):
        result = simulate_pool(workload, Links(0.0, 0.0), slots, Constant(1.0))
        assert result.step_time_s == pytest.approx(16 / slots, rel=0.02)


@pytest.mark.parametrize(("groups", "slots"), [(8192, 40.0), (8192, 3000.0), (20_000, 20_000.0)])
def test_a_large_batch_is_simulated_in_small_with_the_same_pace(groups: int, slots: float) -> None:
    workload, latency = Workload(1.0, groups, 3, 1, 1.0, 0.9), Lognormal(1.0, 0.5)
    whole = simulate(workload, Links(0.2, 0.1), Pool((WorkerKind(1, round(slots)),)), 16, 1, latency=latency, carry="newest")
    small = simulate_pool(workload, Links(0.2, 0.1), slots, latency)
    assert small.trained < whole.trained
    assert small.step_time_s == pytest.approx(whole.step_time_s, rel=0.03)


@pytest.mark.parametrize(("bound", "groups", "in_calls"), [(256, 512, True), (256, 512, False), (64, 65_536, True)])
def test_however_old_data_may_be_a_simulation_has_a_bounded_number_of_groups(bound: int, groups: int, in_calls: bool) -> None:
    workload, latency = Workload(10.0, groups, bound, 1, 200.0, 0.9), Lognormal(200.0, 0.5)
    slots = 1.2 * required_throughput(workload) * latency.mean_s
    unit = PoolUnit(64, in_calls=True, effective_slots=32.0) if in_calls else PoolUnit()
    result = simulate_pool(workload, Links(1.0, 1.0), slots, latency, unit)
    assert result.trained <= 250_000
    assert len(result.step_times_s) >= 4 * bound and result.utilisation == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("target", [0.0, -0.5, 1.01, math.nan, math.inf])
def test_an_impossible_target_is_refused_by_name_and_value(target: float) -> None:
    with pytest.raises(UserError, match=rf"target_utilisation = {target!r} is not above 0 and at most 1"):
        provision(EXAMPLE, EXAMPLE_LINKS, target)
    with pytest.raises(UserError, match=rf"target_utilisation = {target!r} is not above 0 and at most 1"):
        dials(Situation(EXAMPLE, EXAMPLE_LINKS, 10, Constant(1.0)), target)


def turned(case: Situation, dial: Dial, value: float) -> Situation:
    """`case` with one dial at another value."""
    workload, links = case.workload, case.links
    share = links.transfer_s / links.latency_s if links.latency_s else 0.0
    if dial.symbol == "S":
        return replace(case, workload=replace(workload, staleness_bound=int(value)))
    if dial.symbol == "κ":
        return replace(case, workload=replace(workload, publish_interval=int(value)))
    if dial.symbol == "B":
        step_s = workload.learner_step_s / workload.groups_per_batch * value
        return replace(case, workload=replace(workload, groups_per_batch=int(value), learner_step_s=step_s))
    if dial.symbol == "D":
        return replace(case, links=Links(value * share, value * (1 - share)))
    if dial.symbol == "L":
        return replace(case, latency=case.latency.scaled_to(value))
    return replace(case, slots=value * case.latency.mean_s)


def test_at_its_limit_a_dial_does_what_it_says_and_a_little_further_it_does_not() -> None:
    draw, checked = random.Random(8), dict.fromkeys("SDLμB", 0)
    for _ in range(60):
        case = random_situation(draw)
        for dial in dials(case, 0.95):
            if not dial.reaches_target or dial.limit is None or dial.at_limit is None:
                continue
            assert dial.at_limit.utilisation >= 0.95 * (1 - 1e-5), dial
            assert turned(case, dial, dial.limit).utilisation == pytest.approx(dial.at_limit.utilisation, rel=1e-4)
            mean_s = case.latency.mean_s
            unit_rate = unit_of_slots(required_throughput(case.workload) * mean_s).effective_slots / mean_s
            step = dial.limit * 0.02 if dial.symbol in "DL" else unit_rate if dial.symbol == "μ" else 1
            beyond = dial.limit + step if dial.at_most else dial.limit - step
            least = {"S": case.workload.publish_interval - 1, "B": 1, "μ": unit_rate}.get(dial.symbol, 0)
            if dial.symbol != "κ" and beyond > 0 and beyond >= least:
                checked[dial.symbol] += 1
                assert turned(case, dial, beyond).utilisation < 0.95, dial
    assert all(count >= 3 for count in checked.values()), checked


def test_a_dial_without_a_limit_changes_next_to_nothing_however_far_it_is_turned() -> None:
    draw, checked = random.Random(9), 0
    for _ in range(40):
        case = random_situation(draw)
        for dial in dials(case, 0.95):
            if dial.limit is None:
                extremes = {
                    "S": (60,),
                    "κ": range(1, case.workload.staleness_bound + 2),
                    "D": (0.0,),
                    "L": (0.0,),
                    "B": (5000,),
                }
                for value in extremes.get(dial.symbol, (5000.0,)):
                    assert turned(case, dial, value).utilisation <= case.utilisation * 1.01, dial
                    checked += 1
    assert checked >= 20


def test_a_measured_latency_keeps_its_shape_when_it_is_scaled() -> None:
    for latency in (Constant(2.0), Lognormal(2.0, 0.7), Empirical((1.0, 2.0, 3.0))):
        halved = latency.scaled_to(1.0)
        assert halved.mean_s == pytest.approx(1.0)
        assert halved.cv == pytest.approx(latency.cv)
        assert halved.share_within(0.75) == pytest.approx(latency.share_within(1.5))
        assert latency.scaled_to(0.0).share_within(0.0) == 1.0
