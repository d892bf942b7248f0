"""Looking at a run from outside: nothing in it changes, and what cannot be looked at is named."""

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest
from test_observations import REPOSITORY, SETTINGS, KnownRun

from echo2.errors import UserError
from echo2.hub.database import Database, unreadable
from echo2.hub.inspection import costs_of, inspect_run
from echo2.protocol import Telemetry
from echo2.run_directory import read_run

# The superuser reads and writes whatever the permissions say, unless these two rights are taken away.
AS_ORDINARY_USER = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
LOOKS = (("status",), ("plan", "--from-run"), ("costs",), ("completions",))


def look(command, path):
    line = [*AS_ORDINARY_USER, sys.executable, "-m", "echo2", *command, str(path)]
    return subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)


def refusal(command, path):
    done = look(command, path)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("echo2: "), line
    return line


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@pytest.fixture
def known(make_run):
    """A run that is going on, as far as its ledger is concerned."""
    made = KnownRun(make_run(*SETTINGS))
    for _ in range(6):
        made.step(made.workers)
    yield made
    made.database.close()


@pytest.fixture
def over(known):
    """A run whose hub has ended in order."""
    known.database.close()
    assert not (known.run.path / "ledger.db-wal").exists()
    return known.run


@pytest.fixture
def killed(known, tmp_path):
    """A run whose hub was killed: the journal holds what the ledger's file does not."""
    path = tmp_path / "killed"
    shutil.copytree(known.run.path, path)
    known.database.close()
    assert (path / "ledger.db-wal").stat().st_size > 0
    return path


@pytest.fixture
def read_only():
    """Takes away the right to write into a folder, until the test is over."""
    made = []

    def make(folder):
        made.append(folder)
        for file in folder.iterdir():
            if file.is_file():
                file.chmod(0o444)
        folder.chmod(0o555)

    yield make
    for folder in made:
        folder.chmod(0o755)


@pytest.mark.parametrize("command", LOOKS)
def test_a_look_leaves_a_run_that_is_over_as_it_was(over, command):
    before = contents(over.path)
    assert look(command, over.path).returncode == 0
    assert contents(over.path) == before


@pytest.mark.parametrize("command", LOOKS)
def test_a_look_at_a_run_that_goes_on_sees_its_newest_step_and_writes_nothing(known, command):
    def ledger():
        return {name: content for name, content in contents(known.run.path).items() if not name.endswith("-shm")}

    known.step(known.workers)
    before = ledger()
    assert look(command, known.run.path).returncode == 0
    assert ledger() == before
    assert inspect_run(known.run.path)["step"] == 7


@pytest.mark.parametrize("command", LOOKS)
def test_a_run_that_may_only_be_read_can_be_looked_at(over, read_only, command):
    read_only(over.path)
    done = look(command, over.path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_whose_hub_was_killed_can_be_looked_at_where_nothing_may_be_written(killed, read_only):
    read_only(killed)
    assert json.loads(look(("status", "--json"), killed).stdout)["step"] == 6
    killed.chmod(0o755)
    (killed / "ledger.db-shm").unlink()
    read_only(killed)
    assert "copy the run" in refusal(("status",), killed)


@pytest.mark.parametrize("command", LOOKS)
def test_a_ledger_that_is_none_is_named_and_left_alone(over, command):
    over.ledger.write_bytes(b"")
    assert "is empty" in refusal(command, over.path)
    assert over.ledger.stat().st_size == 0
    over.ledger.write_text("a letter to a friend, " * 100)
    assert "not the ledger of a run (file is not a database)" in refusal(command, over.path)
    over.ledger.unlink()
    with closing(sqlite3.connect(over.ledger)) as foreign:
        foreign.execute("CREATE TABLE recipes (name TEXT)")
    before = contents(over.path)
    assert "not the ledger of a run (no such table: run)" in refusal(command, over.path)
    assert contents(over.path) == before
    with closing(sqlite3.connect(over.ledger)) as foreign:
        foreign.execute("CREATE TABLE run (key TEXT, value TEXT)")
    assert "names no run" in refusal(command, over.path)
    with closing(sqlite3.connect(over.ledger)) as foreign:
        foreign.execute("INSERT INTO run VALUES ('run_id', ?)", (over.run_id,))
        foreign.commit()
    assert "not the ledger of a run (no such table" in refusal(command, over.path)


def test_a_ledger_is_whole_as_soon_as_it_is_there(tmp_path):
    code = "import sys; from pathlib import Path; from echo2.hub.database import Database\n"
    code += "for i in range(30): Database(Path(sys.argv[1]) / f'{i}.db', 'run-1').close()"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) as maker:
        for ledger in [tmp_path / f"{i}.db" for i in range(30)]:
            while not ledger.exists():
                assert maker.poll() is None or ledger.exists()
            Database(ledger, "run-1", read_only=True).close()


