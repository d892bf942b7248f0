"""What crosses the wire between learner, hub and workers.

Invariants: token ids go in and token ids come out, never re-encoded text; a member that failed is absent, never an empty
completion; log-probabilities are finite; every body is safetensors, never pickle. Each side checks what it receives.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from echo2.errors import UserError

FinishReason = Literal["stop", "length"]


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
    """Members still to be generated."""
    prompt_token_ids: tuple[int, ...]
    timeout_s: float


class WorkerWelcome(Wire):
    """The hub's answer to a registration."""

    worker_id: str
    run_id: str
    sampling: Sampling
    config: dict[str, Any]
    """The run's configuration, as `echo2.config.Config` reads it."""


class Telemetry(Wire):
    """What a worker measured since it started."""

    version: int | None = None
    """Version it generates with; None before the first load."""
    snapshot_id: str | None = None
    groups: int = 0
    tokens: int = 0
    generating_s: float = 0.0
    """Time spent generating; groups / generating_s is the worker's μ while up."""
    load_s: float = 0.0
    """Time of the last load of weights into the engine."""
    fetch_s: float = 0.0
    """Time of the last transfer of a snapshot."""

    @property
    def groups_per_s(self) -> float:
        """The worker's μ while it generates; 0 before it has generated anything."""
        return self.groups / self.generating_s if self.generating_s > 0 else 0.0


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
    finish_reason: FinishReason


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


def encode_group(group: GroupRollouts) -> bytes:
    """One group as a safetensors body."""
    header = {
        "group_id": group.group_id,
        "attempt": group.attempt,
        "members": [r.member for r in group.rollouts],
        "finish_reasons": [r.finish_reason for r in group.rollouts],
        "failures": [f.model_dump() for f in group.failures],
    }
    return save(_pack(list(group.rollouts)), metadata={"echo2": json.dumps(header)})


def decode_group(body: bytes) -> GroupRollouts:
    """Read and check one group; raises BodyError."""
    header, tensors = _read(body)
    try:
        rollouts = _unpack(tensors, header["members"], header["finish_reasons"])
        failures = tuple(RolloutFailure.model_validate(f) for f in header["failures"])
        group_id, attempt = int(header["group_id"]), int(header["attempt"])
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        raise BodyError(
            f"rollout body lacks or misstates a field ({error}): send what echo2.protocol.encode_group makes"
        ) from None
    members = [r.member for r in rollouts] + [f.member for f in failures]
    if len(set(members)) != len(members):
        raise BodyError(f"group {group_id}: a member occurs twice in {members}")
    return GroupRollouts(group_id, attempt, rollouts, failures)


def encode_batch(batch: Batch) -> bytes:
    """A learner's batch as a safetensors body."""
    header = {
        "step": batch.step,
        "scored": batch.scored,
        "groups": [
            {
                "group_id": g.group_id,
                "prompt_token_ids": list(g.prompt_token_ids),
                "members": [m.rollout.member for m in g.members],
                "finish_reasons": [m.rollout.finish_reason for m in g.members],
                "rewards": [m.reward for m in g.members],
                "worker_ids": [m.worker_id for m in g.members],
            }
            for g in batch.groups
        ],
    }
    tensors = _pack([m.rollout for g in batch.groups for m in g.members])
    return save(tensors, metadata={"echo2": json.dumps(header)})


def decode_batch(body: bytes) -> Batch:
    """Read a batch; raises BodyError."""
    header, tensors = _read(body)
    described = header["groups"]
    members = [m for g in described for m in g["members"]]
    reasons = [r for g in described for r in g["finish_reasons"]]
    rollouts = iter(_unpack(tensors, members, reasons))
    groups = tuple(
        TrainingGroup(
            g["group_id"],
            tuple(g["prompt_token_ids"]),
            tuple(
                ScoredRollout(next(rollouts), reward, worker)
                for reward, worker in zip(g["rewards"], g["worker_ids"], strict=True)
            ),
        )
        for g in described
    )
    return Batch(header["step"], groups, header["scored"])


def encode_rollout(rollout: Rollout) -> bytes:
    """One rollout as the ledger keeps it."""
    header = {"members": [rollout.member], "finish_reasons": [rollout.finish_reason]}
    return save(_pack([rollout]), metadata={"echo2": json.dumps(header)})


def decode_rollout(body: bytes) -> Rollout:
    """Read one rollout from the ledger."""
    header, tensors = _read(body)
    return _unpack(tensors, header["members"], header["finish_reasons"])[0]


def _pack(rollouts: list[Rollout]) -> dict[str, np.ndarray]:
    def joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype)

    return {
        "token_ids": joined([r.token_ids for r in rollouts], np.int32),
        "log_probs": joined([r.log_probs for r in rollouts], np.float32),
        "versions": joined([r.versions for r in rollouts], np.int32),
        "lengths": np.array([len(r.token_ids) for r in rollouts], np.int32),
    }


def _unpack(tensors: dict[str, np.ndarray], members: list[int], reasons: list[str]) -> tuple[Rollout, ...]:
    lengths = tensors["lengths"]
    if not len(lengths) == len(members) == len(reasons):
        raise BodyError(
            f"body describes {len(members)} members and {len(reasons)} finish reasons but holds {len(lengths)} lengths"
        )
    if (lengths <= 0).any() or any(len(tensors[name]) != lengths.sum() for name in ("token_ids", "log_probs", "versions")):
        raise BodyError(f"lengths {lengths.tolist()} do not match the tokens, log-probabilities and versions in the body")
    if not np.isfinite(tensors["log_probs"]).all() or (tensors["log_probs"] > 1e-3).any():
        raise BodyError("a log-probability is not finite or is above 0: the worker's engine is at fault")
    if (tensors["versions"] < 0).any() or (tensors["token_ids"] < 0).any():
        raise BodyError("a token id or version is negative")
    ends = np.cumsum(lengths)
    rollouts = []
    for member, reason, start, end in zip(members, reasons, ends - lengths, ends, strict=True):
        if reason not in ("stop", "length"):
            raise BodyError(f"member {member}: finish reason {reason!r} is neither 'stop' nor 'length'")
        part = slice(int(start), int(end))
        token_ids, log_probs, versions = (tensors[name][part] for name in ("token_ids", "log_probs", "versions"))
        rollouts.append(Rollout(int(member), token_ids, log_probs, versions, cast(FinishReason, reason)))
    return tuple(rollouts)


def _read(body: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    try:
        tensors = load(body)
        size = int.from_bytes(body[:8], "little")
        header = json.loads(json.loads(body[8 : 8 + size])["__metadata__"]["echo2"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise BodyError(f"body of {len(body)} bytes is not a complete safetensors message ({error}): send it again") from None
    if not isinstance(header, dict):
        raise BodyError("body's header is not an object")
    missing = {"token_ids", "log_probs", "versions", "lengths"} - tensors.keys()
    if missing:
        raise BodyError(f"body lacks {sorted(missing)}")
    return header, tensors
