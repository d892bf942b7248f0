"""What crosses the wire between learner, hub and workers.

Invariants: token ids go in and token ids come out, never re-encoded text; a member that failed is absent, never an empty
completion; log-probabilities are finite; every body is safetensors, never pickle. Each side checks what it receives.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from echo2.errors import UserError

FinishReason = Literal["stop", "length"]
Index = Annotated[int, Field(ge=0, lt=2**63)]
TENSORS = {
    "token_ids": (np.dtype(np.int32), 1),
    "log_probs": (np.dtype(np.float32), 1),
    "versions": (np.dtype(np.int32), 1),
    "lengths": (np.dtype(np.int32), 1),
}
LOG_PROB_ROUNDING = 1e-3
"""How far above 0 rounding may lift a log-probability."""


LENGTH_BYTES, MOST_GROUPS = 8, 256
"""In a body of several groups: what the length of each takes, and how many there may be."""


class BodyError(UserError):
    """A request body that is damaged or says impossible things."""


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Sampling(Wire):
    """How completions are sampled, the same for every worker of a run."""

    temperature: float
    max_completion_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    """The run's seed; a member samples from (seed, group, member)."""


class Lease(Wire):
    """A worker's right to generate one group."""

    group_id: int
    attempt: int
    members: tuple[int, ...]
    """Members still to be generated, or to be finished."""
    prompt_token_ids: tuple[int, ...]
    timeout_s: float
    """Of a lease of which nothing is handed in."""
    prefixes: dict[int, tuple[int, ...]] = {}
    """Tokens that were handed in of members which are not finished, and which they go on from."""
    temperature: float | None = None
    """Of a group that is evaluated, in place of the run's; 0 takes the most probable token. None where it is to be trained."""


class LeaseAnswer(Wire):
    """What a worker that asked for leases is told."""

    leases: tuple[Lease, ...]
    ended: bool = False
    """The worker may leave: all steps of the run are done, or its machine is given up."""


class WorkerWelcome(Wire):
    """The hub's answer to a registration."""

    worker_id: str
    run_id: str
    sampling: Sampling
    config: dict[str, Any]
    """The run's configuration, as `echo2.config.Config` reads it."""
    broadcast_port: int | None = None
    """Port of the hub's host where the broadcast is joined; None where there is none."""


class Telemetry(Wire):
    """What a worker measured since it started."""

    version: int | None = None
    """Version it generates with; None before the first load."""
    snapshot_id: str | None = None
    groups: int = 0
    tokens: int = 0
    """Tokens that were drawn."""
    open_tokens: int = 0
    """Those of them that are not handed in: what would be lost with the worker."""
    generating_s: float = 0.0
    """Time spent generating; groups / generating_s is the worker's μ while up."""
    slots: int = 0
    """Groups that it may have under way."""
    latency_p50_s: float | None = None
    """From the beginning of a group until all its members are done, over the newest groups: the median …"""
    latency_p90_s: float | None = None
    latency_p99_s: float | None = None
    """… and the slow end; None before a group is done."""
    load_s: float = 0.0
    """Time of the last load of weights into the engine, the proof included."""
    pause_s: float = 0.0
    """That part of it in which nothing else was generated: all of it, or what staging in flight left."""
    fetch_s: float = 0.0
    """Time of the last transfer of a snapshot."""

    @property
    def groups_per_s(self) -> float:
        """The worker's μ while it generates; 0 before it has generated anything."""
        return self.groups / self.generating_s if self.generating_s > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second while it generates; 0 before it has generated anything."""
        return self.tokens / self.generating_s if self.generating_s > 0 else 0.0


class CrewMember(Wire):
    """A worker as the fleet sees it."""

    name: str
    live: bool
    """Whether the hub counts on it."""
    ready: bool
    """Whether it has loaded a version."""
    silent_s: float
    excused: bool = False
    """Whether it was told to leave, or was not heard any more since the hub itself was away: nobody took it away."""


class RolloutFailure(Wire):
    """A member that could not be generated, and why."""

    member: int
    reason: str


@dataclass(frozen=True, slots=True)
class Rollout:
    """One member of n tokens: `token_ids` int32 [n], `log_probs` float32 [n], `versions` int32 [n] that sampled each token."""

    member: int
    token_ids: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason | None
    """None of a part that is handed in before the member is finished."""
    start: int = 0
    """Tokens of the member that were handed in before these; 0 of a whole one."""


@dataclass(frozen=True, slots=True)
class GroupRollouts:
    """What a worker made of one lease."""

    group_id: int
    attempt: int
    rollouts: tuple[Rollout, ...]
    failures: tuple[RolloutFailure, ...] = ()


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A rollout with its reward."""

    rollout: Rollout
    reward: float
    worker_id: str


