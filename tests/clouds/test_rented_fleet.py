"""The fleet of rented machines, where the cloud fails, delays, loses replies, and the process is killed at any moment."""

from __future__ import annotations

import itertools
import math
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fake_cloud import AtOnce, Chances, Clock, FakeCloud, Killed, MortalLedger
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import wait_until
from simulated_cloud import candidate, demand

from clouds.cloud import CloudMachine, CloudTrouble, MachineFailed, SetupFailed
from clouds.fleet_state import FleetState, Record, load_state, save_state
from clouds.reconciler import Memory, Setback
from clouds.rented_fleet import RentedFleet
from echo2.capacity.limits import Limits, Quota
from echo2.config_activation import ActivationSection, PaceSection
from echo2.errors import UserError
from echo2.hub.database import Database
from echo2.hub.intervals import read_intervals
from echo2.hub.roster import Roster

RUN, OTHER = "run-1", "run-2"
PERIOD_S = 60.0
CHEAP, NEXT, DEAR = candidate("a/n1", 1.0, 1.0), candidate("b/n1", 1.0, 1.5), candidate("c/n1", 1.0, 4.0, spot=False)
seeded = settings(derandomize=True, deadline=None, max_examples=15)


class FixedMarket:
    """Offers, need and limits that stay."""

    def __init__(self, candidates=(CHEAP, NEXT, DEAR), groups_per_s=3.0, limits=None):
        self.candidates, self.demand, self.limits = candidates, demand(groups_per_s), limits or Limits()

    def look(self, now_s):
        return self.candidates, self.demand, self.limits


class World:
    """A run, its ledger, the cloud, and the fleet's process, which is started again when it was killed."""

    def __init__(self, folder: Path, market: FixedMarket | None = None, seed: int = 0, **activation) -> None:
        self.clock = Clock()
        self.cloud = FakeCloud(self.clock, seed)
        self.file = folder / "fleet.json"
        self.database = Database(folder / "ledger.db", RUN)
        self.roster = Roster(self.database, self.clock)
        self.market = market or FixedMarket()
        self.settings = ActivationSection(pace=PaceSection(period_s=PERIOD_S), **activation)
        self.kills = self.troubles = 0
        self.cloud._start((OTHER, "echo2-run-1-0"), NEXT.offer)
        self.start()

    def start(self) -> None:
        ledger = MortalLedger(self.roster, self.cloud)
        self.fleet = RentedFleet(RUN, self.file, self.cloud, ledger, self.market, self.settings, AtOnce(), self.clock)

    def tick(self) -> None:
        """One look of the fleet, and a minute."""
        try:
            self.fleet.tick()
        except Killed:
            self.kills += 1
            self.start()
        except UserError:
            self.troubles += 1
        self.cloud.pass_time(PERIOD_S, self.roster, RUN)

    def run(self, duration_s: float) -> None:
        for _ in range(round(duration_s / PERIOD_S)):
            self.tick()

    def counts(self) -> Counter[str]:
        return Counter(machine.offer for machine in self.cloud.live(RUN))

    def end(self) -> None:
        """Close the fleet in a calm world."""
        self.cloud.chances = Chances()
        for _ in range(120):
            self.fleet.close("the run is over")
            self.tick()
            if self.fleet.is_over:
                return
        raise AssertionError("the fleet does not end")

    def assert_paid(self) -> None:
        """The ledger has the cloud's bill, to the cent and interval by interval."""
        ended = sorted((m.name, m.launched_at_s, m.ended_at_s) for owner, m in self.cloud.ended if owner == RUN)
        rows = self.database.rows("SELECT name, launched_at_s, terminated_at_s FROM paid_intervals ORDER BY 1, 2")
        assert [tuple(row) for row in rows] == ended
        assert self.roster.cost_usd() == pytest.approx(self.cloud.bill_usd(RUN), abs=0.005)


@contextmanager
def world(*arguments, **options):
    with tempfile.TemporaryDirectory() as folder:
        made = World(Path(folder), *arguments, **options)
        try:
            yield made
        finally:
            made.database.close()


QUOTAS = (Quota("a", 2), Quota("b", 2), Quota("c", 3))