@pytest.mark.parametrize("look_at", [inspect_run, lambda path: costs_of(read_run(path))], ids=["status", "costs"])
def test_a_ledger_that_another_process_has_locked_is_not_called_damaged(killed, look_at, monkeypatch):
    monkeypatch.setattr("echo2.hub.database.PATIENCE_S", 0.1)
    with closing(sqlite3.connect(killed / "ledger.db")) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(UserError, match=r"ledger \S+ is in use by another process \(database is locked\): try again"):
            look_at(killed)
    look_at(killed)


def test_who_would_write_hears_that_another_process_has_locked_the_ledger(over, monkeypatch):
    monkeypatch.setattr("echo2.hub.database.PATIENCE_S", 0.1)
    with closing(sqlite3.connect(over.ledger)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(UserError, match="is in use by another process"):
            Database(over.ledger, over.run_id)


def test_a_ledger_out_of_reach_is_not_called_damaged(tmp_path):
    with pytest.raises(sqlite3.OperationalError) as found:
        sqlite3.connect(tmp_path / "none" / "ledger.db")
    said = str(unreadable(tmp_path / "ledger.db", found.value))
    assert "cannot be read or written (unable to open database file)" in said and "damaged" not in said


@pytest.mark.parametrize("command", LOOKS)
def test_a_folder_in_the_ledgers_place_is_said_to_be_one(over, command):
    over.ledger.unlink()
    over.ledger.mkdir()
    assert f"ledger {over.ledger} is a folder" in refusal(command, over.path)


@pytest.mark.parametrize("content", [None, b"a letter to a friend, " * 100], ids=["folder", "letter"])
def test_a_hub_without_a_ledger_that_it_can_use_says_so_in_one_line(over, content):
    over.ledger.unlink()
    if content is None:
        over.ledger.mkdir()
    else:
        over.ledger.write_bytes(content)
    done = look(("hub",), over.path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"echo2: ledger {over.ledger} is ")


def test_a_ledger_of_another_run_is_refused_to_who_looks(over):
    with pytest.raises(UserError, match=f"belongs to run {over.run_id}, not run-2"):
        Database(over.ledger, "run-2", read_only=True)


@pytest.mark.parametrize("command", [*LOOKS, ("hub",)])
def test_what_may_not_be_read_is_named_in_one_line(over, command):
    if command != ("hub",):
        over.ledger.chmod(0o000)
        assert f"{over.ledger} may not be read by this user" in refusal(command, over.path)
    over.path.chmod(0o000)
    try:
        assert "Permission denied" in refusal(command, over.path)
    finally:
        over.path.chmod(0o755)


@pytest.mark.parametrize("command", LOOKS)
def test_a_look_needs_no_token(over, command):
    (over.path / "token").chmod(0o000)
    assert look(command, over.path).returncode == 0
    (over.path / "token").unlink()
    assert look(command, over.path).returncode == 0
    assert "holds no token" in refusal(("hub",), over.path)


@pytest.mark.parametrize("command", [*LOOKS, ("hub",)])
def test_a_configuration_that_is_missing_from_the_run_is_named_so(over, command):
    (over.path / "config.toml").unlink()
    assert f"{over.path / 'config.toml'} is missing from the run" in refusal(command, over.path)


def test_the_workers_of_a_run_that_is_over_are_shown_as_those_of_one_that_goes_on(known):
    left, stays = known.workers
    known.roster.heartbeat(left, Telemetry(version=6, groups=40, tokens=160, generating_s=8.0))
    known.roster.leave(left, "its machine is taken | back")
    now = inspect_run(known.run.path)
    assert [(w["worker_id"], w["state"]) for w in now["workers"]] == [(stays, "live"), (left, "left")]
    known.roster.leave(stays)
    known.database.close()
    over = inspect_run(known.run.path)
    assert [(w["worker_id"], w["state"]) for w in over["workers"]] == [(left, "left"), (stays, "left")]
    (gone,) = [w for w in over["workers"] if w["worker_id"] == left]
    assert (gone["groups"], gone["tokens"], gone["groups_per_s"], gone["version"]) == (40, 160, 5.0, 6)
    assert {name: over[name] for name in ("workers_live", "workers_omitted")} == {"workers_live": 0, "workers_omitted": 0}
    assert set(over["workers"][0]) == set(now["workers"][0]), "one table for both"
    said = look(("status",), known.run.path).stdout
    assert re.search(rf"\| {left} .* \| 1970-01-01 00:1.* UTC: its machine is taken / back \|", said)
    assert [w["state"] for w in json.loads(look(("status", "--json"), known.run.path).stdout)["workers"]] == ["left", "left"]


def test_the_rate_of_a_run_that_is_over_stays_what_it_was(over):
    first, again = inspect_run(over.path), inspect_run(over.path)
    assert first["quiet_s"] > 1e6 and first["rollouts_per_s"] == again["rollouts_per_s"] > 1.0
    said = look(("status",), over.path).stdout
    assert f"{first['rollouts_per_s']:.1f} rollouts/s while it was active" in said and "Nothing has happened for" in said
