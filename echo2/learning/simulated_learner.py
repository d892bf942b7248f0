"""A learner that takes its time and trains nothing: for rehearsals without a model.

Invariants: every step takes the configured time, whatever the batch; a snapshot has the configured size and depends on its
version alone, so that a replay exports the same bytes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from echo2.learning.learner import Learner, LearnerError, batch_metrics
from echo2.protocol import Batch

STATE = "rehearsal.json"
BYTES_PER_WEIGHT = 4


class SimulatedLearner(Learner):
    """Counts versions: a step lasts `step_s` seconds, a snapshot holds `snapshot_bytes` bytes of random float32 weights."""

    def __init__(self, step_s: float, snapshot_bytes: int) -> None:
        self._step_s = step_s
        self._weights = snapshot_bytes // BYTES_PER_WEIGHT

    def train_step(self, batch: Batch) -> dict[str, float]:
        """As `Learner.train_step`; the metrics are those that a batch has without a model."""
        end_s = time.monotonic() + self._step_s
        self.check_step(batch)
        tokens = sum(len(member.rollout.token_ids) for group in batch.groups for member in group.members)
        if tokens == 0:
            raise LearnerError(f"step {batch.step}: the batch has {len(batch.groups)} groups but no tokens to train")
        metrics = {"tokens": float(tokens)} | batch_metrics(batch)
        time.sleep(max(0.0, end_s - time.monotonic()))
        self.version += 1
        return metrics

    def begin_export(self) -> Callable[[], bytes]:
        weights = np.random.Generator(np.random.Philox(key=self.version)).random(self._weights, np.float32)
        return lambda: save({"weights": weights})

    def require_finite(self) -> None:
        """Weights drawn from 0 to 1 always are."""

    def close(self) -> None:
        """There is nothing to let go of."""

    def write_state(self, folder: Path) -> None:
        (folder / STATE).write_text(json.dumps({"weights": self._weights}) + "\n", encoding="utf-8")

    def read_state(self, folder: Path) -> None:
        """Nothing but the version is kept; a checkpoint of trained weights is refused, so that no rehearsal replaces it."""
        if not (folder / STATE).is_file():
            raise ValueError(f"it has no {STATE}, so a learner with weights made it: set learner.engine=torch")
