"""The learner on several devices, as one: rank 0 of it, which orders the others to do what it does.

Invariants: a step's numbers are those of one device but for rounding; what is written and published is whole; a rank that is
lost ends in a LearnerError that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from echo2.config import Config
from echo2.learning.learner import Learner
from echo2.learning.ranks import Ranks, broadcast
from echo2.learning.torch_learner import TorchLearner
from echo2.protocol import Batch


class ShardedLearner(Learner):
    """`learner.devices` ranks; there can be one such learner in a process at a time."""

    def __init__(self, config: Config, model_folder: Path, log_folder: Path) -> None:
        """Starts the other ranks, which write to `log_folder`.

        Raises ConfigError if the model cannot be loaded or trained or there are too few devices, LearnerError if a rank ends.
        """
        self._ranks = Ranks(config, model_folder, log_folder)
        try:
            shards = self._ranks.join()
            with self._ranks.together("while it loaded the model"):
                self._own = TorchLearner.create(config, model_folder, shards)
        except BaseException:
            self._ranks.close()
            raise

    def train_step(self, batch: Batch) -> dict[str, float]:
        self.check_step(batch)
        with self._ranks.together(f"in step {batch.step}"):
            self._order("train_step")
            metrics = self._own.train_step(broadcast(batch))
        self.version, self.differences = self._own.version, self._own.differences
        return metrics

    def begin_export(self) -> Callable[[], bytes]:
        with self._ranks.together(f"while version {self.version} was exported"):
            self._order("begin_export")
            payload = self._own.begin_export()
        self.probe = self._own.probe
        return payload

    def require_finite(self) -> None:
        with self._ranks.together(f"while version {self.version} was checked"):
            self._order("require_finite")
            self._own.require_finite()

    def write_state(self, folder: Path) -> None:
        with self._ranks.together(f"while version {self.version} was saved"):
            self._order("write_state", folder)
            self._own.write_state(folder)

    def read_state(self, folder: Path) -> None:
        # Rank 0 finds what is wrong with the files before another one reads them.
        self._own.read_state(folder)
        with self._ranks.together(f"while {folder.name} was read"):
            self._order("read_state", folder)
            torch.distributed.barrier()

    def close(self) -> None:
        self._ranks.close()

    def _order(self, action: str, folder: Path | None = None) -> None:
        self._own.version = self.version
        self._ranks.order(action, version=self.version, folder=folder and str(folder.absolute()))