class LogProbDifference(Wire):
    """How far the learner's log-probabilities were from the sampled ones, over what one worker made of a trained group."""

    group_id: Index
    worker_id: str
    oldest_version: Index
    newest_version: Index
    """Versions that the worker says it sampled the tokens with, from the oldest to the newest."""
    tokens: Annotated[int, Field(ge=1)]
    mean: Annotated[float, Field(ge=0.0)]
    """Mean over these tokens of |ln π₀ − ln μ|, in nats: π₀ the policy at the start of the step, μ as sampled."""
    max: Annotated[float, Field(ge=0.0)]


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """A prompt with its scored members; members that failed are absent."""

    group_id: int
    prompt_token_ids: tuple[int, ...]
    members: tuple[ScoredRollout, ...]

    @property
    def oldest_version(self) -> int:
        """Version of the group's oldest token."""
        return min(int(member.rollout.versions.min()) for member in self.members)


@dataclass(frozen=True, slots=True)
class Batch:
    """B groups assigned to one step, and the means over every group that was scored for it, dropped ones included."""

    step: int
    groups: tuple[TrainingGroup, ...]
    scored: dict[str, float] = field(default_factory=dict)
    """`groups`, `filtered`, `reward`, and the task's own metrics, such as `exact_match`."""


class _MembersHeader(BaseModel):
    """What the header of every body says of its rollouts, in the tensors' order."""

    model_config = ConfigDict(extra="forbid", strict=True)

    members: list[Index]
    finish_reasons: list[FinishReason | None]


class _GroupHeader(_MembersHeader):
    group_id: Index
    starts: list[Index]
    attempt: Annotated[int, Field(ge=1, lt=2**63)]
    failures: list[RolloutFailure]


class _DescribedGroup(_MembersHeader):
    group_id: Index
    prompt_token_ids: list[Index]
    rewards: list[float]
    worker_ids: list[str]


class _BatchHeader(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    step: Index
    scored: dict[str, float]
    groups: list[_DescribedGroup]


Header = TypeVar("Header", bound=BaseModel)


def encode_group(group: GroupRollouts) -> bytes:
    """One group as a safetensors body."""
    header = _GroupHeader.model_construct(
        group_id=group.group_id,
        attempt=group.attempt,
        members=[r.member for r in group.rollouts],
        finish_reasons=[r.finish_reason for r in group.rollouts],
        starts=[r.start for r in group.rollouts],
        failures=list(group.failures),
    )
    return _write(header, group.rollouts)


def decode_group(body: bytes) -> GroupRollouts:
    """Read and check one group; raises BodyError."""
    header, tensors = _read(body, _GroupHeader)
    if len(header.starts) != len(header.members):
        raise BodyError(f"group {header.group_id} has not one start for each of the members {header.members}")
    rollouts = _unpack(tensors, header.members, header.finish_reasons, header.starts)
    members = header.members + [f.member for f in header.failures]
    if len(set(members)) != len(members):
        raise BodyError(f"group {header.group_id}: a member occurs twice in {members}")
    return GroupRollouts(header.group_id, header.attempt, rollouts, tuple(header.failures))


def encode_groups(groups: Sequence[GroupRollouts]) -> bytes:
    """At most MOST_GROUPS groups in one body, each behind its length in bytes (little-endian)."""
    bodies = [encode_group(group) for group in groups]
    return b"".join(len(body).to_bytes(LENGTH_BYTES, "little") + body for body in bodies)


def split_groups(body: bytes) -> list[bytes]:
    """The bodies of the groups that `body` holds, at least one; raises BodyError."""
    bodies: list[bytes] = []
    start = 0
    while start < len(body) and len(bodies) < MOST_GROUPS:
        begin = start + LENGTH_BYTES
        start = begin + int.from_bytes(body[start:begin], "little")
        bodies.append(body[begin:start])
    if not bodies or start != len(body):
        raise BodyError(f"body of {len(body)} bytes does not hold 1 to {MOST_GROUPS} whole groups: send it again")
    return bodies


def encode_batch(batch: Batch) -> bytes:
    """A learner's batch as a safetensors body."""
    header = _BatchHeader.model_construct(
        step=batch.step, scored=batch.scored, groups=[_describe(group) for group in batch.groups]
    )
    return _write(header, [m.rollout for g in batch.groups for m in g.members])


def decode_batch(body: bytes) -> Batch:
    """Read a batch; raises BodyError."""
    header, tensors = _read(body, _BatchHeader)
    members = [m for g in header.groups for m in g.members]
    reasons = [r for g in header.groups for r in g.finish_reasons]
    rollouts = iter(_unpack(tensors, members, reasons))
    groups = tuple(_assemble(group, rollouts) for group in header.groups)
    return Batch(header.step, groups, header.scored)


def encode_rollout(rollout: Rollout) -> bytes:
    """One rollout as the ledger keeps it."""
    return _write(_MembersHeader.model_construct(members=[rollout.member], finish_reasons=[rollout.finish_reason]), [rollout])


def decode_rollout(body: bytes) -> Rollout:
    """Read one rollout from the ledger; raises BodyError."""
    header, tensors = _read(body, _MembersHeader)
    if len(header.members) != 1:
        raise BodyError(f"body holds {len(header.members)} rollouts instead of one")
    return _unpack(tensors, header.members, header.finish_reasons)[0]


def _describe(group: TrainingGroup) -> _DescribedGroup:
    return _DescribedGroup.model_construct(
        group_id=group.group_id,
        prompt_token_ids=list(group.prompt_token_ids),
        members=[m.rollout.member for m in group.members],
        finish_reasons=[m.rollout.finish_reason for m in group.members],
        rewards=[m.reward for m in group.members],
        worker_ids=[m.worker_id for m in group.members],
    )


def _assemble(described: _DescribedGroup, rollouts: Iterator[Rollout]) -> TrainingGroup:
    if not len(described.members) == len(described.rewards) == len(described.worker_ids) == len(described.finish_reasons):
        raise BodyError(f"group {described.group_id} has not one reward, worker and finish reason for each member")
    members = zip(described.rewards, described.worker_ids, strict=True)
    scored = tuple(ScoredRollout(next(rollouts), reward, worker) for reward, worker in members)
    return TrainingGroup(described.group_id, tuple(described.prompt_token_ids), scored)


def _write(header: BaseModel, rollouts: Sequence[Rollout]) -> bytes:
    def joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype)

    tensors = {
        "token_ids": joined([r.token_ids for r in rollouts], np.int32),
        "log_probs": joined([r.log_probs for r in rollouts], np.float32),
        "versions": joined([r.versions for r in rollouts], np.int32),
        "lengths": np.array([len(r.token_ids) for r in rollouts], np.int32),
    }
    return save(tensors, metadata={"echo2": header.model_dump_json(warnings=False)})


