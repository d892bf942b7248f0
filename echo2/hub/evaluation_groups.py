"""The groups of evaluations by their ids: which held-out prompt each is of, and how many members it has.

Invariants: their ids are far from those that a run trains; none has more members than a group that is trained, so that a
worker never has more sequences at a time than in training; a prompt of which more completions are wanted has several groups.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_EVALUATION_GROUP = 1 << 40
"""Groups of evaluations have ids from here on."""


def is_evaluation(group_id: int) -> bool:
    """Whether a group belongs to an evaluation; else it is to be trained."""
    return group_id >= FIRST_EVALUATION_GROUP


@dataclass(frozen=True, slots=True)
class EvaluationGroups:
    """Of a run whose evaluations make `samples` completions of each of `prompts` prompts, `members` at most in a group."""

    prompts: int
    samples: int
    members: int

    @property
    def per_prompt(self) -> int:
        """Groups of each prompt."""
        return -(-self.samples // self.members)

    def of_version(self, version: int) -> range:
        """Ids of the groups that evaluate `version`; those of a prompt follow each other."""
        count = self.prompts * self.per_prompt
        first = FIRST_EVALUATION_GROUP + version * count
        return range(first, first + count)

    def place(self, group_id: int) -> int:
        """The place of a group's prompt among the held-out ones, from 0 on."""
        return (group_id - FIRST_EVALUATION_GROUP) // self.per_prompt % self.prompts

    def size(self, group_id: int) -> int:
        """Members of a group: the last one of a prompt has what the others leave."""
        earlier = (group_id - FIRST_EVALUATION_GROUP) % self.per_prompt * self.members
        return min(self.members, self.samples - earlier)
