"""Checkpoints: all that a learner needs to go on as if it had never stopped.

    version-00000010/{model.safetensors, optimizer.pt, random.pt, state.json, config.json, tokenizer.json, …}

Invariants: a checkpoint is whole or absent; its weights are finite; where they are trained, the folder is also an ordinary
Hugging Face model folder; what an interrupted save left behind is never read, and swept by the next save. One process saves at
a time. Learning rates are a function of the version, so it stands for the schedule too.
"""

from __future__ import annotations

import logging
import math
import pickle
import re
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from echo2.config_learner import LearnerSection
from echo2.durability import filling, naming, sync
from echo2.errors import SnapshotError, UserError
from echo2.learning.learner import Learner
from echo2.metric_names import told_missing

STATE = "state.json"
NAME = re.compile(r"version-(\d{8,})")
UNFINISHED = "unfinished-"
log = logging.getLogger(__name__)


class CheckpointError(UserError):
    """A checkpoint that cannot be read or does not fit the model."""


class CheckpointState(BaseModel):
    """What a checkpoint says beside the learner's own state."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    run_id: str
    version: int = Field(ge=0)
    """The policy's version, and the ledger's position: so many steps were committed."""
    cursor: int = Field(ge=0)
    """Prompts that had been given out: the next group's id."""
    metrics: dict[str, float]
    """Mean of `learner.best_metric` over the steps since the checkpoint before, where they had it."""


class CheckpointStore(ABC):
    """Where the checkpoints of one run lie; used by one thread at a time."""

    @abstractmethod
    def states(self) -> dict[int, CheckpointState | None]:
        """Every whole checkpoint by its version, with None for one whose state cannot be read."""

    @abstractmethod
    def place(self, version: int) -> str:
        """What a user calls the checkpoint of `version`."""

    @abstractmethod
    def writing(self, version: int) -> AbstractContextManager[Path]:
        """An empty folder, whose files are the checkpoint of `version` once the block has ended without an error.

        Raises DiskError where it, or the block, cannot write them.
        """

    @abstractmethod
    def reading(self, version: int) -> AbstractContextManager[Path]:
        """A folder with the files of a checkpoint, for as long as the block."""

    @abstractmethod
    def delete(self, version: int) -> None:
        """Remove a checkpoint."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what is under way; nothing is written afterwards."""