def _read(body: bytes, kind: type[Header]) -> tuple[Header, dict[str, np.ndarray]]:
    """The header and the four arrays, of the right types and one dimension."""
    try:
        tensors = load(body)
        size = int.from_bytes(body[:8], "little")
        text = json.loads(body[8 : 8 + size])["__metadata__"]["echo2"]
    except (SafetensorError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise BodyError(f"body of {len(body)} bytes is not a complete safetensors message ({error!r}): send it again") from None
    if {name: (array.dtype, array.ndim) for name, array in tensors.items()} != TENSORS:
        raise BodyError(f"body holds the tensors {sorted(tensors)}, which are not {sorted(TENSORS)} of one dimension each")
    try:
        return kind.model_validate_json(text), tensors
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in problem["loc"]) or "content"
        raise BodyError(f"the body's header is wrong at {place}: {problem['msg'].lower()}") from None


def _unpack(
    tensors: dict[str, np.ndarray], members: list[int], reasons: list[FinishReason | None], starts: list[int] | None = None
) -> tuple[Rollout, ...]:
    lengths = tensors["lengths"].astype(np.int64)
    if not len(lengths) == len(members) == len(reasons):
        raise BodyError(f"body describes {len(members)} members and {len(reasons)} finish reasons but holds {len(lengths)}")
    if (lengths <= 0).any() or any(len(tensors[name]) != lengths.sum() for name in ("token_ids", "log_probs", "versions")):
        raise BodyError("the lengths do not match the tokens, log-probabilities and versions in the body")
    if not np.isfinite(tensors["log_probs"]).all() or (tensors["log_probs"] > LOG_PROB_ROUNDING).any():
        raise BodyError("a log-probability is not finite or is above 0: the worker's engine is at fault")
    if (tensors["versions"] < 0).any() or (tensors["token_ids"] < 0).any():
        raise BodyError("a token id or version is negative")
    ends = np.cumsum(lengths)
    rollouts = []
    for member, reason, end, length, start in zip(members, reasons, ends, lengths, starts or [0] * len(members), strict=True):
        part = slice(int(end - length), int(end))
        token_ids, log_probs, versions = (tensors[name][part] for name in ("token_ids", "log_probs", "versions"))
        rollouts.append(Rollout(member, token_ids, log_probs, versions, reason, start))
    return tuple(rollouts)
