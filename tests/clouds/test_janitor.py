"""What the janitor says of folders and of dead runs, and until when it takes machines to have been there."""

import json
import logging
import os
import time
from contextlib import closing
from dataclasses import asdict

import pytest

from clouds.cloud import CloudMachine
from clouds.fleet_state import FleetState, Record, save_state
from clouds.keeping import Cleared, clear_up
from clouds.processes import ProcessCloud
from echo2.capacity.offers import Offer
from echo2.errors import UserError
from echo2.hub.database import Database
from echo2.hub.intervals import read_intervals
from echo2.hub.roster import Roster

MACHINE, OFFER = "echo2-demo-0", Offer("near/here/z1/h200/spot", 3600.0)
LAUNCHED_AGO_S, ENDED_AGO_S = 7200.0, 3600.0


def leave_behind(run, now_s):
    """What a fleet and a learner that were killed leave of a machine whose worker ended by itself since."""
    machine = CloudMachine(MACHINE, OFFER.name, OFFER.price_usd_per_hour, now_s - LAUNCHED_AGO_S)
    with closing(Database(run.ledger, run.run_id)) as database:
        roster = Roster(database, lambda: now_s - LAUNCHED_AGO_S)
        roster.record_interval(MACHINE, OFFER.name, OFFER.price_usd_per_hour, machine.launched_at_s, None)
        roster.register(MACHINE)
    save_state(run.path / "fleet.json", FleetState(records={MACHINE: Record(OFFER, 1, machine.launched_at_s, machine)}))
    (run.path / "machines").mkdir()
    for file, content, ago_s in (
        (run.path / f"machines/{MACHINE}.json", json.dumps(asdict(machine)), LAUNCHED_AGO_S),
        (run.logs / f"{MACHINE}.log", "the hub was out of reach", ENDED_AGO_S),
    ):
        file.write_text(content)
        os.utime(file, (now_s - ago_s, now_s - ago_s))


@pytest.fixture
def dead_run(make_run, tmp_path):
    return make_run("activation.cloud=processes", f"activation.catalog={tmp_path}")


def test_a_machine_that_had_ended_is_told_and_was_paid_for_until_its_last_sign_of_life(dead_run):
    now_s = time.time()
    leave_behind(dead_run, now_s)
    assert clear_up(dead_run.path.parent) == {dead_run.path.name: Cleared(closed=(MACHINE,))}
    with closing(Database(dead_run.ledger, dead_run.run_id, read_only=True)) as database:
        (interval,) = read_intervals(database)
    assert interval.ended_at_s == pytest.approx(now_s - ENDED_AGO_S, abs=1.0)
    assert not interval.running and not interval.lost, "its worker ended for want of a hub"
    assert clear_up(dead_run.path.parent) == {}


def test_a_machine_that_was_seen_later_than_it_wrote_was_there_until_then(dead_run):
    leave_behind(dead_run, time.time())
    seen_at_s = time.time() - 60.0
    os.utime(dead_run.path / f"machines/{MACHINE}.json", (seen_at_s, seen_at_s))
    cloud = ProcessCloud("http://127.0.0.1:9", "token", dead_run.path / "machines", dead_run.logs, 1)
    (machine,) = cloud.machines(dead_run.run_id)
    assert machine.ended_at_s == pytest.approx(seen_at_s, abs=0.1)


def test_a_run_that_cannot_be_cleared_up_is_told_and_keeps_nobody_from_the_others(dead_run, tmp_path, caplog):
    leave_behind(dead_run, time.time())
    broken = dead_run.path.parent / "a-broken-one"
    broken.mkdir()
    (broken / "fleet.json").write_text("{}")
    cleared = clear_up(dead_run.path.parent)
    assert cleared[dead_run.path.name] == Cleared(closed=(MACHINE,))
    assert "is not the directory of a run" in cleared[broken.name].trouble and str(broken) in caplog.text


def test_a_folder_that_is_none_of_runs_is_named(dead_run, tmp_path, caplog):
    file = tmp_path / "file"
    file.write_text("")
    for wrong, told in (
        (tmp_path / "nowhere", "does not exist"),
        (file, "is not a folder"),
        (dead_run.path, "is the directory of one run"),
    ):
        with pytest.raises(UserError, match=rf"{wrong} {told}"):
            clear_up(wrong)
    with caplog.at_level(logging.WARNING):
        assert clear_up(dead_run.path / "logs") == {}
    assert f"{dead_run.path / 'logs'} holds no runs" in caplog.text
