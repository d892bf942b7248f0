"""Who is alive by the hub's clock alone, and what each worker costs."""

import pytest

from echo2.errors import UserError
from echo2.hub.roster import DISMISSED
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


def test_who_was_told_to_leave_or_was_not_heard_since_the_hub_was_away_is_excused(roster, clock):
    ids = {name: roster.register(name)[0] for name in ("told", "left", "orphan", "heard", "silent")}

    def excused():
        return {member.name for member in roster.crew() if member.excused}

    clock.now += 20
    for name in ("told", "left", "orphan", "heard"):
        roster.heartbeat(ids[name], Telemetry())
    roster.lose_silent(10.0)
    roster.leave(ids["told"], DISMISSED)
    roster.leave(ids["left"])
    assert excused() == {"told"}
    clock.now += 500
    roster.forgive_silence()
    clock.now += 5
    roster.heartbeat(ids["heard"], Telemetry())
    assert excused() == {"told", "orphan"}
    clock.now += 60
    assert set(roster.lose_silent(10.0)) == {ids["orphan"], ids["heard"]}
    assert excused() == {"told", "orphan"}, "and it stays so when the hub gives it up"


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


def test_who_has_left_stays_with_what_it_was_like_at_last_and_why(roster, clock):
    ids = {name: roster.register(name, process=name)[0] for name in ("told", "ill", "silent", "live")}
    for groups, worker_id in enumerate(ids.values()):
        roster.heartbeat(worker_id, Telemetry(version=3, groups=groups, tokens=10 * groups))
    clock.now += 5
    roster.leave(ids["told"], DISMISSED)
    clock.now += 1
    roster.leave(ids["ill"], "its engine failed")
    clock.now += 5
    roster.heartbeat(ids["live"], Telemetry(version=3))
    roster.lose_silent(10.0)
    departed, count = roster.departed_workers(10)
    assert count == 3 and [worker.worker_id for worker in departed] == [ids["ill"], ids["told"], ids["silent"]]
    assert [(w.state, w.telemetry.groups, w.left_at_s, w.silent_s, w.reason) for w in departed] == [
        ("left", 1, clock.now - 5, 5.0, "its engine failed"),
        ("left", 0, clock.now - 6, 6.0, DISMISSED),
        ("lost", 2, clock.now, 11.0, "silent for more than 10 s"),
    ]
    newest, count = roster.departed_workers(1)
    assert count == 3 and [worker.worker_id for worker in newest] == [ids["ill"]]
    assert [worker.worker_id for worker in roster.live_workers()] == [ids["live"]]


def test_a_process_that_registers_again_is_one_worker(roster, clock):
    first, _ = roster.register("w", process="p")
    clock.now += 11
    roster.lose_silent(10.0)
    assert [worker.worker_id for worker in roster.departed_workers(10)[0]] == [first]
    again, _ = roster.register("w", process="p")
    assert roster.departed_workers(10) == ([], 0)
    clock.now += 1
    roster.leave(again)
    clock.now += 1
    other, _ = roster.register("w", process="q")
    clock.now += 1
    roster.leave(other)
    assert [worker.worker_id for worker in roster.departed_workers(10)[0]] == [other, again]


def test_a_reason_that_many_members_share_is_told_once(roster):
    roster.note("scoring failed", "group 1", {"0": "no number", "1": "no number", "3": "too slow"})
    (event,) = roster._db.rows("SELECT * FROM events")
    assert event["detail"] == "members 0, 1: no number; member 3: too slow"
