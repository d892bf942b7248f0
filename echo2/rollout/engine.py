"""What a worker needs from whatever generates.

Invariants: `generate` yields each request exactly once, as soon as its group is done; every token carries the version that
sampled it and its log-probability under the sampling distribution in force; a member that failed is reported, not made up.
Sampling depends on (run seed, group, member) alone, not on which groups share a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

from echo2.dissemination.manifest import Content
from echo2.protocol import GroupRollouts, Lease, Sampling


class Engine(ABC):
    """A policy that generates groups of completions; used by one thread at a time."""

    version: int | None = None
    """Version of the weights in use; None before the first load."""

    @abstractmethod
    def load_weights(self, snapshot: Content, version: int) -> None:
        """Take the weights of `version` from safetensors bytes; the same names as the learner's. Raises SnapshotError."""

    @abstractmethod
    def generate(self, leases: Sequence[Lease], sampling: Sampling, should_stop: Callable[[], bool]) -> Iterator[GroupRollouts]:
        """Generate the groups of `leases`.

        When `should_stop()` turns true, what is finished is yielded (perhaps fewer members than asked for) and the rest left.
        """