class CheckpointFolder(CheckpointStore):
    """Checkpoints in a folder of this machine; others may be deleted by another thread while one is written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._clearing = threading.Lock()

    def states(self) -> dict[int, CheckpointState | None]:
        return {version: _state_in(self._path(version)) for version in self.versions()}

    def versions(self) -> list[int]:
        """Versions of the whole checkpoints, oldest first."""
        names = (path.name for path in self._folder.iterdir()) if self._folder.is_dir() else ()
        return sorted(int(match[1]) for name in names if (match := NAME.fullmatch(name)))

    def place(self, version: int) -> str:
        return str(self._path(version))

    @contextmanager
    def writing(self, version: int) -> Iterator[Path]:
        unfinished = self._folder / f"{UNFINISHED}{version:08d}"
        with naming(self._path(version)):
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._clearing:
                for left in self._folder.glob(f"{UNFINISHED}*"):
                    shutil.rmtree(left)
            with filling(unfinished):
                yield unfinished
            unfinished.rename(self._path(version))
            sync(self._folder)

    @contextmanager
    def reading(self, version: int) -> Iterator[Path]:
        yield self._path(version)

    def delete(self, version: int) -> None:
        # Under another name at first, so that no part of it is ever taken for a whole one.
        ending = self._folder / f"{UNFINISHED}{version:08d}"
        with self._clearing:
            self._path(version).rename(ending)
            shutil.rmtree(ending)

    def close(self) -> None:
        """Nothing is under way."""

    def _path(self, version: int) -> Path:
        return self._folder / name_of(version)


class Checkpoints:
    """The checkpoints of one run: the newest, which it goes on from, and the best, which are kept as models."""

    def __init__(self, store: CheckpointStore, run_id: str, settings: LearnerSection) -> None:
        self._store = store
        self._run_id = run_id
        self._settings = settings
        self._known = store.states()
        self._observed: list[float] = []
        self._warned = False

    @property
    def versions(self) -> list[int]:
        """Versions of the checkpoints, oldest first."""
        return sorted(self._known)

    @property
    def oldest(self) -> int:
        """The earliest version that the run may have to go on from, 0 without a checkpoint; the best ones do not count."""
        return min(self.versions[-self._settings.keep_checkpoints :], default=0)

    def observe(self, metrics: Mapping[str, float]) -> str:
        """Take note of a committed step's metrics; returns what the user is to be told of a missing `best_metric`, once."""
        value = metrics.get(self._settings.best_metric)
        if value is not None and math.isfinite(value):
            self._observed.append(value)
        if self._warned or not self._settings.keep_best:
            return ""
        told = told_missing(self._settings.best_metric, metrics)
        self._warned = bool(told)
        return told

    def save(self, learner: Learner, cursor: int) -> None:
        """Write the learner's state, unless its version is there already, and drop what is not to be kept.

        `cursor` counts the prompts given out so far. Raises LearnerError if a weight is not finite, DiskError for a full disk.
        """
        learner.require_finite()
        version = learner.version
        if version not in self._known:
            state = CheckpointState(run_id=self._run_id, version=version, cursor=cursor, metrics=self._mean())
            with self._store.writing(version) as folder:
                learner.write_state(folder)
                (folder / STATE).write_text(state.model_dump_json(indent=2) + "\n", encoding="utf-8")
            self._known[version] = state
            self._observed.clear()
        for dropped in self._known.keys() - self._kept():
            self._store.delete(dropped)
            del self._known[dropped]

    def restore_newest(self, learner: Learner) -> CheckpointState | None:
        """Put the state of the highest version into `learner`; None where there is no checkpoint.

        Raises CheckpointError if it is damaged, of another model or of another run.
        """
        if not self._known:
            return None
        newest = self.versions[-1]
        try:
            with self._store.reading(newest) as folder:
                state = parse_state((folder / STATE).read_bytes())
                if state.run_id != self._run_id:
                    raise ValueError(f"it is of the run {state.run_id}, not of {self._run_id}")
                learner.read_state(folder)
                learner.version = state.version
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, ValueError, KeyError, SnapshotError) as error:
            raise CheckpointError(
                f"checkpoint {self._store.place(newest)} cannot be restored ({error}): delete it to go on from the one before"
            ) from error
        return state

    def close(self) -> None:
        """Wait until what was saved is where it is to be."""
        self._store.close()

    def _kept(self) -> set[int]:
        metric, best = self._settings.best_metric, self._settings.keep_best
        rated = [(s.metrics[metric], version) for version, s in self._known.items() if s is not None and metric in s.metrics]
        return {*self.versions[-self._settings.keep_checkpoints :], *(version for _, version in sorted(rated)[::-1][:best])}

    def _mean(self) -> dict[str, float]:
        metric = self._settings.best_metric
        if self._observed:
            return {metric: math.fsum(self._observed) / len(self._observed)}
        if self._settings.keep_best and not self._warned:
            self._warned = True
            log.warning(
                "no step before a checkpoint had the metric learner.best_metric = %r, so it is not rated; see docs/learning.md",
                metric,
            )
        return {}


def name_of(version: int) -> str:
    """What the folder of a checkpoint is called."""
    return f"version-{version:08d}"


def parse_state(content: bytes) -> CheckpointState:
    """What a checkpoint's `state.json` says. Raises ValueError if it is damaged."""
    try:
        return CheckpointState.model_validate_json(content)
    except ValidationError:
        raise ValueError(f"its {STATE} is damaged") from None


def _state_in(folder: Path) -> CheckpointState | None:
    try:
        return parse_state((folder / STATE).read_bytes())
    except (OSError, ValueError):
        return None
