"""Generation that takes its time and nothing else: for rehearsals without a model.

Invariants: groups that are begun together go on side by side, and each is done once its latency is over; how long a group takes
depends on (run seed, group) and what comes out on (run seed, group, member) alone; completions are made of their prompt's own
tokens, so that every one of them can be decoded and scored; nothing is there of a group that is not done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple, cast

from echo2.dissemination.manifest import Content
from echo2.protocol import Sampling
from echo2.rollout.engine import Engine
from echo2.rollout.members import Group, Member
from echo2.rollout.randomness import member_generator

LONGEST_NAP_S = 0.02
LATENCY_STREAM = 2**63
"""Stands where the member's number does when a group's latency is drawn; no member has it."""


class _Wait(NamedTuple):
    """What a group waits for, and what it is made with then."""

    end_s: float
    version: int
    sampling: Sampling


class SimulatedEngine(Engine):
    """Random completions after a lognormal time of mean `group_latency_s`, coefficient of variation `latency_cv`."""

    def __init__(self, group_latency_s: float, latency_cv: float = 0.0) -> None:
        super().__init__()
        self._group_latency_s = group_latency_s
        self._log_variance = math.log1p(latency_cv * latency_cv)
        self._waits: dict[int, _Wait] = {}

    def load_weights(self, snapshot: Content, version: int) -> None:
        """Takes note of the version; the bytes may be anything."""
        self.version = version

    def latency_s(self, seed: int, group_id: int) -> float:
        """How long the group takes, at whichever attempt: lognormal, σ² = ln(1 + cv²), mean exp(µ + σ²/2)."""
        gauss = member_generator(seed, group_id, LATENCY_STREAM).standard_normal()
        return self._group_latency_s * math.exp(math.sqrt(self._log_variance) * gauss - self._log_variance / 2)

    def _start(self, group: Group, sampling: Sampling) -> None:
        group_id = group.lease.group_id
        end_s = time.monotonic() + self.latency_s(sampling.seed, group_id)
        self._waits[group_id] = _Wait(end_s, cast(int, self.version), sampling)

    def _advance(self) -> list[Group]:
        """Sleeps until the first group is done, but not for long; gives that one."""
        group_id, wait = min(self._waits.items(), key=lambda item: item[1].end_s)
        left_s = wait.end_s - time.monotonic()
        if left_s > 0:
            time.sleep(min(left_s, LONGEST_NAP_S))
        if time.monotonic() < wait.end_s:
            return []
        del self._waits[group_id]
        group = self._groups[group_id]
        for member in group.members:
            _complete(member, group, wait)
        return [group]

    def _abandon(self, groups: Sequence[Group]) -> None:
        for group in groups:
            del self._waits[group.lease.group_id]


def _complete(member: Member, group: Group, wait: _Wait) -> None:
    """A completion of random length; one that is shorter than the longest ends with a stop token, if there is any."""
    sampling = wait.sampling
    generator = member_generator(sampling.seed, group.lease.group_id, member.number)
    length = int(generator.integers(1, sampling.max_completion_tokens, endpoint=True))
    member.token_ids = generator.choice(group.lease.prompt_token_ids, length).tolist()
    stops = bool(sampling.stop_token_ids) and length < sampling.max_completion_tokens
    if stops:
        member.token_ids[-1] = sampling.stop_token_ids[0]
    member.log_probs, member.versions = [-1.0] * length, [wait.version] * length
    member.finish_reason = "stop" if stops else "length"
