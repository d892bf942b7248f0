"""Who is alive by the hub's clock alone, and what each worker costs."""

import pytest

from echo2.errors import UserError
from echo2.protocol import Telemetry


def test_a_worker_is_lost_after_silence_and_not_before(roster, clock):
    worker_id, _ = roster.register("w")
    for _ in range(5):
        clock.now += 9
        roster.heartbeat(worker_id, Telemetry())
        assert roster.lose_silent(10.0) == []
    clock.now += 11
    assert roster.lose_silent(10.0) == [worker_id]
    with pytest.raises(UserError, match="register again"):
        roster.heartbeat(worker_id, Telemetry())


def test_silence_while_the_hub_was_away_is_forgiven(roster, clock):
    roster.register("w")
    clock.now += 1000
    roster.forgive_silence()
    assert roster.lose_silent(10.0) == []


def test_a_name_that_registers_again_replaces_its_former_self(roster):
    first, _ = roster.register("w")
    second, former = roster.register("w")
    assert former == [first] and first != second
    assert [w.worker_id for w in roster.live_workers()] == [second]


def test_the_cost_is_the_sum_of_all_intervals_over_recoveries(roster, clock):
    expected = 0.0
    for hours, price in ((1.0, 2.0), (0.5, 4.0), (0.25, 1.0)):
        roster.open_interval("w", "offer", price)
        roster.open_interval("w", "offer", price)
        clock.now += hours * 3600
        roster.close_interval("w")
        roster.close_interval("w")
        clock.now += 600
        expected += hours * price
    assert roster.cost_usd() == pytest.approx(expected)
    roster.open_interval("w", "offer", 8.0)
    clock.now += 900
    assert roster.cost_usd() == pytest.approx(expected + 2.0)


def test_a_clock_that_goes_back_gives_no_negative_durations(roster, clock):
    roster.register("w")
    roster.open_interval("w", "offer", 8.0)
    clock.now -= 600
    assert [w.silent_s for w in roster.live_workers()] == [0.0]
    assert roster.cost_usd() == 0.0
