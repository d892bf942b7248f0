"""What the ledger says of paid intervals: whose worker it was, how it ended, what it showed."""

import pytest

from echo2.capacity.offers import Rental
from echo2.hub.rentals import read_rentals
from echo2.protocol import Telemetry


def live(roster, clock, name, offer, start_up_s, up_s):
    """Launch, register after `start_up_s`, stay for `up_s`; returns the worker's id."""
    roster.open_interval(name, offer, 2.0)
    clock.now += start_up_s
    worker_id, _ = roster.register(name)
    clock.now += up_s
    roster.heartbeat(worker_id, Telemetry())
    return worker_id


def test_each_interval_has_its_own_worker_and_knows_whether_it_ended_by_itself(roster, clock):
    first = live(roster, clock, "w", "spot", 60.0, 3540.0)
    roster.close_interval("w")
    clock.now += 1.0
    roster.note("worker ended", "w", "killed")
    clock.now += 10.0
    second = live(roster, clock, "w", "spot", 100.0, 1700.0)
    roster.close_interval("w")
    assert read_rentals(roster._db, {first: 2.5, second: 3.5}) == [
        Rental("spot", 1.0, False, True, 60.0, None, 2.5),
        Rental("spot", 0.5, False, False, 100.0, None, 3.5),
    ]


def test_what_runs_is_counted_up_to_the_last_sign_of_life_and_may_not_have_come_up(roster, clock):
    live(roster, clock, "a", "one", 10.0, 1790.0)
    roster.open_interval("b", "two", 1.0)
    clock.now += 90_000.0
    a, b = read_rentals(roster._db, {})
    assert (a.offer, a.hours, a.running, a.lost, a.start_up_s, a.groups_per_s) == ("one", 0.5, True, False, 10.0, None)
    assert (b.offer, b.hours, b.running, b.lost, b.start_up_s) == ("two", 0.0, True, False, None)


def test_a_note_about_another_worker_or_of_another_kind_is_no_loss(roster, clock):
    live(roster, clock, "w", "spot", 10.0, 100.0)
    roster.close_interval("w")
    roster.note("worker ended", "v", "killed")
    roster.note("worker lost", "w", "silent")
    (rental,) = read_rentals(roster._db, {})
    assert not rental.lost


def test_dissemination_is_from_the_end_of_the_step_that_made_the_version(roster, clock):
    worker_id = live(roster, clock, "w", "spot", 10.0, 100.0)
    for step, wait_s in ((0, 4.0), (1, 8.0)):
        roster._db.execute("INSERT INTO steps VALUES (?, ?, '{}')", (step, clock.now))
        clock.now += wait_s
        roster.record_load(worker_id, step + 1, f"{step + 1}-x", clock.now, 1.0)
    (rental,) = read_rentals(roster._db, {})
    assert rental.dissemination_s == pytest.approx(6.0)


def test_a_ledger_without_rentals_has_none(roster):
    assert read_rentals(roster._db, {}) == []
