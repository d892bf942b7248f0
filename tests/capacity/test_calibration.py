"""Calibration: known workers, steps and snapshots give their terms back."""

import random
from dataclasses import replace
from statistics import fmean

import pytest

from echo2.capacity.calibration import GroupTime, Load, Observations, StepTime, calibrate
from echo2.errors import UserError

PLACE = "runs/known"


def calls(worker, sizes, latency_s, generator, cv=0.1, began_s=100.0, pause_s=0.05):
    """Groups of calls in which all groups end together, one call after the other."""
    groups, now_s = [], began_s
    for size in sizes:
        end_s = now_s + latency_s * max(0.1, generator.gauss(1.0, cv))
        groups += [GroupTime(worker, now_s + 1e-4 * n, end_s + 1e-4 * n, end_s + 0.01) for n in range(size)]
        now_s = end_s + pause_s
    return groups


def a_run(seed=0, workers=("a", "b"), steps=100):
    """T = 0.5, L = 0.41, D_tx = 0.2, D_fix = 0.1, α = 0.7, μ = 16/0.4 per worker."""
    generator = random.Random(seed)
    groups = [group for worker in workers for group in calls(worker, [16] * steps, 0.4, generator)]
    loads = [
        Load(version, transfer_s, transfer_s + max(0.0, generator.gauss(0.1, 0.02)))
        for version in range(steps)
        for transfer_s in (max(0.0, generator.gauss(0.2, 0.02)),)
    ]
    return Observations(
        steps=[StepTime(step, step * 0.6, max(0.01, generator.gauss(0.5, 0.05)), 0.1) for step in range(steps)],
        groups=sorted(groups, key=lambda group: group.scored_at_s),
        accepted=[generator.random() < 0.7 for _ in range(len(groups))],
        loads=loads,
        workers=workers,
    )


def test_intervals_cover_the_truth_in_95_percent_of_runs():
    truth = {"T": 0.5, "L": 0.41, "D_tx": 0.2, "D_fix": 0.1, "α": 0.7, "μ": 80.0}
    found = [calibrate(a_run(seed, steps=40)).estimates for seed in range(300)]
    for name, value in truth.items():
        covered = fmean(e[name].low <= value <= e[name].high for e in found)
        assert 0.90 <= covered <= 0.99, (name, covered)
        assert fmean(e[name].value for e in found) == pytest.approx(value, rel=0.02), name


def test_terms_say_where_they_were_measured_and_how_well():
    calibration = calibrate(a_run())
    terms = calibration.terms(PLACE)
    T = calibration.learner_step_s
    assert terms.provenance["T"] == f"measured in {PLACE}: {T.low:.3g} … {T.high:.3g} (95 %, 100 steps)"
    assert "groups/s per worker (95 %" in terms.provenance["μ"] and terms.workers == 2
    assert terms.latency.mean_s == pytest.approx(calibration.group_latency_s.value)
    assert terms.slots == pytest.approx(32, abs=2)
    assert calibration.figures()["learner_step_s"]["value"] == T.value


def test_calls_of_a_few_groups_do_not_make_a_worker_slower():
    generator = random.Random(0)
    busy = calls("a", [16] * 60, 0.4, generator)
    idle_at_times = calls("a", [16, 1, 2, 1, 1] * 30, 0.4, generator)
    speeds = [calibrate(Observations(groups=groups, workers=["a"])).groups_per_s.value for groups in (busy, idle_at_times)]
    assert speeds == pytest.approx([40.0, 40.0], rel=0.05)


def test_slots_that_are_filled_one_by_one_are_measured_as_well():
    generator, groups, free_at_s = random.Random(0), [], [0.0] * 8
    for _ in range(1000):
        slot = free_at_s.index(min(free_at_s))
        end_s = free_at_s[slot] + generator.gauss(0.4, 0.1)
        groups.append(GroupTime("a", free_at_s[slot], end_s, end_s))
        free_at_s[slot] = end_s
    measured = calibrate(Observations(groups=sorted(groups, key=lambda g: g.scored_at_s), workers=["a"]))
    assert measured.groups_per_s.value == pytest.approx(20.0, rel=0.05)


