"""A run whose disk becomes full ends in one sentence, loses nothing, and goes on once there is room."""

import re
import shutil

import pytest
from test_rehearsal import REHEARSAL, check_trackers, rows, steps_done

MB = 1 << 20
SENTENCE = r"cannot be written \(.*(No space left on device|disk is full)\): make room on its disk"
ACKNOWLEDGED = "SELECT group_id, member FROM rollouts"


@pytest.mark.slow
@pytest.mark.parametrize("learner", [REHEARSAL, ("run.steps=16",)], ids=["simulated", "trained"])
def test_a_run_on_a_full_disk_ends_in_a_sentence_and_goes_on_once_there_is_room(train, small_disk, tmp_path, learner):
    disk = small_disk(64 * MB)
    settings = (*learner, "fleet.workers=1", f"worker.spool_directory={tmp_path / 'spool'}")
    first = train(*settings, runs=disk.path)
    first.wait_until(lambda: steps_done(first.run) >= 3)
    disk.fill()
    assert first.wait() == 2, first.said
    assert first.survivors() == []
    last = first.said.splitlines()[-1]
    assert re.match(rf"echo2: .*{first.run}/.* {SENTENCE}; the same command with --resume then goes on with the run$", last)
    assert "Traceback" not in first.said
    kept, steps = set(rows(first.run, ACKNOWLEDGED)), steps_done(first.run)
    assert steps >= 3 and len(kept) >= 3 * 4 * 4
    disk.make_room()
    again = train(*settings, "--resume", runs=disk.path)
    assert again.wait() == 0, again.said
    assert steps_done(again.run) == 16
    assert kept <= set(rows(again.run, ACKNOWLEDGED))
    check_trackers(again.run)


def test_a_run_that_lacks_its_last_checkpoint_and_report_is_not_complete(train):
    first = train(*REHEARSAL, "run.steps=3")
    assert first.wait() == 0, first.said
    shutil.rmtree(first.run / "checkpoints" / "version-00000003")
    (first.run / "summary.json").unlink()
    again = train(*REHEARSAL, "run.steps=3", "--resume")
    assert again.wait() == 0, again.said
    assert "learner goes on from version 2; 1 steps are replayed" in again.said
    assert (again.run / "summary.json").exists() and (again.run / "checkpoints" / "version-00000003").exists()
    complete = train(*REHEARSAL, "run.steps=3", "--resume")
    assert complete.wait() == 0 and "is complete: it has 3 of 3 steps" in complete.said