@seeded
@given(
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.1, 0.4]),
    st.sampled_from([0.0, 0.1, 0.3]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0.0, 0.01, 0.05]),
    st.sampled_from([0.0, 0.03, 0.1]),
)
def test_whatever_fails_and_whenever_it_is_killed_nothing_leaks_or_doubles_and_the_money_is_right(
    seed, fails, lost, delayed, preempted, killed
) -> None:
    with world(FixedMarket(limits=Limits(budget_usd_per_hour=9.0, quotas=QUOTAS)), seed) as made:
        made.cloud.chances = Chances(fails, lost, lost, delayed, preempted, killed)
        for _ in range(120):
            made.tick()
            live = made.cloud.live(RUN)
            assert sum(m.price_usd_per_hour for m in live) <= 9.0 + 1e-9, "never beyond the budget, whatever is on its way"
            for cloud, most in (("a", 2), ("b", 2), ("c", 3)):
                assert sum(m.offer.startswith(f"{cloud}/") for m in live) <= most, "never beyond a quota"
        made.cloud.chances = Chances()
        made.run(3 * 3600.0)
        assert made.counts() == {CHEAP.offer.name: 2, NEXT.offer.name: 1}, "once all is calm, the plan and nothing else"
        assert made.counts() == made.fleet._memory.plan
        assert all(name.startswith("echo2-run-1-") for name in made.cloud.asked)
        made.end()
        assert made.cloud.live(RUN) == [] and made.cloud.coming == {}
        made.assert_paid()
        assert [m.name for m in made.cloud.live(OTHER)] == ["echo2-run-1-0"], "other runs' machines are left alone"
        assert made.kills > 0 or killed == 0.0


def test_a_process_that_is_killed_after_any_call_of_a_launch_takes_up_what_is_there() -> None:
    for fatal_call in range(30):
        with world() as made:
            calls = itertools.count()

            def perhaps_die(calls=calls, fatal_call=fatal_call) -> float:
                return 0.0 if next(calls) == fatal_call else 1.0

            made.cloud.draw.random = perhaps_die
            made.cloud.chances = Chances(killed=0.5)
            made.run(600.0)
            made.cloud.chances = Chances()
            assert made.counts() == {CHEAP.offer.name: 3} and len(set(made.cloud.asked)) == 3
            made.end()
            made.assert_paid()


def test_a_name_is_on_the_disk_before_the_cloud_is_asked_for_it() -> None:
    with world() as made:
        launch = made.cloud.launch

        def checked(run_id, name, offer, workers):
            assert name in load_state(made.file).records
            launch(run_id, name, offer, workers)

        made.cloud.launch = checked
        made.run(300.0)
        assert len(made.cloud.asked) == 3


def test_without_its_state_the_fleet_takes_up_what_the_cloud_lists_and_gives_no_name_twice() -> None:
    with world() as made:
        made.run(600.0)
        before = {machine.name for machine in made.cloud.live(RUN)}
        made.file.unlink()
        made.start()
        made.run(600.0)
        assert {machine.name for machine in made.cloud.live(RUN)} == before
        made.cloud._end((RUN, min(before)), "preempted")
        made.run(600.0)
        assert len(made.cloud.live(RUN)) == 3 and set(made.cloud.asked) > before
        made.end()
        made.assert_paid()


def test_a_launch_that_was_given_up_and_comes_all_the_same_is_stopped() -> None:
    with world() as made:
        made.run(600.0)
        made.cloud._start((RUN, "echo2-run-1-stray"), NEXT.offer)
        made.run(120.0)
        assert made.counts() == {CHEAP.offer.name: 3}
        made.end()
        made.assert_paid()


def test_a_machine_is_drained_before_it_is_stopped_and_one_whose_workers_fell_silent_is_replaced() -> None:
    with world() as made:
        made.run(1200.0)
        made.market.demand = demand(1.0)
        made.fleet._memory = replace(made.fleet._memory, searched_at_s=-math.inf)
        made.tick()
        draining = {row["name"] for row in made.database.rows("SELECT name FROM draining")}
        assert len(draining) == 2 and len(made.cloud.live(RUN)) == 3
        made.run(180.0)
        assert len(made.cloud.live(RUN)) == 1
        (last,) = made.cloud.live(RUN)
        made.cloud.silent.add(last.name)
        made.run(300.0)
        assert last.name not in {machine.name for machine in made.cloud.live(RUN)}
        lost = [interval.name for interval in read_intervals(made.database) if interval.lost]
        assert lost == [last.name], "its offer is known to lose machines, those that were drained are not"
        assert made.counts() == {NEXT.offer.name: 1}
        made.end()
        made.assert_paid()