def test_posts_that_overlap_the_next_call_are_not_counted_twice():
    generator = random.Random(0)
    groups = calls("a", [16] * 50, 0.4, generator, pause_s=-0.04)
    measured = calibrate(Observations(groups=groups, workers=["a"]))
    assert measured.groups_per_s.value == pytest.approx(16 / 0.36, rel=0.03)


def test_a_worker_that_is_gone_does_not_count_and_one_that_was_not_measured_counts_as_the_others():
    observed = a_run(workers=("a", "b", "c"))
    assert calibrate(replace(observed, workers=("a", "c"))).groups_per_s.value == pytest.approx(80, rel=0.05)
    more = calibrate(replace(observed, workers=("a", "b", "c", "new")))
    assert more.groups_per_s.value == pytest.approx(160, rel=0.05)
    assert set(more.worker_groups_per_s) == {"a", "b", "c"} and more.terms(PLACE).workers == 4


def test_a_group_that_hung_moves_neither_speed_nor_latency():
    observed = a_run()
    last = observed.groups[1000]
    hung = replace(last, posted_at_s=last.posted_at_s + 120, scored_at_s=last.scored_at_s + 120)
    spoiled = replace(observed, groups=[hung if group is last else group for group in observed.groups])
    before, after = calibrate(observed).estimates, calibrate(spoiled).estimates
    assert after["L"].value == pytest.approx(before["L"].value, rel=0.03)
    assert after["μ"].value == pytest.approx(before["μ"].value, rel=0.05)


def test_the_slow_end_of_the_latencies_is_kept():
    generator = random.Random(0)
    groups = [GroupTime("a", n, n + 0.1, n + generator.expovariate(2.0)) for n in range(2000)]
    latency = calibrate(Observations(groups=groups)).latency
    assert latency.mean_s == pytest.approx(0.5, rel=0.08)
    assert latency.cv == pytest.approx(1.0, abs=0.1)
    assert 1 - latency.share_within(1.5) == pytest.approx(0.05, abs=0.02)


def test_the_links_are_taken_until_the_last_worker_has_the_version():
    loads = [Load(v, transfer_s, 0.5) for v in range(10) for transfer_s in (0.1, 0.3)]
    measured = calibrate(Observations(loads=loads))
    assert (measured.transfer_s.value, measured.fixed_s.value) == pytest.approx((0.3, 0.2))


def test_the_time_of_broadcasts_counts_where_there_were_some():
    loads = [Load(version, 0.4, latency_s) for version in range(10) for latency_s in (0.5, 0.7)]
    broadcasts_s = dict.fromkeys(range(4, 12), 0.25)
    measured = calibrate(replace(a_run(), loads=loads, broadcasts_s=broadcasts_s))
    assert (measured.transfer_s.value, measured.fixed_s.value) == pytest.approx((0.25, 0.35))
    assert measured.transfer_s.count == measured.fixed_s.count == 6
    assert "6 broadcasts)" in measured.terms(PLACE).provenance["D_tx"]
    one = calibrate(replace(a_run(), loads=loads, broadcasts_s={4: 0.25}))
    assert one.transfer_s.value == pytest.approx(0.4) and "10 versions)" in one.terms(PLACE).provenance["D_tx"]


@pytest.mark.parametrize(
    ("lacking", "names"),
    [
        ({"steps": []}, ["T"]),
        ({"loads": []}, ["D_tx", "D_fix"]),
        ({"accepted": []}, ["α"]),
        ({"groups": []}, ["L", "μ"]),
        ({"workers": []}, ["μ"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_term_that_was_not_observed_is_missing_by_name(lacking, names):
    calibration = calibrate(replace(a_run(), **lacking))
    assert calibration.missing == names
    with pytest.raises(UserError, match=f"{PLACE} has not measured") as refused:
        calibration.terms(PLACE)
    assert all(f"{name} (needs" in str(refused.value) for name in names)
