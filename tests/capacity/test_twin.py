"""The twin: cases worked out by hand, the closed form as second opinion, and what must hold whatever happens."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from echo2.capacity.admission import live_group_limit
from echo2.capacity.latencies import Constant, Empirical, Lognormal
from echo2.capacity.model import Links, Workload, step_time_s
from echo2.capacity.pool import Pool, WorkerKind
from echo2.capacity.simulation import SimulationResult, simulate
from echo2.capacity.slow_end import slow_end_latency_s
from echo2.capacity.twin import ENDLESS, Twin
from echo2.errors import UserError

seeded = settings(derandomize=True, deadline=None, max_examples=60)

LINKS = Links(transfer_s=2.0, fixed_s=0.5)


def plenty(slots: int = 64) -> Pool:
    return Pool((WorkerKind(slots),))


def hectic() -> Pool:
    """Workers that are gone before they have finished anything."""
    return Pool((WorkerKind(2, preemptions_per_hour=1e9),))


@st.composite
def workloads(draw: st.DrawFn, least_bound: int = 0, accepted: st.SearchStrategy[float] | None = None) -> Workload:
    bound = draw(st.integers(least_bound, 6))
    return Workload(
        learner_step_s=1.0,
        groups_per_batch=draw(st.integers(1, 12)),
        staleness_bound=bound,
        publish_interval=draw(st.integers(1, bound + 1)),
        group_latency_s=draw(st.floats(0.1, 4.0)),
        accepted_share=draw(st.floats(0.3, 1.0) if accepted is None else accepted),
    )


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    kind = st.builds(
        WorkerKind,
        count=st.integers(1, 4),
        slots=st.integers(1, 6),
        speed=st.floats(0.3, 3.0),
        added_fixed_s=st.sampled_from([0.0, 1.5]),
        start_up_s=st.sampled_from([0.0, 2.0]),
        preemptions_per_hour=st.sampled_from([0.0, 200.0]),
        down_s=st.just(3.0),
        detection_s=st.sampled_from([0.0, 1.5, 60.0]),
        price_usd_per_hour=st.just(1.0),
    )
    return Pool(tuple(draw(st.lists(kind, min_size=1, max_size=3))))


links = st.builds(Links, st.floats(0.0, 2.0), st.floats(0.0, 2.0))


def test_synchronous_training_pays_every_latency_at_every_step() -> None:
    result = simulate(Workload(1.0, 32, 0, 1, 0.8, 1.0), LINKS, plenty(), steps=20, seed=0)
    assert result.step_times_s[1:] == pytest.approx([1.0 + 2.5 + 0.8] * 19)
    assert result.step_times_s[0] == pytest.approx(0.8 + 1.0), "step 0 waits for no snapshot"
    assert (result.staleness_mean, result.staleness_max) == (0.0, 0)


def test_a_pool_that_is_too_small_sets_the_pace() -> None:
    # 10 slots at 2 s are 5 groups/s, 4 of them accepted: a batch of 20 takes 5 s.
    pool = Pool((WorkerKind(count=5, slots=2),))
    result = simulate(Workload(1.0, 20, 4, 1, 2.0, 0.8), Links(0.1, 0.1), pool, steps=400, seed=0)
    assert result.step_time_s == pytest.approx(20 / (0.8 * 5), rel=0.02)
    assert result.utilisation == pytest.approx(1.0 / result.step_time_s)
    assert result.waste_share == pytest.approx(0.2, abs=0.01)


def test_a_large_pool_and_fresh_snapshots_keep_the_learner_busy() -> None:
    result = simulate(Workload(1.0, 32, 4, 1, 0.8, 1.0), Links(0.5, 0.5), plenty(), steps=40, seed=0)
    assert result.utilisation == pytest.approx(1.0)


def test_links_that_carry_every_snapshot_in_turn_set_the_pace() -> None:
    workload = Workload(1.0, 8, 8, 1, 0.5, 1.0)
    in_turn = simulate(workload, Links(2.0, 0.0), plenty(), steps=100, seed=0)
    newest = simulate(workload, Links(2.0, 0.0), plenty(), steps=100, seed=0, carry="newest")
    assert in_turn.step_time_s == pytest.approx(2.0)
    assert newest.step_time_s == pytest.approx(1.0), "every second snapshot is fresh enough when S = 8"


def test_distant_workers_get_each_snapshot_later() -> None:
    workload = Workload(1.0, 32, 0, 1, 0.8, 1.0)
    distant = WorkerKind(64, added_fixed_s=1.5)
    alone = simulate(workload, LINKS, Pool((distant,)), steps=20, seed=0)
    assert alone.step_times_s[1:] == pytest.approx([1.0 + 2.5 + 1.5 + 0.8] * 19)
    # 16 near slots take half of the batch at once and the rest after 0.8 s, before the distant ones hold the version.
    among_near = simulate(workload, LINKS, Pool((WorkerKind(16), distant)), steps=20, seed=0)
    assert among_near.step_times_s[1:] == pytest.approx([1.0 + 2.5 + 2 * 0.8] * 19)


def test_staleness_is_told_share_by_share() -> None:
    # A version that arrives at the end of step v − 1 makes what is admitted then: the κ batches up to step v + S.
    every = simulate(Workload(1.0, 8, 3, 1, 0.5, 1.0), Links(0.0, 0.0), plenty(), steps=40, seed=0)
    second = simulate(Workload(1.0, 8, 3, 2, 0.5, 1.0), Links(0.0, 0.0), plenty(), steps=40, seed=0)
    assert every.staleness_shares == (0.0, 0.0, 0.0, 1.0)
    assert second.staleness_shares == (0.0, 0.0, 0.5, 0.5)


def test_a_worker_that_is_twice_as_fast_counts_twice() -> None:
    workload = Workload(0.1, 12, 3, 1, 1.0, 1.0)
    result = simulate(workload, Links(0.0, 0.0), Pool((WorkerKind(2), WorkerKind(1, slots=2, speed=2.0))), steps=200, seed=0)
    assert result.step_time_s == pytest.approx(12 / (2 + 4), rel=0.01)


def test_a_learner_step_may_vary() -> None:
    result = simulate(Workload(1.0, 8, 4, 1, 0.1, 1.0), Links(0.0, 0.0), plenty(), 200, 0, learner_step=Empirical((1.0, 3.0)))
    assert result.step_time_s == pytest.approx(2.0, rel=0.1)
    assert set(map(round, result.step_times_s[1:])) == {1, 3}


def test_rent_is_paid_while_a_worker_is_up_and_no_longer() -> None:
    workload = Workload(1.0, 4, 1, 1, 0.1, 1.0)
    steady = simulate(workload, Links(0.0, 0.0), Pool((WorkerKind(4, price_usd_per_hour=36.0),)), steps=50, seed=0)
    assert steady.usd_per_step == pytest.approx(4 * 0.01 * steady.step_time_s)
    spot = WorkerKind(1, preemptions_per_hour=600.0, down_s=6.0, price_usd_per_hour=36.0)
    pool = Pool((WorkerKind(4), spot))
    halved = simulate(Workload(1.0, 4, 1, 1, 0.1, 1.0), Links(0.0, 0.0), pool, steps=4000, seed=0)
    assert halved.usd_per_step == pytest.approx(0.5 * 0.01 * halved.step_time_s, rel=0.1), "6 s up for each 6 s down"


def test_the_end_of_the_run_bounds_admission() -> None:
    result = simulate(Workload(1.0, 8, 4, 1, 0.5, 1.0), Links(0.0, 0.0), plenty(), steps=10, seed=0, total_steps=10)
    assert (result.leased, result.trained, result.open) == (80, 80, 0)


@seeded
@given(workloads(least_bound=1, accepted=st.just(1.0)), links, st.floats(1.0, 3.0))
def test_the_twin_agrees_with_the_closed_form_on_constant_latencies(workload: Workload, links: Links, room: float) -> None:
    slots = int(room * workload.publish_interval * workload.groups_per_batch) + 1
    predicted_s = step_time_s(workload, links, slots / workload.group_latency_s)
    # Below this pool size a release passes in waves, or its burst outruns the mean pace: `slow_end` has the exact terms.
    assume(workload.groups_per_batch * workload.group_latency_s / slots <= workload.learner_step_s)
    observed_s = simulate(workload, links, plenty(slots), steps=400, seed=0).step_time_s
    assert observed_s == pytest.approx(predicted_s, rel=0.02)


@seeded
@given(workloads(), links, pools(), st.floats(0.0, 1.0), st.integers(0, 99), st.sampled_from(["every", "newest"]))
def test_counts_add_up_and_nothing_stale_is_trained(workload, links, pool, cv, seed, carry) -> None:
    result = simulate(workload, links, pool, 30, seed, latency=Lognormal(workload.group_latency_s, cv), carry=carry)
    assert result.leased == result.trained + result.filtered + result.expired + result.open
    assert result.trained == 30 * workload.groups_per_batch
    assert result.open >= 0
    assert 0 <= result.staleness_mean <= result.staleness_max <= workload.staleness_bound
    assert len(result.staleness_shares) == workload.staleness_bound + 1
    assert sum(result.staleness_shares) == pytest.approx(1.0)
    assert sum(s * share for s, share in enumerate(result.staleness_shares)) == pytest.approx(result.staleness_mean)
    assert min(result.step_times_s) >= workload.learner_step_s * (1 - 1e-9)
    assert 0 < result.utilisation <= 1 + 1e-9


class WatchedTwin(Twin):
    """Checks at every lease what the ledger would."""

    def _lease(self, worker: int) -> bool:
        live = self.live
        leased = super()._lease(worker)
        rules = self.workload
        limit = live_group_limit(self.version[worker], rules.staleness_bound, rules.groups_per_batch, self.total_steps)
        if self.live > live:
            assert self.live <= limit, "more live groups than the worker's version admits"
        assert self.live == self.step * rules.groups_per_batch + self._waiting(), "live groups are trained, ready or leased"
        return leased

    def _waiting(self) -> int:
        training = self.workload.groups_per_batch if self.learning else 0
        return training + sum(self.ready.values()) + sum(self.in_slots.values()) + self.unassigned


@seeded
@given(workloads(), links, pools(), st.integers(0, 99))
def test_live_groups_never_exceed_what_admission_allows(workload: Workload, links: Links, pool: Pool, seed: int) -> None:
    latency = Lognormal(workload.group_latency_s, 0.8)
    twin = WatchedTwin(workload, links, pool.kinds, latency, Constant(workload.learner_step_s), "every", seed)
    twin.run(20, ENDLESS)
    assert twin.step == 20


def test_the_same_seed_gives_the_same_result_and_another_seed_another() -> None:
    def run(seed: int) -> SimulationResult:
        pool = Pool((WorkerKind(4, slots=2, preemptions_per_hour=100.0, down_s=5.0),))
        return simulate(Workload(1.0, 8, 2, 1, 1.0, 0.7), LINKS, pool, 60, seed, latency=Lognormal(1.0, 0.5))

    assert run(3) == run(3)
    assert run(3) != run(4)


def twin_that_loses_its_first_worker(workload: Workload, kind: WorkerKind) -> Twin:
    """Links that take no time; the worker is gone half a second after the start."""
    constant = Constant(workload.group_latency_s), Constant(workload.learner_step_s)
    twin = Twin(workload, Links(0.0, 0.0), (kind,), *constant, "every", seed=0)
    twin._at(0.5, lambda: twin._preempt(0))
    return twin


@pytest.mark.parametrize(
    ("kind", "reopened_s"),
    [
        (WorkerKind(2, down_s=900.0), 0.5),
        (WorkerKind(2, down_s=900.0, detection_s=3.0), 3.5),
        (WorkerKind(2, down_s=1.5, detection_s=60.0), 2.0),
    ],
    ids=["at once", "after its silence", "when its successor comes"],
)
def test_a_lost_lease_is_generated_again_once_it_is_open(kind: WorkerKind, reopened_s: float) -> None:
    # Two workers, two groups of 1 s to a batch: the second worker is free at 1 s and takes the lost group when it may.
    twin = twin_that_loses_its_first_worker(Workload(1.0, 2, 0, 1, 1.0, 1.0), kind)
    twin.run(1, ENDLESS)
    assert twin.step_ends_s == pytest.approx([max(1.0, reopened_s) + 1.0 + 1.0])
    assert (twin.lost, twin.leased) == (1, 2)


def test_a_lost_lease_that_nobody_noticed_takes_up_room_until_it_is_too_old() -> None:
    # S = 1, B = 1: the lost group bars the lease for step 2 until step 1 ends and drops it; then 1 s each for L and T.
    twin = twin_that_loses_its_first_worker(Workload(1.0, 1, 1, 1, 1.0, 1.0), WorkerKind(2, down_s=900.0, detection_s=100.0))
    twin.run(3, ENDLESS)
    assert twin.step_ends_s == pytest.approx([2.0, 4.0, 6.0])
    assert (twin.lost, twin.expired) == (1, 1)
    twin.run(120, ENDLESS)
    assert twin.unassigned == 0, "what has expired is not given again when the loss is noticed"


@pytest.mark.parametrize("seed", range(3))
def test_preemptions_only_slow_the_run_and_cost_attempts(seed: int) -> None:
    def run(preemptions_per_hour: float) -> SimulationResult:
        pool = Pool((WorkerKind(8, preemptions_per_hour=preemptions_per_hour, down_s=20.0, start_up_s=5.0),))
        return simulate(Workload(1.0, 8, 3, 1, 1.0, 1.0), Links(0.2, 0.2), pool, 300, seed)

    steady, often, hectic = run(0.0), run(60.0), run(240.0)
    assert steady.lost == 0 < often.lost < hectic.lost
    assert steady.step_time_s < often.step_time_s < hectic.step_time_s
    # Up for a minute, then away for 25 s of which a return costs 5: the pool has 60/85 of its speed.
    assert often.step_time_s == pytest.approx(85 / 60, rel=0.12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WorkerKind(0), "count = 0"),
        (lambda: WorkerKind(1, slots=0), "slots = 0"),
        (lambda: WorkerKind(1, speed=0.0), "speed = 0.0"),
        (lambda: WorkerKind(True), "count = True"),
        (lambda: WorkerKind(1.5), "count = 1.5"),
        (lambda: WorkerKind(1, speed=float("nan")), "speed = nan"),
        (lambda: WorkerKind(1, added_fixed_s=-1.0), "added_fixed_s = -1.0"),
        (lambda: WorkerKind(1, down_s=float("nan")), "down_s = nan"),
        (lambda: WorkerKind(1, detection_s=-3.0), "detection_s = -3.0"),
        (lambda: Pool(()), "without workers"),
        (lambda: Constant(-1.0), "-1.0"),
        (lambda: Lognormal(1.0, float("inf")), "cv = inf"),
        (lambda: Lognormal(0.0, 0.5), "mean latency = 0"),
        (lambda: Empirical(()), "no samples"),
        (lambda: simulate(Workload(1.0, 1, 0, 1, 1.0, 1.0), LINKS, plenty(), steps=1, seed=0), "steps = 1"),
        (lambda: simulate(Workload(1.0, 1, 0, 1, 1.0, 1.0), LINKS, plenty(), 9, 0, total_steps=8), "steps = 9"),
        (lambda: simulate(Workload(1.0, 1, 0, 1, 1.0, 1.0), LINKS, plenty(), float("nan"), 0), "steps = nan"),
        (lambda: simulate(Workload(1.0, 1, 0, 1, 1.0, 1.0), LINKS, hectic(), 9, 0), "step 0 .* lower preemptions_per_hour"),
        (lambda: simulate(Workload(1.0, 1, 0, 1, 1.0, 1.0), LINKS, plenty(), -5, 0), "steps = -5"),
        (lambda: simulate(Workload(1.0, 1, 0, 1, 1.0, 1.0), LINKS, plenty(), 9, 0, total_steps=0), "total_steps = 0"),
        (lambda: simulate(Workload(1.0, 1, 0, 1, 1.0, 1.0), LINKS, plenty(), 9, 0, learner_step=Constant(0.0)), "takes 0 s"),
        (lambda: simulate(Workload(1.0, 1, 0, 1, 1.0, 1.0), LINKS, plenty(), 9, 0, carry="all"), "carry = 'all'"),
    ],
)
def test_impossible_numbers_are_named(make, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize("latency", [Constant(2.0), Lognormal(2.0, 0.7), Empirical((1.0, 2.0, 3.0, 2.0))])
def test_draws_follow_their_distribution(latency) -> None:
    draw = latency.sampler(random.Random(5))
    draws = [draw() for _ in range(40_000)]
    assert sum(draws) / len(draws) == pytest.approx(latency.mean_s, rel=0.02)
    for seconds in (0.5, 1.5, 2.0, 3.5):
        assert sum(d <= seconds for d in draws) / len(draws) == pytest.approx(latency.share_within(seconds), abs=0.01)


def test_a_worker_in_calls_waits_for_its_slowest_group() -> None:
    """Generation-bound with S to spare: a call of n takes the mean of the slowest of n, not of one."""
    workload, latency = Workload(0.1, 64, 6, 1, 1.0, 1.0), Lognormal(1.0, 0.8)
    slowest_s = slow_end_latency_s(latency, 16, 16)
    in_calls = simulate(workload, Links(0.0, 0.0), Pool((WorkerKind(4, 16, in_calls=True),)), 200, 1, latency=latency)
    at_once = simulate(workload, Links(0.0, 0.0), Pool((WorkerKind(4, 16),)), 200, 1, latency=latency)
    assert slowest_s > 2
    assert at_once.step_time_s == pytest.approx(1.0, rel=0.05)
    assert in_calls.step_time_s == pytest.approx(slowest_s, rel=0.05)


def test_a_worker_in_calls_holds_its_version_until_the_call_is_over() -> None:
    """Synchronous, one worker: calls of two for a batch of three, so that every step takes two calls."""
    workload, pool = Workload(1.0, 3, 0, 1, 0.5, 1.0), Pool((WorkerKind(1, 2, in_calls=True),))
    assert simulate(workload, Links(0.25, 0.0), pool, 40, 0).step_time_s == pytest.approx(1.0 + 0.25 + 2 * 0.5)


def test_with_one_slot_a_worker_in_calls_is_like_any_other() -> None:
    workload, latency, links = Workload(1.0, 8, 2, 1, 1.0, 0.8), Lognormal(1.0, 0.5), Links(0.3, 0.2)
    plain, in_calls = (
        simulate(workload, links, Pool((WorkerKind(9, 1, in_calls=calls),)), 100, 3, latency=latency) for calls in (False, True)
    )
    assert plain == in_calls