def test_a_lack_of_capacity_blocks_the_offer_and_a_failed_set_up_ends_a_fleet_that_never_worked() -> None:
    with world() as made:
        made.cloud.chances = Chances(fails=1.0)
        made.run(120.0)
        assert made.fleet._memory.setbacks[CHEAP.offer.name].in_a_row >= 1 and not made.fleet.closing
        made.cloud.chances = Chances()

        def taken_back(*_):
            raise MachineFailed("a command failed with return code 143")

        launch, made.cloud.launch = made.cloud.launch, taken_back
        made.run(300.0)
        assert not made.fleet.closing, "a machine that fails says nothing about the worker"
        made.cloud.launch = launch

        def broken(*_):
            raise SetupFailed("pip: no such package")

        made.cloud.launch = broken
        made.run(3600.0)
        assert "no such package" in made.fleet.closing and made.fleet.is_over
        kinds = {row["kind"] for row in made.database.rows("SELECT kind FROM events")}
        assert "launch failed" in kinds and "worker ended" not in kinds


def test_a_machine_that_fails_once_its_workers_are_ready_counts_as_lost_if_it_is_gone_and_goes_on_if_it_is_not() -> None:
    for is_gone in (False, True):
        with world() as made:
            made.cloud.start_up_s = 0.0
            launch = made.cloud.launch

            def breaks_off(run_id, name, offer, workers, made=made, launch=launch, is_gone=is_gone):
                launch(run_id, name, offer, workers)
                made.cloud._work(made.roster, RUN)
                if is_gone:
                    made.cloud._end((RUN, name), "taken back")
                raise MachineFailed("a command failed with return code 255")

            made.cloud.launch = breaks_off
            made.tick()
            first = set(made.cloud.asked)
            made.cloud.launch = launch
            made.run(300.0)
            lost = {interval.name for interval in read_intervals(made.database) if interval.lost}
            assert len(first) == 3 and lost == (first if is_gone else set())
            assert {machine.name for machine in made.cloud.live(RUN)} & first == (set() if is_gone else first)
            made.end()
            made.assert_paid()


def test_the_budget_of_a_run_is_never_exceeded() -> None:
    for budget_usd in (0.5, 2.0, 7.77):
        with world(budget_usd=budget_usd) as made:
            made.run(6 * 3600.0)
            assert made.fleet.is_over and "budget_usd" in made.fleet.closing
            assert 0.5 * budget_usd < made.cloud.bill_usd(RUN) <= budget_usd
            made.assert_paid()


def test_the_learner_is_told_why_the_fleet_ended_and_only_where_the_fleet_ended_by_itself() -> None:
    with world(budget_usd=2.0) as made:
        began_at_s = made.clock()
        made.run(3600.0)
        assert "budget_usd = 2 lasts no longer" in made.roster.fleet_ending(began_at_s)
        assert made.roster.fleet_ending(made.clock()) == "", "a session that starts later is not told of it"
    with world() as made:
        made.run(600.0)
        made.end()
        assert made.fleet.closing and made.roster.fleet_ending(0.0) == ""


def test_a_fleet_that_is_closed_at_once_is_not_drained() -> None:
    with world() as made:
        made.run(1200.0)
        made.fleet.close("the hub is gone", without_hub=True)
        made.run(2 * PERIOD_S)
        assert made.fleet.is_over and made.database.rows("SELECT * FROM draining") == []
        made.assert_paid()


