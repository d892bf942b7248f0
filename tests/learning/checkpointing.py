"""Checkpoints in a folder, opened as a run would after a start of its own."""

from echo2.config import load_config
from echo2.learning.checkpoint import CheckpointFolder, Checkpoints


def checkpoints_in(folder, *settings, run_id="run-1"):
    return Checkpoints(CheckpointFolder(folder), run_id, load_config([], settings).learner)


def saved(learner, folder, *settings, run_id="run-1", cursor=0):
    """The folder of the checkpoint that was written."""
    checkpoints_in(folder, *settings, run_id=run_id).save(learner, cursor)
    return folder / f"version-{learner.version:08d}"


def restored(learner, folder):
    """The learner, which has now the state of the newest checkpoint."""
    checkpoints_in(folder).restore_newest(learner)
    return learner
