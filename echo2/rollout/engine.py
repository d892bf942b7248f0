"""What a worker needs from whatever generates.

Invariants: a group is given out whole by `step`, once, or in parts before that; every token carries the version that sampled it
and its log-probability under the sampling distribution in force; the temperature is that of the lease, where it has one, and
else the run's; a member that failed is reported, not made up. Sampling depends on (run seed, group, member) alone, and in a
member that goes on from a prefix on the prefix's length, not on which groups share a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from echo2.dissemination.manifest import Content
from echo2.protocol import GroupRollouts, Lease, Sampling
from echo2.rollout.members import Group, all_failed


class OutOfMemory(Exception):
    """What is under way does not fit the engine's memory; it is to be dropped, and less of it begun again."""


class Engine(ABC):
    """A policy that generates groups of completions; used by one thread at a time, but for `stage`."""

    version: int | None = None
    """Version of the weights in use; None before the first load."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}

    # --- weights

    def stage(self, snapshot: Content) -> None:  # noqa: B027 - most engines need nothing of it
        """Prepare what the next `load_weights` takes, while another thread generates. Raises SnapshotError.

        Of use to an engine whose weights have a form of their own; others have nothing to prepare.
        """

    @abstractmethod
    def load_weights(self, snapshot: Content, version: int) -> None:
        """Take the weights of `version` from safetensors bytes; the same names as the learner's. Raises SnapshotError.

        What is under way goes on with them: its next tokens are drawn by them, from keys and values that the former ones
        computed, and carry their version.
        """

    def prompt_log_probs(self, token_ids: Sequence[int]) -> np.ndarray | None:
        """Log-probability of every token of a prompt but the first, at temperature 1, float32 [tokens − 1].

        None from an engine that holds its weights under the learner's own names, where none can get lost or misplaced.
        """
        return None

    # --- groups

    @property
    def under_way(self) -> int:
        """Groups that were begun and are not done."""
        return len(self._groups)

    @property
    def open_tokens(self) -> int:
        """Tokens of these groups that were not given out."""
        return sum(group.open_tokens for group in self._groups.values())

    def limit(self, slots: int) -> int:
        """Groups that may be under way, where there are `slots`: fewer where its memory is known to hold fewer."""
        return slots

    def room(self, slots: int) -> int:
        """Groups that it would begin now, where there are `slots`.

        An engine that generates a set of groups at a time has no room until that is done.
        """
        return 0 if self._groups else self.limit(slots)

    def begin(self, lease: Lease, sampling: Sampling) -> GroupRollouts | None:
        """Take up a lease. Gives its failures where nothing can be generated for it, and None where it is under way.

        Raises RuntimeError before the first `load_weights`.
        """
        if self.version is None:
            raise RuntimeError("a group was begun before load_weights: there is no version to generate with")
        group = Group.of(lease)
        reason = self._start(group, sampling)
        if reason is not None:
            return all_failed(lease, reason)
        self._groups[lease.group_id] = group
        return None

    def step(self) -> list[GroupRollouts]:
        """Draw at most one token of each member; gives what was not given out of groups that this finished.

        Raises OutOfMemory.
        """
        done = self._advance()
        for group in done:
            del self._groups[group.lease.group_id]
        return [news for group in done if (news := group.news()) is not None]

    def parts(self, group_ids: Iterable[int]) -> list[GroupRollouts]:
        """What was not given out of these groups, which stay under way."""
        groups = [self._groups[group_id] for group_id in group_ids]
        self._gather(groups)
        return [news for group in groups if (news := group.news()) is not None]

    def drop(self, group_ids: Iterable[int]) -> None:
        """Go on with these groups no longer."""
        self._abandon([self._groups.pop(group_id) for group_id in list(group_ids)])

    def drop_all(self) -> None:
        self.drop(list(self._groups))

    def generate(self, leases: Sequence[Lease], sampling: Sampling, should_stop: Callable[[], bool]) -> Iterator[GroupRollouts]:
        """Generate the groups of `leases`, each as soon as it is done.

        When `should_stop()` turns true, what there is of the others is given, and they are dropped.
        """
        try:
            for lease in leases:
                failed = self.begin(lease, sampling)
                if failed is not None:
                    yield failed
            while self.under_way and not should_stop():
                yield from self.step()
            yield from self.parts(list(self._groups))
        finally:
            self.drop_all()

    @abstractmethod
    def _start(self, group: Group, sampling: Sampling) -> str | None:
        """Have the group grow from the next `_advance` on, or say why that cannot be."""

    @abstractmethod
    def _advance(self) -> list[Group]:
        """Draw tokens; gives the groups that this finished."""

    def _gather(self, groups: Sequence[Group]) -> None:  # noqa: B027 - most engines need nothing of it
        """Give the members of these groups what was drawn for them and lies elsewhere."""

    @abstractmethod
    def _abandon(self, groups: Sequence[Group]) -> None:
        """These groups grow no more."""
