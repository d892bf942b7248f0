"""Checkpoints: all that a learner needs to go on as if it had never stopped.

    checkpoints/version-00000010/{model.safetensors, optimizer.pt, state.json, config.json, tokenizer.json, …}

Invariants: a checkpoint is whole or absent; its weights are finite; where they are trained, the folder is also an ordinary
Hugging Face model folder; what an interrupted save left behind is never read, and swept by the next save. One process saves at
a time.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path

from echo2.durability import sync
from echo2.errors import SnapshotError, UserError
from echo2.learning.learner import Learner

STATE = "state.json"
NAME = re.compile(r"version-(\d{8,})")
UNFINISHED = "unfinished-"


class CheckpointError(UserError):
    """A checkpoint that cannot be read or does not fit the model."""


def save_checkpoint(learner: Learner, folder: Path, run_id: str, keep: int) -> Path:
    """Write the learner's state below `folder`, unless it is there already, and keep the `keep` newest checkpoints.

    The random state is no part of it, since a step draws no random numbers. Raises LearnerError if a weight is not finite.
    """
    learner.require_finite()
    folder.mkdir(parents=True, exist_ok=True)
    prune(folder, keep)
    checkpoint = folder / f"version-{learner.version:08d}"
    if not checkpoint.exists():
        unfinished = folder / f"{UNFINISHED}{learner.version:08d}"
        unfinished.mkdir()
        learner.write_state(unfinished)
        state = {"run_id": run_id, "version": learner.version}
        (unfinished / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        for file in unfinished.iterdir():
            sync(file)
        sync(unfinished)
        unfinished.rename(checkpoint)
        sync(folder)
        prune(folder, keep)
    return checkpoint


def checkpoint_versions(folder: Path) -> list[int]:
    """Versions of the checkpoints below `folder`, oldest first."""
    return sorted(_checkpoints(folder))


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the highest version below `folder`."""
    checkpoints = _checkpoints(folder)
    return checkpoints[max(checkpoints)] if checkpoints else None


def restore(learner: Learner, checkpoint: Path) -> None:
    """Put the state in `checkpoint` into `learner`. Raises CheckpointError if it is damaged or of another model."""
    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        version = int(state["version"])
        learner.read_state(checkpoint)
        learner.version = version
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, ValueError, KeyError, SnapshotError) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint} cannot be restored ({error}): delete it to go on from the one before"
        ) from error


def prune(folder: Path, keep: int) -> None:
    """Delete all but the `keep` newest checkpoints, and what interrupted saves left."""
    checkpoints = _checkpoints(folder)
    for version in sorted(checkpoints)[:-keep]:
        shutil.rmtree(checkpoints[version])
    for unfinished in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(unfinished)


def _checkpoints(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    matches = ((NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in matches if match}
