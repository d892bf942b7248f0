"""What keeps a run from starting is its one last line, with exit code 2."""

import os
import socket
import threading

import pytest
from patience import wait_until
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings
from train_command import SMALL

from echo2.config import load_config
from echo2.dissemination.store import SnapshotStore
from echo2.errors import UserError, WaitTimeout
from echo2.holding import Holder, held, held_in_turn, holder
from echo2.models.preparation import write_stand_in
from echo2.run_directory import create_run
from flows import temporary_server
from flows.temporary_server import LOCK_NAME, LOG_NAME, server_for_run

SIMULATED = ("worker.engine=simulated", "learner.engine=simulated", "run.steps=4")


@pytest.fixture
def no_server(tmp_path):
    """An environment with a new Prefect home and no server."""
    return os.environ | {"PREFECT_API_URL": "", "PREFECT_HOME": str(tmp_path / "prefect")}


@pytest.mark.parametrize("setting", ["hub.port", "dissemination.port"])
def test_a_taken_port_is_refused_before_a_run_is_made(train, setting):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = train(f"{setting}={port}")
        assert command.wait(60) == 2
    assert command.said.startswith("echo2: ") and command.said.count("\n") == 1
    assert f"{setting} = {port}: cannot listen there (Address already in use)" in command.said
    assert not command.run.exists()


def test_a_hub_that_refuses_to_start_has_the_last_word(train, tmp_path):
    config = load_config([], [f"run.directory={tmp_path}", "run.name=run", *SMALL, *SIMULATED])
    run = create_run(config, resume=False)
    run.model.mkdir()
    write_stand_in(config, run.model)
    SnapshotStore(run.snapshots, run.run_id, run.token).publish(0, b"weights" * 1000, 1024)
    next(run.snapshots.glob("*/manifest.json")).write_text("{")
    command = train(*SIMULATED, "--resume")
    assert command.wait(60) == 2, command.said
    (line,) = [line for line in command.said.splitlines() if line.startswith("echo2: ")]
    assert line == command.said.splitlines()[-1] and "/manifest.json: manifest is damaged" in line
    assert line in (run.logs / "hub.log").read_text().splitlines()
    assert "Traceback" not in command.said and "Traceback" not in (run.logs / "hub.log").read_text()


def test_a_run_holds_the_prefect_home_until_its_server_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    holders, wait_ready = [], temporary_server._wait_ready

    def watched(*arguments):
        wait_ready(*arguments)
        holders.append(holder(tmp_path / LOCK_NAME))

    monkeypatch.setattr(temporary_server, "_wait_ready", watched)
    with temporary_settings({PREFECT_HOME: tmp_path, PREFECT_API_URL: None}), server_for_run():
        assert holders == [Holder(socket.gethostname(), os.getpid())]
        assert holder(tmp_path / LOCK_NAME) is None


def test_who_waits_for_its_turn_goes_on_when_it_comes(tmp_path):
    release = threading.Event()

    def hold():
        with held(tmp_path / "lock", "busy"):
            release.wait(60)

    first = threading.Thread(target=hold)
    first.start()
    wait_until(lambda: holder(tmp_path / "lock"))
    threading.Timer(0.3, release.set).start()
    with held_in_turn(tmp_path / "lock", 60.0, "to test it"):
        assert release.is_set()
    first.join()


def test_who_waits_too_long_for_its_turn_names_whom_it_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(temporary_server, "START_TIMEOUT_S", 0.3)
    told = (
        rf"^process {os.getpid()} on {socket.gethostname()} has held {tmp_path / LOCK_NAME} for 0.3 s to start Prefect's server"
    )
    with (
        temporary_settings({PREFECT_HOME: tmp_path, PREFECT_API_URL: None}),
        held(tmp_path / LOCK_NAME, "busy"),
        pytest.raises(WaitTimeout, match=told),
        server_for_run(),
    ):
        pass
    assert not (tmp_path / LOG_NAME).exists(), "no server was started"


def test_a_prefect_home_that_is_none_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with (
        temporary_settings({PREFECT_HOME: tmp_path / "file", PREFECT_API_URL: None}),
        pytest.raises(UserError, match=rf"^PREFECT_HOME = {tmp_path / 'file'} cannot be used"),
        server_for_run(),
    ):
        pass


def test_a_server_that_fails_at_its_start_leaves_its_reasons_in_its_log(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    (tmp_path / "prefect.db").write_text("no database")
    with (
        temporary_settings({PREFECT_HOME: tmp_path, PREFECT_API_URL: None}),
        pytest.raises(
            UserError, match=rf"^Prefect's temporary server ended with exit code \d+: {tmp_path / LOG_NAME} says why"
        ),
        server_for_run(),
    ):
        pass
    assert "not a database" in (tmp_path / LOG_NAME).read_text()
    assert "".join(capfd.readouterr()) == ""


def test_an_address_that_is_not_prefects_is_refused(prefect_server):
    address = prefect_server.url.removesuffix("/api")
    with (
        temporary_settings({PREFECT_API_URL: address}),
        pytest.raises(UserError, match=rf"^PREFECT_API_URL = {address} leads to no Prefect server .+ 404.+ends in /api"),
        server_for_run(),
    ):
        pass


def test_settings_that_prefect_cannot_read_are_named(train, no_server, tmp_path):
    command = train(environment=no_server | {"PREFECT_API_URL": "http://["})
    assert command.wait(60) == 2
    assert command.said.splitlines()[-1].startswith("echo2: Prefect's settings cannot be used (")
    assert "Traceback" not in command.said
