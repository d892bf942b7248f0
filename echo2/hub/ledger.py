"""The run's durable record of groups, from lease to training.

Invariants, each held by a test of the same name:
- A group is in exactly one of: leased, generated, ready, trained, filtered, expired, failed. Counts add up.
- An acknowledged rollout survives kill −9.
- The same rollout posted twice counts once; a late attempt after another one won counts as waste, not as data.
- What was handed in of a member is kept with its log-probabilities and versions, and the next attempt goes on from it.
- No group with staleness > S is ever trained.
- After resume, every prompt up to the cursor is accounted for, none skipped, none twice.

The id of a group that is to be trained is also its place in the order of prompts; groups of evaluations have ids of their own.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from echo2.capacity.admission import admissible_groups, oldest_trainable_version
from echo2.hub.batches import Batches
from echo2.hub.database import Database
from echo2.hub.evaluation_groups import FIRST_EVALUATION_GROUP
from echo2.hub.evaluations import Evaluations
from echo2.hub.group_book import GroupBook, LedgerRules, means_over
from echo2.protocol import BodyError, GroupRollouts, ScoredRollout, decode_rollout

PostOutcome = Literal["accepted", "part", "duplicate", "late", "stale"]


@dataclass(frozen=True, slots=True)
class LeasedGroup:
    """A lease as the ledger gives it out; `members` are those still missing, `prefixes` the tokens that they have already."""

    group_id: int
    attempt: int
    members: tuple[int, ...]
    prefixes: dict[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class MemberScore:
    """A member's reward, or why there is none."""

    member: int
    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""


