"""D_tx from what travels and the links that it takes, in plans and in questions of what would be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_example import example

from echo2.capacity.dials import Situation
from echo2.capacity.plan import make_plan, render_plan
from echo2.capacity.terms import ESTIMATE, estimate_terms, what_if
from echo2.capacity.transfer import SeenLinks, Transfer, transfer_of
from echo2.config import Config, load_config, override
from echo2.dissemination.broadcast.plan import PIPELINE_OVERHEAD, Origin, Receiver, fluid_bound_s

MBIT = 1e6 / 8
LINKS = ("model.dtype=bfloat16", "capacity.snapshot_bytes=1_000_000_000", "dissemination.uplink_bytes_per_s=50e6")
KNOWN = (*LINKS, "capacity.worker_uplink_bytes_per_s=12.5e6", "capacity.delta_share=0.1")


def known(*settings: str) -> Config:
    return load_config([], [*KNOWN, "fleet.workers=8", *settings])


@pytest.mark.parametrize("workers", [1, 4, 20])
def test_a_broadcast_takes_the_bound_and_what_was_measured_beyond_it(workers: int) -> None:
    transfer = Transfer(64e6, None, True, True, 200 * MBIT, 100 * MBIT, 40 * MBIT)
    bound_s = fluid_bound_s(64_000_000, Origin(200 * MBIT), [Receiver(100 * MBIT, 40 * MBIT)] * workers)
    assert transfer.seconds(workers) == pytest.approx(PIPELINE_OVERHEAD * bound_s)
    assert f"{workers} worker{'s' if workers > 1 else ''}: slowest downlink binds" in transfer.told(workers)


def test_estimates_follow_from_bytes_and_links_and_say_so() -> None:
    terms = estimate_terms(known(), 8)
    assert terms.transfer_s == pytest.approx(1.1 * 8 * 100 / 150)
    assert terms.provenance["D_tx"] == "1.1 · T* of a broadcast of 100 MB to 8 workers: sum of uplinks binds"
    star = estimate_terms(known("dissemination.peers=false"), 8)
    assert star.transfer_s == pytest.approx(16)
    assert star.provenance["D_tx"] == "100 MB from the hub to each of 8 workers: source uplink binds"
    narrow = estimate_terms(known("dissemination.peers=false", "capacity.worker_downlink_bytes_per_s=5e6"), 8)
    assert narrow.transfer_s == pytest.approx(20)
    assert narrow.provenance["D_tx"].endswith("slowest downlink binds")


def test_what_is_not_smaller_as_a_delta_travels_in_full() -> None:
    assert estimate_terms(known("model.dtype=float32"), 8).transfer_s == pytest.approx(1.1 * 8 * 1000 / 150)
    assert estimate_terms(known("dissemination.deltas=false"), 8).transfer_s == pytest.approx(1.1 * 8 * 1000 / 150)
    rehearsal = known("learner.engine=simulated", "worker.engine=simulated", "capacity.snapshot_bytes=0")
    assert estimate_terms(rehearsal, 8).transfer_s == pytest.approx(1.1 * 8 * 1 / 150)


@pytest.mark.parametrize(
    "unknown",
    [
        ("capacity.snapshot_bytes=0", "capacity.worker_uplink_bytes_per_s=1e6"),
        ("dissemination.uplink_bytes_per_s=0.0", "capacity.worker_uplink_bytes_per_s=1e6"),
        (),
    ],
    ids=["bytes", "source uplink", "worker uplink"],
)
def test_nothing_is_said_where_something_is_not_known(unknown: tuple[str, ...]) -> None:
    config = load_config([], [*LINKS, *unknown])
    assert transfer_of(config) is None
    assert estimate_terms(config, 2).provenance["D_tx"] == ESTIMATE
    plan = make_plan(config)
    assert plan.outlooks == () and "\ndissemination" not in render_plan(plan)


def test_a_transfer_that_is_given_counts() -> None:
    terms = estimate_terms(known("capacity.transfer_s=3.0"), 8)
    assert (terms.transfer_s, terms.provenance["D_tx"]) == (3.0, ESTIMATE)


def test_a_plan_shows_what_the_dissemination_would_be_otherwise() -> None:
    plan = make_plan(example(*KNOWN, "fleet.workers=8", "capacity.transfer_s=8.0", "capacity.dissemination_fixed_s=1.0"))
    names = [outlook.name for outlook in plan.outlooks]
    assert names == ["as planned, 8 workers", "16 workers", "source uplink of 100 MB/s", "in full, 1 GB", "each from the hub"]
    assert [outlook.links.latency_s for outlook in plan.outlooks] == pytest.approx([9, 10.6, 7, 81, 8 * 16 * 150 / 880 + 1])
    assert plan.outlooks[0].utilisation == pytest.approx(plan.prediction.utilisation)
    more = Situation(plan.workload, plan.outlooks[1].links, 2 * plan.terms.slots, plan.terms.latency)
    assert plan.outlooks[1].utilisation == more.utilisation
    (row,) = [line.split() for line in render_plan(plan).splitlines() if line.startswith("16 workers")]
    assert row[2:6] == ["9.6", "s", "10.6", "s"]


def test_deltas_that_are_off_are_among_what_would_be() -> None:
    plan = make_plan(known("dissemination.deltas=false", "dissemination.peers=false"))
    assert [outlook.name for outlook in plan.outlooks[3:]] == ["as deltas, 100 MB", "by way of each other"]
    assert plan.outlooks[3].links.transfer_s == pytest.approx(plan.links.transfer_s / 10)


def test_a_pool_that_is_left_open_is_counted_with_the_transfer_of_its_own_size() -> None:
    plan = make_plan(known("fleet.workers=0", "capacity.worker_groups_per_s=2.0", "capacity.learner_step_s=4.0"))
    assert plan.terms.workers > 1
    transfer = transfer_of(known())
    assert transfer is not None and plan.links.transfer_s == transfer.seconds(plan.terms.workers)
    assert plan.workers_for(plan.configured.groups_per_s) == plan.terms.workers


MEASURED_IN = load_config([], ["model.dtype=bfloat16", "fleet.workers=8"])
"""No cap, nothing configured: what is known was seen."""
SEEN = SeenLinks(full_bytes=1e9, delta_bytes=1e8, source_bytes_per_s=50e6, worker_bytes_per_s=12.5e6)
MEASURED = replace(estimate_terms(MEASURED_IN, 8), transfer_s=8.0, links_seen=SEEN)


@pytest.mark.parametrize(
    ("settings", "expected_s"),
    [
        (["fleet.workers=16"], 8 * 7.04 / 5.8666667),
        (["dissemination.uplink_bytes_per_s=100e6"], 8 * 4.4 / 5.8666667),
        (["dissemination.deltas=false"], 80.0),
        (["dissemination.peers=false"], 8 * 16 / 5.8666667),
        (["capacity.snapshot_bytes=2_000_000_000", "capacity.delta_share=0.1"], 16.0),
        (["capacity.delta_share=0.2"], 16.0),
        (["capacity.worker_uplink_bytes_per_s=25e6"], 8 * 8 * 100 / 250 / (8 * 100 / 150)),
        (["capacity.transfer_s=3.0", "fleet.workers=16"], 3.0),
        (["staleness.bound=4"], 8.0),
        (["capacity.worker_groups_per_s=3.0"], 8.0),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_measured_transfer_changes_in_proportion_to_its_bound(settings: list[str], expected_s: float) -> None:
    given = [setting.partition("=")[0] for setting in settings]
    terms = what_if(MEASURED, MEASURED_IN, override(MEASURED_IN, settings), given)
    assert terms.transfer_s == pytest.approx(expected_s)
    if expected_s not in (3.0, 8.0):
        assert terms.provenance["D_tx"].startswith("in proportion to ") and "with 8 workers" in terms.provenance["D_tx"]


def test_a_run_whose_deltas_were_not_smaller_is_not_expected_to_gain_by_them() -> None:
    terms = replace(MEASURED, links_seen=replace(SEEN, delta_bytes=None))
    in_full = override(MEASURED_IN, ["dissemination.deltas=false"])
    assert what_if(terms, MEASURED_IN, in_full, ()).transfer_s == 8.0
    assert what_if(terms, in_full, MEASURED_IN, ()).transfer_s == pytest.approx(8.0 * 0.05), "it did not try"


def test_a_transfer_over_unknown_links_stays_as_measured() -> None:
    terms = replace(MEASURED, links_seen=replace(SEEN, worker_bytes_per_s=None))
    assert what_if(terms, MEASURED_IN, override(MEASURED_IN, ["fleet.workers=16"]), ()).transfer_s == 8.0
