"""What a training segment needs of a learner: one policy, one step per batch.

Invariants: step t trains version t into version t + 1, and only a step that succeeded advances the version; what is exported or
saved is finite; a learner that was restored goes on as if it had never stopped. Nothing here imports torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from echo2.dissemination.manifest import Probe
from echo2.errors import UserError
from echo2.protocol import Batch, LogProbDifference


class LearnerError(UserError):
    """A step that cannot be taken, or weights that must not be kept; the message names step and cause."""


class Learner(ABC):
    """A policy at `version`; used by one thread at a time."""

    version: int = 0
    differences: Sequence[LogProbDifference] = ()
    """Of the last step, one for each worker and group that it trained; none where a step computes no log-probabilities."""
    probe: Probe | None = None
    """Of the version last exported; None where no model stands behind its weights."""

    @abstractmethod
    def train_step(self, batch: Batch) -> dict[str, float]:
        """Train version `batch.step` on `batch` into the next one, and return the step's metrics.

        Raises LearnerError, with the learner unchanged, if the batch is for another step or cannot be trained.
        """

    @abstractmethod
    def begin_export(self) -> Callable[[], bytes]:
        """Begin to copy the current version's weights; returns a function that gives them as a snapshot, in any thread.

        Training may go on at once. Raises LearnerError if they are not all finite.
        """

    def export(self) -> bytes:
        """The current version's weights as a snapshot, at once. Raises LearnerError if they are not all finite."""
        return self.begin_export()()

    @abstractmethod
    def require_finite(self) -> None:
        """Raise LearnerError, naming the weight, unless all weights are finite."""

    @abstractmethod
    def write_state(self, folder: Path) -> None:
        """Write all that `read_state` needs, the version apart, into the empty `folder`. Raises OSError for a full disk."""

    @abstractmethod
    def read_state(self, folder: Path) -> None:
        """Take over what `write_state` wrote, the version apart.

        Where it is missing, damaged or of another model, this raises OSError, ValueError, RuntimeError, EOFError, KeyError,
        pickle.UnpicklingError or SnapshotError.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of what the learner holds beside memory; it is not used afterwards."""

    def check_step(self, batch: Batch) -> None:
        """Raise LearnerError unless `batch` is for the step that is next."""
        if batch.step != self.version:
            raise LearnerError(
                f"batch is for step {batch.step} but the learner is at step {self.version}: fetch that step's batch"
            )


def batch_metrics(batch: Batch) -> dict[str, float]:
    """What a batch with at least one member says without a model: rewards and lengths of the trained members, staleness."""
    groups = [group for group in batch.groups if group.members]
    members = [member for group in groups for member in group.members]
    rewards = [[member.reward for member in group.members] for group in groups]
    staleness = [batch.step - group.oldest_version for group in groups]
    return {
        "reward": float(np.mean([member.reward for member in members])),
        "reward_std": float(np.mean([np.std(group, ddof=1) if len(group) > 1 else 0.0 for group in rewards])),
        "completions/mean_length": float(np.mean([len(member.rollout.token_ids) for member in members])),
        "completions/clipped_ratio": float(np.mean([member.rollout.finish_reason == "length" for member in members])),
        "staleness/mean": float(np.mean(staleness)),
        "staleness/max": float(np.max(staleness)),
    }
