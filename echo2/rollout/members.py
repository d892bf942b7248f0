"""Members of a group while they grow, whichever engine draws their tokens, and the leases that none can grow from.

Invariants: a completion holds its stop token once, at its end, and ends nowhere else but at the longest length; a token whose
log-probability is not finite is never taken, and fails its member alone; every token is given out once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from echo2.protocol import FinishReason, GroupRollouts, Lease, Rollout, RolloutFailure, Sampling


@dataclass(slots=True, eq=False)
class Member:
    """One member while it grows."""

    number: int
    prefix: tuple[int, ...] = ()
    """Tokens that it has already, from whoever drew them."""
    token_ids: list[int] = field(default_factory=list)
    """Those drawn here, after the prefix."""
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    failure: str | None = None
    given_tokens: int = 0
    """How many of the tokens drawn here `news` has given out."""
    end_given: bool = False

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    def append(self, token_id: int, log_prob: float, version: int, sampling: Sampling) -> None:
        length = len(self.prefix) + len(self.token_ids)
        if not math.isfinite(log_prob):
            self.failure = f"token {length} has the log-probability {log_prob}: version {version} has bad weights"
            return
        self.token_ids.append(token_id)
        self.log_probs.append(log_prob)
        self.versions.append(version)
        if token_id in sampling.stop_token_ids:
            self.finish_reason = "stop"
        elif length + 1 == sampling.max_completion_tokens:
            self.finish_reason = "length"

    def news(self) -> Rollout | RolloutFailure | None:
        """What was not given out yet, if there is anything."""
        if self.failure is not None:
            news = None if self.end_given else RolloutFailure(member=self.number, reason=self.failure)
            self.end_given = True
            return news
        new = slice(self.given_tokens, len(self.token_ids))
        if new.start == new.stop:
            return None
        self.given_tokens, self.end_given = new.stop, self.finished
        return Rollout(
            self.number,
            np.array(self.token_ids[new], np.int32),
            np.array(self.log_probs[new], np.float32),
            np.array(self.versions[new], np.int32),
            self.finish_reason,
            len(self.prefix) + new.start,
        )


@dataclass(slots=True, eq=False)
class Group:
    """A lease and its members."""

    lease: Lease
    members: list[Member]

    @classmethod
    def of(cls, lease: Lease) -> Group:
        """The group of a lease, before anything is drawn."""
        return cls(lease, [Member(number, lease.prefixes.get(number, ())) for number in lease.members])

    @property
    def finished(self) -> bool:
        return all(member.finished for member in self.members)

    @property
    def drawn_tokens(self) -> int:
        return sum(len(member.token_ids) for member in self.members)

    @property
    def open_tokens(self) -> int:
        """Tokens that were not given out."""
        return sum(len(member.token_ids) - member.given_tokens for member in self.members)

    def news(self) -> GroupRollouts | None:
        """What of the group was not given out yet, unfinished members included; None if there is nothing."""
        news = [found for member in self.members if (found := member.news()) is not None]
        if not news:
            return None
        rollouts = tuple(each for each in news if isinstance(each, Rollout))
        failures = tuple(each for each in news if isinstance(each, RolloutFailure))
        return GroupRollouts(self.lease.group_id, self.lease.attempt, rollouts, failures)


def all_failed(lease: Lease, reason: str) -> GroupRollouts:
    """The result of a lease of which no member could be generated."""
    failures = tuple(RolloutFailure(member=member, reason=reason) for member in lease.members)
    return GroupRollouts(lease.group_id, lease.attempt, (), failures)


def refusal(lease: Lease, sampling: Sampling, positions: int, vocabulary_size: int) -> str | None:
    """Why a model of so many positions and token ids can generate nothing for this lease; None if it can."""
    prompt, longest = lease.prompt_token_ids, sampling.max_completion_tokens
    if not lease.members:
        return "no member is asked for"
    if not prompt:
        return "the prompt is empty"
    if len(prompt) + longest > positions:
        return (
            f"the prompt's {len(prompt)} tokens and sampling.max_completion_tokens = {longest} exceed the model's "
            f"{positions} positions"
        )
    if not 0 <= min(prompt) <= max(prompt) < vocabulary_size:
        return f"the prompt has a token id outside the model's vocabulary of {vocabulary_size}"
    return None


def temperature_of(lease: Lease, sampling: Sampling) -> float:
    """The lease's own, or that of `sampling`."""
    return sampling.temperature if lease.temperature is None else lease.temperature