class Ledger:
    """Groups and their rollouts. `clock` gives seconds since the epoch; only this clock counts."""

    def __init__(self, database: Database, rules: LedgerRules, clock: Callable[[], float] = time.time) -> None:
        self._db = database
        self._book = GroupBook(database, rules, clock)
        self.evaluations = Evaluations(self._book)
        self.batches = Batches(self._book, self.evaluations)

    @property
    def current_step(self) -> int:
        """The step whose batch is being gathered or trained."""
        return self._book.current_step

    @property
    def highest_version(self) -> int:
        """Newest version ever announced; −1 before the first."""
        return self._book.highest_version

    def announce(self, version: int) -> int | None:
        """From now on rollouts may carry `version`, whose evaluation begins if it is due.

        Returns the version whose evaluation that cut short, if there is one.
        """
        with self._db.transaction():
            self._db.set("highest_version", str(max(version, self._book.highest_version)))
            return self.evaluations.open_if_due(version)

    def live_groups(self) -> int:
        """Groups admitted and not dropped; every committed step trained exactly B of them."""
        return self._book.live_groups()

    # --- leases

    def lease(self, worker_id: str, version: int, limit: int) -> list[LeasedGroup]:
        """Give up to `limit` groups to a worker that holds `version`: some to evaluate, if there are any, then some to train.

        Of those to train, open leases come first, then new ones by version credit; what they leave is for the evaluation.
        """
        with self._db.transaction():
            self._reopen_overdue()
            waiting = self.evaluations.waiting(version, limit)
            first = waiting[: self.evaluations.claim(limit)] if waiting else []
            leased = [self._lease_again(group_id, worker_id, version) for group_id in first]
            leased += self._lease_to_train(worker_id, version, limit - len(leased))
            rest = waiting[len(first) :][: limit - len(leased)]
            return leased + [self._lease_again(group_id, worker_id, version) for group_id in rest]

    def _lease_to_train(self, worker_id: str, version: int, limit: int) -> list[LeasedGroup]:
        leased: list[LeasedGroup] = []
        live = self._book.live_groups()
        for row in self._db.rows(
            "SELECT group_id FROM groups WHERE state = 'leased' AND worker_id IS NULL AND evaluation IS NULL"
            " ORDER BY group_id LIMIT ?",
            limit,
        ):
            if self._admissible(live - 1, version) > 0:
                leased.append(self._lease_again(row["group_id"], worker_id, version))
        room = min(limit - len(leased), self._admissible(live, version))
        first = self._db.value("SELECT MAX(group_id) + 1 FROM groups WHERE group_id < ?", FIRST_EVALUATION_GROUP)
        for group_id in range(first, first + max(0, room)):
            self._db.execute(
                "INSERT INTO groups (group_id, state, attempt, worker_id, lease_version, leased_at_s)"
                " VALUES (?, 'leased', 0, ?, ?, ?)",
                (group_id, worker_id, version, self._book.clock()),
            )
            leased.append(self._lease_again(group_id, worker_id, version))
        return leased

    def fail(self, group_id: int, reason: str) -> None:
        """Give up a group for good."""
        with self._db.transaction():
            attempt = self._book.group(group_id)["attempt"]
            self._book.end_attempt(group_id, attempt, "returned")
            self._book.drop(group_id, "failed", reason)

    def return_leases(self, worker_id: str, group_ids: Sequence[int]) -> int:
        """A worker hands back groups that it will not finish; returns how many were still its own."""
        with self._db.transaction():
            own = [
                g
                for g in group_ids
                if self._db.row("SELECT 1 FROM groups WHERE group_id = ? AND state = 'leased' AND worker_id = ?", g, worker_id)
            ]
            for group_id in own:
                attempt = self._book.group(group_id)["attempt"]
                kept = self._db.value("SELECT tokens FROM attempts WHERE group_id = ? AND attempt = ?", group_id, attempt)
                self._reopen(group_id, "part" if kept else "returned")
        return len(own)

    def reopen_leases_of(self, worker_id: str) -> int:
        """The worker is lost: whatever it held is open to others."""
        with self._db.transaction():
            held = self._db.rows("SELECT group_id FROM groups WHERE state = 'leased' AND worker_id = ?", worker_id)
            for row in held:
                self._reopen(row["group_id"], "lost")
        return len(held)

    def reopen_overdue(self) -> int:
        """Open every lease whose deadline has passed."""
        with self._db.transaction():
            return self._reopen_overdue()

    def _admissible(self, live: int, version: int) -> int:
        rules = self._book.rules
        return admissible_groups(live, version, rules.staleness_bound, rules.groups_per_batch, rules.total_steps)

    def _lease_again(self, group_id: int, worker_id: str, version: int) -> LeasedGroup:
        now = self._book.clock()
        self._db.execute(
            "UPDATE groups SET attempt = attempt + 1, worker_id = ?, lease_version = ?, deadline_s = ?, leased_at_s = ?"
            " WHERE group_id = ?",
            (worker_id, version, now + self._book.rules.lease_timeout_s, now, group_id),
        )
        attempt = self._db.value("SELECT attempt FROM groups WHERE group_id = ?", group_id)
        self._db.execute("INSERT INTO attempts VALUES (?, ?, ?, 'out', 0, 0, ?, NULL)", (group_id, attempt, worker_id, now))
        members = tuple(sorted(self._book.missing_members(group_id)))
        return LeasedGroup(group_id, attempt, members, self._book.parts.prefixes(group_id))

    def _reopen_overdue(self) -> int:
        overdue = self._db.rows(
            "SELECT group_id FROM groups WHERE state = 'leased' AND worker_id IS NOT NULL AND deadline_s < ?",
            self._book.clock(),
        )
        for row in overdue:
            self._reopen(row["group_id"], "timeout")
        return len(overdue)

    def _reopen(self, group_id: int, outcome: str) -> None:
        group = self._book.group(group_id)
        self._book.end_attempt(group_id, group["attempt"], outcome)
        self._db.execute("UPDATE groups SET worker_id = NULL, deadline_s = NULL WHERE group_id = ?", (group_id,))
        spoiled = self._db.value(
            "SELECT COUNT(*) FROM attempts WHERE group_id = ? AND outcome IN ('timeout', 'lost', 'engine_failed')", group_id
        )
        if spoiled >= self._book.rules.max_attempts:
            self._book.drop(group_id, "failed", f"{spoiled} attempts came to nothing, the last one: {outcome}")

    # --- rollouts

    def post(self, worker_id: str, group: GroupRollouts) -> PostOutcome:
        """Take what a worker generated; what this returns has been written durably. Raises BodyError for an impossible post."""
        with self._db.transaction():
            if self._checked_attempt(worker_id, group)["outcome"] in ("posted", "late", "stale", "engine_failed"):
                return "duplicate"
            row = self._book.group(group.group_id)
            if row["state"] != "leased":
                outcome: PostOutcome = "stale" if row["state"] == "expired" else "late"
                self._book.end_attempt(group.group_id, group.attempt, outcome)
                self._book.count_tokens(group.group_id, group.attempt, 0, sum(len(r.token_ids) for r in group.rollouts))
                return outcome
            kept = self._book.store(worker_id, group, row)
            if not self._book.missing_members(group.group_id):
                return self._complete(group)
            if group.attempt == row["attempt"]:
                self._extend(group.group_id)
            elif not kept:
                return "late"
            return "part"

    def generated_groups(self) -> list[int]:
        """Groups that wait for their scores."""
        return [r["group_id"] for r in self._db.rows("SELECT group_id FROM groups WHERE state = 'generated' ORDER BY group_id")]

    def rollouts_of(self, group_id: int) -> list[ScoredRollout]:
        """The members of a group in order; `reward` is NaN where there is none."""
        rows = self._db.rows("SELECT * FROM rollouts WHERE group_id = ? AND payload IS NOT NULL ORDER BY member", group_id)
        return [
            ScoredRollout(decode_rollout(r["payload"]), float("nan") if r["reward"] is None else r["reward"], r["worker_id"])
            for r in rows
        ]

    def record_scores(self, group_id: int, scores: Sequence[MemberScore]) -> None:
        """Give a generated group its rewards; a member without one is missing, not 0."""
        valid = [s for s in scores if s.reward is not None]
        reasons = sorted({s.reason for s in scores if s.reward is None})
        with self._db.transaction():
            group = self._book.group(group_id)
            if group["state"] != "generated":
                return
            for score in valid:
                self._db.execute(
                    "UPDATE rollouts SET reward = ? WHERE group_id = ? AND member = ?", (score.reward, group_id, score.member)
                )
            self._db.execute(
                "UPDATE groups SET scores = ?, scored_at_s = ?, reason = ? WHERE group_id = ?",
                (json.dumps(_means(valid)), self._book.clock(), "; ".join(reasons) or None, group_id),
            )
            if not valid:
                self._book.drop(group_id, "failed", "no member could be scored: " + "; ".join(reasons))
            elif group["evaluation"] is not None:
                self._db.execute("UPDATE groups SET state = 'evaluated' WHERE group_id = ?", (group_id,))
                self._book.keep_to_show(group_id, "evaluated")
            elif self._book.rules.drop_zero_variance and len({s.reward for s in valid}) == 1:
                self._book.drop(group_id, "filtered", "all rewards equal")
            else:
                self._db.execute("UPDATE groups SET state = 'ready' WHERE group_id = ?", (group_id,))
                self._book.expire_stale(self._book.current_step)

    def _checked_attempt(self, worker_id: str, group: GroupRollouts) -> sqlite3.Row:
        """The attempt that a post answers; raises BodyError if there was none or it could not have made this."""
        attempt = self._db.row("SELECT * FROM attempts WHERE group_id = ? AND attempt = ?", group.group_id, group.attempt)
        if attempt is None or attempt["worker_id"] != worker_id:
            raise BodyError(f"group {group.group_id} attempt {group.attempt} was never leased to worker {worker_id}")
        members = [r.member for r in group.rollouts] + [f.member for f in group.failures]
        size = self._book.members_of(self._book.group(group.group_id))
        if not all(0 <= m < size for m in members):
            raise BodyError(f"group {group.group_id}: members {members} are not within 0 to {size - 1}")
        newest = max((int(r.versions.max()) for r in group.rollouts), default=0)
        if newest > self._book.highest_version:
            raise BodyError(f"group {group.group_id} claims version {newest}, but the newest is {self._book.highest_version}")
        return attempt

    def _extend(self, group_id: int) -> None:
        """The lease is being worked at: it lasts anew, unless it was given up meanwhile."""
        self._db.execute(
            "UPDATE groups SET deadline_s = ? WHERE group_id = ? AND worker_id IS NOT NULL",
            (self._book.clock() + self._book.rules.lease_timeout_s, group_id),
        )

    def _complete(self, group: GroupRollouts) -> PostOutcome:
        row = self._book.group(group.group_id)
        oldest = row["oldest_version"]
        if oldest is None:
            self._db.execute("UPDATE groups SET failed_members = '[]' WHERE group_id = ?", (group.group_id,))
            self._reopen(group.group_id, "engine_failed")
            return "accepted"
        oldest_of_use = oldest_trainable_version(self._book.current_step, self._book.rules.staleness_bound)
        if row["evaluation"] is None and oldest < oldest_of_use:
            self._book.end_attempt(group.group_id, group.attempt, "stale")
            self._book.drop(group.group_id, "expired", f"version {oldest} at step {self._book.current_step}")
            return "stale"
        self._db.execute(
            "UPDATE groups SET state = 'generated', worker_id = NULL, deadline_s = NULL WHERE group_id = ?", (group.group_id,)
        )
        self._book.end_attempt(group.group_id, group.attempt, "posted")
        return "accepted"


def _means(scores: Sequence[MemberScore]) -> dict[str, float]:
    if not scores:
        return {}
    return means_over([s.metrics for s in scores]) | {"reward": fmean(s.reward for s in scores if s.reward is not None)}