@pytest.mark.parametrize("comes_all_the_same", [False, True])
def test_a_launch_that_is_under_way_is_stopped_without_waiting_for_it(comes_all_the_same) -> None:
    with world() as made, ThreadPoolExecutor(8) as executor:
        stopped, launch, stop = threading.Event(), made.cloud.launch, made.cloud.stop

        def hang(*arguments) -> None:
            assert stopped.wait(30)
            if comes_all_the_same:
                launch(*arguments)
            else:
                raise CloudTrouble("the request was cancelled")

        def take_back(*arguments) -> None:
            stop(*arguments)
            stopped.set()

        made.cloud.launch, made.cloud.stop, made.fleet._executor = hang, take_back, executor
        made.tick()
        assert len(made.fleet._jobs) == 3
        made.fleet.close("the run is over")
        wait_until(lambda: made.fleet.is_over or made.tick())
        assert made.cloud.live(RUN) == []
        kinds = {row["kind"] for row in made.database.rows("SELECT kind FROM events")}
        assert "launch failed" not in kinds and "worker ended" not in kinds
        made.assert_paid()


def test_while_the_cloud_does_not_answer_nothing_is_decided() -> None:
    with world() as made:
        made.run(600.0)
        made.cloud.chances = Chances(lost=1.0)
        made.run(1200.0)
        made.cloud.chances = Chances()
        assert made.troubles == 20 and made.counts() == {CHEAP.offer.name: 3}
        made.run(300.0)
        assert made.counts() == {CHEAP.offer.name: 3} and len(set(made.cloud.asked)) == 3


def test_a_damaged_state_is_named() -> None:
    with world() as made:
        made.file.write_text("{")
        with pytest.raises(UserError, match=r"fleet\.json is damaged"):
            made.start()


def test_the_state_is_read_back_as_it_was_written(tmp_path) -> None:
    seen = CloudMachine("m-0", CHEAP.offer.name, 1.0, 5.0)
    memory = Memory({"o": 2}, 1.0, 2.0, -math.inf, {"o": Setback(1, 2.0, 3.0)}, {"m-0": "o"}, 7)
    state = FleetState(memory, {"m-0": Record(CHEAP.offer, 2, 4.0, seen, draining_since_s=9.0)})
    save_state(tmp_path / "s.json", state)
    assert load_state(tmp_path / "s.json") == state and load_state(tmp_path / "none.json") is None


STALE = replace(demand(3.0), slack_steps=1)
SHORTAGES = {
    "a budget": (demand(3.0), Limits(budget_usd_per_hour=2.0), "for 1.98 are planned: 3 of 3", "within 2 USD/h"),
    "a small budget": (demand(3.0), Limits(budget_usd_per_hour=0.5), "machines for 0 are planned", "within 0.5 USD/h"),
    "quotas": (demand(3.0), Limits(quotas=tuple(Quota(cloud, 0) for cloud in "abc")), "for 0", "the quota a of 0"),
    "the staleness bound": (replace(STALE, learner_step_s=29.0), Limits(), "none of 3 offers is fresh enough", "1 · 29 s"),
}


@pytest.mark.parametrize(("asked", "limits", "told", "why"), SHORTAGES.values(), ids=SHORTAGES)
def test_a_plan_that_gives_less_than_is_needed_is_told_once_and_more_is_had_at_once_when_it_can_be(
    asked, limits, told, why, caplog
) -> None:
    with world(FixedMarket(limits=limits)) as made:
        made.market.demand = asked
        made.run(540.0)
        (said,) = [record.getMessage() for record in caplog.records if "3 groups/s are needed" in record.getMessage()]
        assert told in said and why in said
        made.market.demand, made.market.limits = demand(3.0), Limits()
        made.start()
        made.run(2 * PERIOD_S)
        assert made.counts() == {CHEAP.offer.name: 3}, "whoever starts it again does not wait for change_interval_s"
        made.end()
        made.assert_paid()


def test_offers_that_are_left_alone_are_told_where_no_others_give_what_is_needed(caplog) -> None:
    with world(FixedMarket((CHEAP,))) as made:
        made.cloud.chances = Chances(fails=1.0)
        made.run(120.0)
        assert "give no more; 1 of the offers cannot be launched for now, after setbacks" in caplog.text


def test_a_plan_that_gives_what_is_needed_is_kept_to_by_the_next_process_without_a_word(caplog) -> None:
    with world() as made:
        made.run(480.0)
        searched_at_s = made.fleet._memory.searched_at_s
        made.start()
        made.tick()
        assert made.fleet._memory.searched_at_s == searched_at_s
        assert "are needed" not in caplog.text
