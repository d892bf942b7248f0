"""Looking at a run from outside: nothing in it changes, and what cannot be looked at is named."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest
from test_observations import REPOSITORY, SETTINGS, KnownRun

from echo2.errors import UserError
from echo2.hub.database import Database
from echo2.hub.inspection import inspect_run

# The superuser reads and writes whatever the permissions say, unless these two rights are taken away.
AS_ORDINARY_USER = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
LOOKS = (("status",), ("plan", "--from-run"))


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


def test_the_rate_of_a_run_that_is_over_stays_what_it_was(over):
    first, again = inspect_run(over.path), inspect_run(over.path)
    assert first["quiet_s"] > 1e6 and first["rollouts_per_s"] == again["rollouts_per_s"] > 1.0
    said = look(("status",), over.path).stdout
    assert f"{first['rollouts_per_s']:.1f} rollouts/s while it was active" in said and "Nothing has happened for" in said
