"""What is written to a disk that is full: it is named, what was there stays, and nothing is left in the way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from echo2.dissemination.store import SnapshotStore
from echo2.durability import write_atomically
from echo2.errors import DiskError, UserError
from echo2.holding import held
from echo2.logs import open_log
from echo2.run_directory import create_run, read_run

REPOSITORY = Path(__file__).parent.parent
ROOM = 1 << 20
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
"""What is left in a buffer when the interpreter ends is what it makes an exit code of."""


def names(folder):
    return {path.relative_to(folder) for path in folder.rglob("*")}


@pytest.fixture
def disk(small_disk):
    return small_disk(ROOM)


def test_a_file_keeps_its_content_and_gives_its_room_back(disk):
    file = disk.path / "state.json"
    write_atomically(file, "former")
    disk.fill(100_000)
    before, free_bytes = names(disk.path), disk.free_bytes
    with pytest.raises(OSError, match="No space left on device"):
        write_atomically(file, bytes(200_000))
    assert (file.read_text(), names(disk.path), disk.free_bytes) == ("former", before, free_bytes)


def test_a_snapshot_that_has_no_room_is_named_and_those_before_it_stay(disk):
    store = SnapshotStore(disk.path / "snapshots", "run-1", "token")
    store.publish(0, bytes(200_000), 65536)
    disk.fill(100_000)
    before, free_bytes = names(disk.path), disk.free_bytes
    with pytest.raises(DiskError, match=r"snapshots/v00000001 cannot be written \(No space left on device\): make room on"):
        store.publish(1, b"\1" * 200_000, 65536)
    assert (store.versions(), names(disk.path), disk.free_bytes) == ([0], before, free_bytes)
    disk.make_room()
    store.publish(1, b"\1" * 200_000, 65536)
    assert store.read(1, 0, 200_000) == b"\1" * 200_000


def test_a_run_goes_on_with_its_former_configuration_until_there_is_room(disk, make_run):
    run = make_run(runs=disk.path)
    disk.fill()
    with pytest.raises(DiskError, match=rf"{run.path}/config.toml cannot be written"):
        create_run(run.config, resume=True)
    assert read_run(run.path).config == run.config


def test_a_run_that_cannot_be_begun_leaves_nothing(disk, make_run):
    disk.fill()
    with pytest.raises(UserError, match=r"cannot be made \(No space left on device\): choose another run.directory"):
        make_run(runs=disk.path / "runs")
    assert list((disk.path / "runs").iterdir()) == []


def test_a_lock_and_a_log_are_named(disk, tmp_path):
    disk.fill()
    with pytest.raises(DiskError, match=r"run.lock cannot be written \(No space left on device\)"):
        held(disk.path / "run.lock", "").__enter__()
    with pytest.raises(DiskError, match=r"none/hub.log cannot be written \(No such file or directory\): look to its disk"):
        open_log(tmp_path / "none" / "hub.log")


SPEAKS = """
import sys
from echo2.logs import drop_unwritten, say
say("hub listens")
print("went on", file=sys.stderr)
drop_unwritten()
"""


def test_a_process_whose_log_is_full_goes_on():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", SPEAKS],
            cwd=REPOSITORY,
            env=BUFFERED,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (0, "went on\n")


@pytest.mark.parametrize("streams", [("stdout",), ("stdout", "stderr")])
def test_a_command_whose_output_has_no_room_ends_with_exit_code_2(streams):
    line = [sys.executable, "-m", "echo2", "train", "--dry-run"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            line,
            cwd=REPOSITORY,
            env=BUFFERED,
            timeout=60,
            text=True,
            **{"stderr": subprocess.PIPE} | dict.fromkeys(streams, full),
        )
    told = None if "stderr" in streams else "echo2: the output: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, told)
