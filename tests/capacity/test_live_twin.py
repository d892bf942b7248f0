"""The twin whose workers come and go as somebody else says."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.capacity.latencies import Lognormal
from echo2.capacity.live_twin import LiveTwin
from echo2.capacity.model import Links, Workload
from echo2.capacity.pool import Pool, WorkerKind
from echo2.capacity.simulation import simulate

WORKLOAD, LINKS, LATENCY = Workload(10.0, 8, 2, 1, 4.0, 0.8), Links(1.0, 2.0), Lognormal(4.0, 0.5)
KINDS = (WorkerKind(1, slots=2), WorkerKind(1, slots=4, speed=0.5), WorkerKind(1, slots=3, in_calls=True))


def live(seed=0):
    return LiveTwin(WORKLOAD, LINKS, LATENCY, seed)


def test_workers_that_stay_make_the_pipeline_that_is_simulated():
    twin = live(seed=3)
    for kind in KINDS:
        twin.join(kind)
    pool = Pool(KINDS)
    result = simulate(WORKLOAD, LINKS, pool, 50, 3, latency=LATENCY, carry="newest")
    twin.advance(sum(result.step_times_s))
    times = [end - start for start, end in zip([0.0, *twin.step_ends_s], twin.step_ends_s, strict=False)]
    assert twin.step == 50 and times == list(result.step_times_s)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(0, 10**6))
def test_whoever_comes_and_goes_counts_add_up_and_nothing_too_old_is_trained(seed):
    draw, twin, there, draining = random.Random(seed), live(seed), [], []
    for tick in range(1, 120):
        twin.advance(10.0 * tick)
        for worker in [each for each in draining if twin.is_idle(each)]:
            draining.remove(worker)
            assert twin.leave(worker, 0.0) >= 0
        if draw.random() < 0.3:
            there.append(twin.join(draw.choice(KINDS)))
        if there and draw.random() < 0.25:
            worker = there.pop(draw.randrange(len(there)))
            if draw.random() < 0.5:
                twin.leave(worker, draw.choice([0.0, 15.0]))
            else:
                twin.drain(worker)
                draining.append(worker)
        assert len({*there, *draining}) == len(there) + len(draining), "a number is one worker's"
    batch = WORKLOAD.groups_per_batch
    trained = twin.step * batch + (batch if twin.learning else 0)
    assert twin.staleness_max <= WORKLOAD.staleness_bound
    assert twin.leased == twin.filtered + twin.expired + twin.live
    in_slots = sum(1 for _, _, _, version in twin.ends if version >= twin.oldest)
    assert twin.live - trained >= twin.ready_groups + twin.unassigned + in_slots - batch
    assert twin.asking == sum(free >= least for free, least in zip(twin.free, twin.least_free, strict=True))


def test_a_worker_that_drains_takes_no_lease_any_more_and_gets_idle():
    twin = live()
    worker = twin.join(KINDS[0])
    twin.advance(0.5)
    twin.drain(worker)
    leased = twin.leased
    twin.advance(100.0)
    assert twin.leased == leased and twin.is_idle(worker) and twin.leave(worker, 0.0) == 2


def test_who_comes_after_all_have_gone_takes_up_what_they_left():
    twin = live()
    twin.advance(50.0)
    first = twin.join(KINDS[0])
    twin.advance(300.0)
    steps = twin.step
    twin.leave(first, 15.0)
    twin.advance(1000.0)
    assert steps > 0 and twin.step - steps <= 1, "without workers the learner waits"
    twin.join(WorkerKind(1, slots=2, added_fixed_s=1.0))
    twin.advance(1300.0)
    assert twin.step > steps + 5
