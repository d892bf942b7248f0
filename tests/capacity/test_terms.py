"""Terms: what a measurement says of another configuration, and how large a call must be."""

from __future__ import annotations

import pytest

from echo2.capacity.latencies import Constant, Lognormal
from echo2.capacity.slow_end import slow_end_latency_s
from echo2.capacity.terms import ESTIMATE, GIVEN, call_slots, estimate_terms, what_if
from echo2.config import Config, load_config, override

STAR = ("dissemination.peers=false", "dissemination.uplink_bytes_per_s=1e6", "capacity.snapshot_bytes=100_000")
MEASURED_IN = load_config([], ["batch.groups=32", "fleet.workers=2", *STAR])
TERMS = estimate_terms(MEASURED_IN, 2)


def asked(*settings: str) -> Config:
    return override(MEASURED_IN, list(settings))


def test_without_another_setting_terms_stay_as_they_are() -> None:
    assert what_if(TERMS, MEASURED_IN, MEASURED_IN, ()) == TERMS


def test_the_learners_work_grows_with_the_batch() -> None:
    terms = what_if(TERMS, MEASURED_IN, asked("batch.groups=64"), ())
    assert terms.learner_step_s == 2 * TERMS.learner_step_s
    assert terms.provenance["T"] == f"in proportion to B = 64; {ESTIMATE} with B = 32"


def test_more_workers_complete_more_and_share_a_capped_uplink() -> None:
    terms = what_if(TERMS, MEASURED_IN, asked("fleet.workers=6"), ())
    assert terms.groups_per_s == pytest.approx(3 * TERMS.groups_per_s)
    assert terms.transfer_s == pytest.approx(3 * TERMS.transfer_s)
    assert "with 2 workers" in terms.provenance["D_tx"]
    for other in ("dissemination.uplink_bytes_per_s=0.0", "dissemination.peers=true"):
        free = override(MEASURED_IN, [other])
        assert what_if(TERMS, free, override(free, ["fleet.workers=6"]), ()).transfer_s == TERMS.transfer_s


def test_twice_the_uplink_halves_the_transfer() -> None:
    terms = what_if(TERMS, MEASURED_IN, asked("dissemination.uplink_bytes_per_s=2e6"), ())
    assert terms.transfer_s == pytest.approx(TERMS.transfer_s / 2)


@pytest.mark.parametrize(
    ("key", "value", "term"),
    [
        ("learner_step_s", 9.0, "T"),
        ("group_latency_s", 7.0, "L"),
        ("group_latency_cv", 2.0, "L"),
        ("worker_groups_per_s", 3.0, "μ"),
        ("accepted_share", 0.3, "α"),
        ("transfer_s", 4.0, "D_tx"),
        ("dissemination_fixed_s", 5.0, "D_fix"),
    ],
)
def test_what_the_user_gives_counts_instead_of_what_was_measured(key: str, value: float, term: str) -> None:
    config = asked(f"capacity.{key}={value}")
    assert what_if(TERMS, MEASURED_IN, config, ()) == TERMS, "a default of [capacity] is no wish of the user's"
    terms = what_if(TERMS, MEASURED_IN, config, [f"capacity.{key}"])
    figures = {
        "learner_step_s": terms.learner_step_s,
        "group_latency_s": terms.latency.mean_s,
        "group_latency_cv": terms.latency.cv,
        "worker_groups_per_s": terms.groups_per_s / terms.workers,
        "accepted_share": terms.accepted_share,
        "transfer_s": terms.transfer_s,
        "dissemination_fixed_s": terms.fixed_s,
    }
    assert figures[key] == pytest.approx(value)
    assert [name for name, source in terms.provenance.items() if source == GIVEN] == [term]


def test_a_call_is_as_large_as_its_throughput_needs() -> None:
    assert call_slots(Constant(2.0), groups_per_s=8.0) == 16
    for latency in (Lognormal(1.0, 0.3), Lognormal(3.0, 1.0)):
        slots = call_slots(latency, groups_per_s=10.0)
        assert slots / slow_end_latency_s(latency, slots, slots) >= 10.0
        assert (slots - 1) / slow_end_latency_s(latency, slots - 1, slots - 1) < 10.0
    assert call_slots(Constant(0.001), groups_per_s=1.0) == 1
