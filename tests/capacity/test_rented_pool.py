"""The pool that a selection rents, in the twin."""

from __future__ import annotations

from dataclasses import replace

import pytest
from market import PLACES, candidate

from echo2.capacity.latencies import Constant, Lognormal
from echo2.capacity.limits import Limits
from echo2.capacity.model import Links, Workload
from echo2.capacity.rented_pool import mean_latency_s, simulate_selection
from echo2.capacity.selection import Selection

WORKLOAD, LINKS = Workload(10.0, 40, 4, 1, 6.0, 1.0), Links(1.0, 1.0)
LATENCY = Lognormal(6.0, 0.3)


def rented(*machines) -> Selection:
    return Selection(tuple(c for c, _ in machines), tuple(n for _, n in machines), Limits())


def utilisation(selection: Selection, **others) -> float:
    (result,) = simulate_selection(selection, WORKLOAD, LINKS, LATENCY, **others)
    return result.utilisation


def test_machines_that_make_what_the_learner_needs_keep_it_busy_and_fewer_do_not() -> None:
    machine = replace(candidate(1.0, 1.0), group_latency_s=6.0, dissemination_s=2.0)
    assert utilisation(rented((machine, 5))) > 0.97
    assert utilisation(rented((machine, 3))) == pytest.approx(3 / 4, abs=0.03)


def test_machines_of_unequal_latency_and_throughput_add_up() -> None:
    fast = replace(candidate(2.5, 1.0, PLACES[0]), group_latency_s=2.0, dissemination_s=2.0)
    slow = replace(candidate(0.5, 1.0, PLACES[3]), group_latency_s=9.0, dissemination_s=6.0)
    both = rented((fast, 1), (slow, 1))
    assert utilisation(both) == pytest.approx(3 / 4, abs=0.03)
    assert mean_latency_s(both) == pytest.approx((2.5 * 2 + 0.5 * 9) / 3)


def test_preemptions_cost_about_what_the_effective_throughput_says() -> None:
    workload, latency = replace(WORKLOAD, staleness_bound=8), Constant(6.0)
    steady = replace(candidate(1.0, 1.0), group_latency_s=6.0, dissemination_s=2.0, start_up_s=100.0)
    shaky = replace(steady, preemptions_per_hour=9.0)
    count = 3
    busy = [simulate_selection(rented((kind, count)), workload, LINKS, latency, seeds=range(6)) for kind in (steady, shaky)]
    kept, lost = (sum(result.utilisation for result in results) / 6 for results in busy)
    assert lost / kept == pytest.approx(shaky.effective_groups_per_s / steady.effective_groups_per_s, abs=0.05)
    assert shaky.effective_groups_per_s < 0.8


def test_workers_in_calls_wait_for_the_slowest_group_and_still_make_their_throughput() -> None:
    machine = replace(candidate(2.0, 1.0, gpus=2), group_latency_s=6.0, dissemination_s=2.0)
    assert utilisation(rented((machine, 1)), in_calls=True) == pytest.approx(1 / 2, abs=0.08)
