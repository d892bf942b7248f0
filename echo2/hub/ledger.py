"""The run's durable record of groups, from lease to training.

Invariants, each held by a test of the same name:
- A group is in exactly one of: leased, generated, ready, trained, filtered, expired, failed. Counts add up.
- An acknowledged rollout survives kill −9.
- The same rollout posted twice counts once; a late attempt after another one won counts as waste, not as data.
- No group with staleness > S is ever trained.
- After resume, every prompt up to the cursor is accounted for, none skipped, none twice.

A group's id is also its place in the order of prompts. A step's batch is assigned once and kept: a learner that comes back from
an older checkpoint is given the same batches again, so its replay repeats what was lost.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from echo2.capacity.admission import admissible_groups, oldest_trainable_version
from echo2.config import Config
from echo2.errors import UserError
from echo2.hub.database import Database
from echo2.protocol import BodyError, GroupRollouts, ScoredRollout, decode_rollout, encode_rollout

PostOutcome = Literal["accepted", "part", "duplicate", "late", "stale"]
OPEN_STATES = ("leased", "generated", "ready")
DROPPED_STATES = ("filtered", "expired", "failed")


@dataclass(frozen=True, slots=True)
class LedgerRules:
    """The numbers of a run that the ledger's rules need."""

    groups_per_batch: int
    members: int
    staleness_bound: int
    total_steps: int
    drop_zero_variance: bool
    lease_timeout_s: float
    max_attempts: int


def rules_of(config: Config) -> LedgerRules:
    """The rules that a configuration makes."""
    return LedgerRules(
        groups_per_batch=config.batch.groups,
        members=config.batch.members,
        staleness_bound=config.staleness.bound,
        total_steps=config.run.steps,
        drop_zero_variance=config.batch.drop_zero_variance,
        lease_timeout_s=config.hub.lease_timeout_s,
        max_attempts=config.hub.max_attempts,
    )


@dataclass(frozen=True, slots=True)
class LeasedGroup:
    """A lease as the ledger gives it out; `members` are those still missing."""

    group_id: int
    attempt: int
    members: tuple[int, ...]


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
        self._rules = rules
        self._clock = clock

    @property
    def current_step(self) -> int:
        """The step whose batch is being gathered or trained."""
        return self._db.value("SELECT MAX(step) + 1 FROM steps")

    @property
    def highest_version(self) -> int:
        """Newest version ever announced; −1 before the first."""
        return int(self._db.get("highest_version") or -1)

    def announce(self, version: int) -> None:
        """From now on rollouts may carry `version`."""
        self._db.set("highest_version", str(max(version, self.highest_version)))

    def live_groups(self) -> int:
        """Groups admitted and not dropped; every committed step trained exactly B of them."""
        waiting = self._db.value("SELECT COUNT(*) FROM groups WHERE state IN ('leased', 'generated', 'ready')")
        return self.current_step * self._rules.groups_per_batch + waiting

    # --- leases

    def lease(self, worker_id: str, version: int, limit: int) -> list[LeasedGroup]:
        """Give up to `limit` groups to a worker that holds `version`: open leases first, then new ones by version credit."""
        leased: list[LeasedGroup] = []
        with self._db.transaction() as db:
            self._reopen_overdue(db)
            live = self.live_groups()
            for row in self._db.rows(
                "SELECT group_id FROM groups WHERE state = 'leased' AND worker_id IS NULL ORDER BY group_id LIMIT ?", limit
            ):
                if self._admissible(live - 1, version) > 0:
                    leased.append(self._lease_again(db, row["group_id"], worker_id, version))
            room = min(limit - len(leased), self._admissible(live, version))
            first = self._db.value("SELECT MAX(group_id) + 1 FROM groups")
            for group_id in range(first, first + max(0, room)):
                db.execute(
                    "INSERT INTO groups (group_id, state, attempt, worker_id, lease_version, leased_at_s)"
                    " VALUES (?, 'leased', 0, ?, ?, ?)",
                    (group_id, worker_id, version, self._clock()),
                )
                leased.append(self._lease_again(db, group_id, worker_id, version))
        return leased

    def return_leases(self, worker_id: str, group_ids: Sequence[int]) -> int:
        """A worker hands back groups that it will not finish; returns how many were still its own."""
        with self._db.transaction() as db:
            own = [
                g
                for g in group_ids
                if self._db.row("SELECT 1 FROM groups WHERE group_id = ? AND state = 'leased' AND worker_id = ?", g, worker_id)
            ]
            for group_id in own:
                self._reopen(db, group_id, "returned")
        return len(own)

    def reopen_leases_of(self, worker_id: str) -> int:
        """The worker is lost: whatever it held is open to others."""
        with self._db.transaction() as db:
            held = self._db.rows("SELECT group_id FROM groups WHERE state = 'leased' AND worker_id = ?", worker_id)
            for row in held:
                self._reopen(db, row["group_id"], "lost")
        return len(held)

    def reopen_overdue(self) -> int:
        """Open every lease whose deadline has passed."""
        with self._db.transaction() as db:
            return self._reopen_overdue(db)

    def _admissible(self, live: int, version: int) -> int:
        rules = self._rules
        return admissible_groups(live, version, rules.staleness_bound, rules.groups_per_batch, rules.total_steps)

    def _lease_again(self, db: sqlite3.Connection, group_id: int, worker_id: str, version: int) -> LeasedGroup:
        now = self._clock()
        db.execute(
            "UPDATE groups SET attempt = attempt + 1, worker_id = ?, lease_version = ?, deadline_s = ?, leased_at_s = ?"
            " WHERE group_id = ?",
            (worker_id, version, now + self._rules.lease_timeout_s, now, group_id),
        )
        attempt = self._db.value("SELECT attempt FROM groups WHERE group_id = ?", group_id)
        db.execute("INSERT INTO attempts VALUES (?, ?, ?, 'out', 0, ?, NULL)", (group_id, attempt, worker_id, now))
        return LeasedGroup(group_id, attempt, tuple(sorted(self._missing_members(group_id))))

    def _reopen_overdue(self, db: sqlite3.Connection) -> int:
        overdue = self._db.rows(
            "SELECT group_id FROM groups WHERE state = 'leased' AND worker_id IS NOT NULL AND deadline_s < ?", self._clock()
        )
        for row in overdue:
            self._reopen(db, row["group_id"], "timeout")
        return len(overdue)

    def _reopen(self, db: sqlite3.Connection, group_id: int, outcome: str) -> None:
        group = self._group(group_id)
        self._end_attempt(db, group_id, group["attempt"], outcome, 0)
        db.execute("UPDATE groups SET worker_id = NULL, deadline_s = NULL WHERE group_id = ?", (group_id,))
        spoiled = self._db.value(
            "SELECT COUNT(*) FROM attempts WHERE group_id = ? AND outcome IN ('timeout', 'lost', 'engine_failed')", group_id
        )
        if spoiled >= self._rules.max_attempts:
            self._drop(db, group_id, "failed", f"{spoiled} attempts came to nothing, the last one: {outcome}")

    # --- rollouts

    def post(self, worker_id: str, group: GroupRollouts) -> PostOutcome:
        """Take what a worker generated; what this returns has been written durably. Raises BodyError for an impossible post."""
        tokens = sum(len(r.token_ids) for r in group.rollouts)
        with self._db.transaction() as db:
            if self._checked_attempt(worker_id, group)["outcome"] in ("posted", "late", "stale", "engine_failed"):
                return "duplicate"
            row = self._group(group.group_id)
            if row["state"] != "leased":
                outcome: PostOutcome = "stale" if row["state"] == "expired" else "late"
                self._end_attempt(db, group.group_id, group.attempt, outcome, tokens)
                return outcome
            new_tokens = self._store(db, worker_id, group, row)
            if self._missing_members(group.group_id):
                return self._keep_part(db, group, row, new_tokens)
            return self._complete(db, group, new_tokens)

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
        with self._db.transaction() as db:
            if self._group(group_id)["state"] != "generated":
                return
            for score in valid:
                db.execute(
                    "UPDATE rollouts SET reward = ? WHERE group_id = ? AND member = ?", (score.reward, group_id, score.member)
                )
            db.execute(
                "UPDATE groups SET scores = ?, scored_at_s = ?, reason = ? WHERE group_id = ?",
                (json.dumps(_means(valid)), self._clock(), "; ".join(reasons) or None, group_id),
            )
            if not valid:
                self._drop(db, group_id, "failed", "no member could be scored: " + "; ".join(reasons))
            elif self._rules.drop_zero_variance and len({s.reward for s in valid}) == 1:
                self._drop(db, group_id, "filtered", "all rewards equal")
            else:
                db.execute("UPDATE groups SET state = 'ready' WHERE group_id = ?", (group_id,))
                self._expire_stale(db, self.current_step)

    def _checked_attempt(self, worker_id: str, group: GroupRollouts) -> sqlite3.Row:
        """The attempt that a post answers; raises BodyError if there was none or it could not have made this."""
        attempt = self._db.row("SELECT * FROM attempts WHERE group_id = ? AND attempt = ?", group.group_id, group.attempt)
        if attempt is None or attempt["worker_id"] != worker_id:
            raise BodyError(f"group {group.group_id} attempt {group.attempt} was never leased to worker {worker_id}")
        members = [r.member for r in group.rollouts] + [f.member for f in group.failures]
        if not all(0 <= m < self._rules.members for m in members):
            raise BodyError(f"group {group.group_id}: members {members} are not within 0 to {self._rules.members - 1}")
        newest = max((int(r.versions.max()) for r in group.rollouts), default=0)
        if newest > self.highest_version:
            raise BodyError(f"group {group.group_id} claims version {newest}, but the newest is {self.highest_version}")
        return attempt

    def _store(self, db: sqlite3.Connection, worker_id: str, group: GroupRollouts, row: sqlite3.Row) -> int:
        """Keep the members that are not there yet; returns their tokens."""
        tokens = 0
        for r in group.rollouts:
            inserted = db.execute(
                "INSERT OR IGNORE INTO rollouts VALUES (?, ?, ?, ?, ?, ?, NULL, ?)",
                (
                    group.group_id,
                    r.member,
                    group.attempt,
                    worker_id,
                    int(r.versions.min()),
                    len(r.token_ids),
                    encode_rollout(r),
                ),
            )
            tokens += len(r.token_ids) * inserted.rowcount
        failed = set(json.loads(row["failed_members"])) | {f.member for f in group.failures}
        reason = "; ".join(sorted({f.reason for f in group.failures})) or row["reason"]
        db.execute(
            "UPDATE groups SET failed_members = ?, reason = ?, tokens = tokens + ?, oldest_version ="
            " (SELECT MIN(oldest_version) FROM rollouts WHERE group_id = groups.group_id) WHERE group_id = ?",
            (json.dumps(sorted(failed)), reason, tokens, group.group_id),
        )
        return tokens

    def _keep_part(self, db: sqlite3.Connection, group: GroupRollouts, row: sqlite3.Row, tokens: int) -> PostOutcome:
        self._end_attempt(db, group.group_id, group.attempt, "part", tokens)
        if row["attempt"] == group.attempt:
            db.execute("UPDATE groups SET worker_id = NULL, deadline_s = NULL WHERE group_id = ?", (group.group_id,))
        return "part"

    def _complete(self, db: sqlite3.Connection, group: GroupRollouts, tokens: int) -> PostOutcome:
        oldest = self._group(group.group_id)["oldest_version"]
        if oldest is None:
            db.execute("UPDATE groups SET failed_members = '[]' WHERE group_id = ?", (group.group_id,))
            self._reopen(db, group.group_id, "engine_failed")
            return "accepted"
        if oldest < oldest_trainable_version(self.current_step, self._rules.staleness_bound):
            self._end_attempt(db, group.group_id, group.attempt, "stale", tokens)
            self._drop(db, group.group_id, "expired", f"version {oldest} at step {self.current_step}")
            return "stale"
        db.execute(
            "UPDATE groups SET state = 'generated', worker_id = NULL, deadline_s = NULL WHERE group_id = ?", (group.group_id,)
        )
        self._end_attempt(db, group.group_id, group.attempt, "posted", tokens)
        return "accepted"

    # --- steps

    def assign(self, step: int) -> list[int] | None:
        """The group ids of the batch for `step`, oldest version first; None while it is not full. Always the same."""
        if step != self.current_step:
            raise UserError(
                f"step {step} was asked for, but the ledger stands at step {self.current_step}: resume from a checkpoint"
            )
        size = self._rules.groups_per_batch
        with self._db.transaction() as db:
            assigned = self._assigned(step)
            if assigned:
                return assigned
            self._expire_stale(db, step)
            rows = self._db.rows(
                "SELECT group_id FROM groups WHERE state = 'ready' AND step IS NULL AND oldest_version <= ?"
                " ORDER BY oldest_version, group_id LIMIT ?",
                step,
                size,
            )
            if len(rows) < size:
                return None
            db.executemany("UPDATE groups SET step = ? WHERE group_id = ?", [(step, r["group_id"]) for r in rows])
            db.execute("UPDATE groups SET step = ? WHERE state = 'filtered' AND step IS NULL", (step,))
        return self._assigned(step)

    def scored_means(self, step: int) -> dict[str, float]:
        """Means over every group scored for `step`, the filtered ones included, and how many there were."""
        rows = self._db.rows("SELECT state, scores FROM groups WHERE step = ? AND scores IS NOT NULL", step)
        scores = [json.loads(r["scores"]) for r in rows]
        names = {name for s in scores for name in s}
        means = {name: _mean([s[name] for s in scores if name in s]) for name in sorted(names)}
        return means | {"groups": len(rows), "filtered": sum(r["state"] == "filtered" for r in rows)}

    def commit(self, step: int, metrics: Mapping[str, float], oldest_checkpoint: int) -> None:
        """Step `step` is done: its groups are trained. Payloads that no kept checkpoint can ask for again are let go."""
        if self._db.row("SELECT 1 FROM steps WHERE step = ?", step):
            return
        if not self._assigned(step):
            raise UserError(f"step {step} was committed without a batch; the ledger stands at step {self.current_step}")
        with self._db.transaction(durable=True) as db:
            db.execute("UPDATE groups SET state = 'trained' WHERE step = ? AND state = 'ready'", (step,))
            db.execute("INSERT INTO steps VALUES (?, ?, ?)", (step, self._clock(), json.dumps(dict(metrics))))
            self._expire_stale(db, step + 1)
            self._prune(db, oldest_checkpoint)

    def resume(self, version: int) -> int:
        """Go back to the moment before step `version`; returns how many steps will be replayed."""
        ahead = self.current_step - version
        if ahead < 0:
            raise UserError(f"the checkpoint holds version {version}, but the ledger only knows {self.current_step} steps")
        with self._db.transaction(durable=True) as db:
            gone = self._db.value(
                "SELECT COUNT(*) FROM rollouts JOIN groups USING (group_id)"
                " WHERE step >= ? AND state = 'trained' AND reward IS NOT NULL AND payload IS NULL",
                version,
            )
            if gone:
                raise UserError(f"{gone} rollouts trained since version {version} are no longer kept: use a newer checkpoint")
            db.execute("UPDATE groups SET state = 'ready' WHERE state = 'trained' AND step >= ?", (version,))
            db.execute("DELETE FROM steps WHERE step >= ?", (version,))
        return ahead

    def _assigned(self, step: int) -> list[int]:
        rows = self._db.rows(
            "SELECT group_id FROM groups WHERE step = ? AND state = 'ready' ORDER BY oldest_version, group_id", step
        )
        return [r["group_id"] for r in rows]

    def _prune(self, db: sqlite3.Connection, oldest_checkpoint: int) -> None:
        pruned = int(self._db.get("payloads_pruned_below_step") or 0)
        if oldest_checkpoint > pruned:
            db.execute(
                "UPDATE rollouts SET payload = NULL WHERE group_id IN"
                " (SELECT group_id FROM groups WHERE step >= ? AND step < ?)",
                (pruned, oldest_checkpoint),
            )
            self._db.set("payloads_pruned_below_step", str(oldest_checkpoint))

    def _expire_stale(self, db: sqlite3.Connection, step: int) -> None:
        """Drop what can no longer be trained; an open lease without tokens stays: its next worker brings a newer version."""
        oldest = oldest_trainable_version(step, self._rules.staleness_bound)
        for row in self._db.rows(
            "SELECT group_id, COALESCE(oldest_version, lease_version) AS version FROM groups"
            " WHERE state IN ('leased', 'generated', 'ready') AND step IS NULL AND COALESCE(oldest_version, lease_version) < ?"
            " AND NOT (state = 'leased' AND worker_id IS NULL AND oldest_version IS NULL)",
            oldest,
        ):
            self._drop(db, row["group_id"], "expired", f"version {row['version']} at step {step}")

    def _drop(self, db: sqlite3.Connection, group_id: int, state: str, reason: str) -> None:
        db.execute("UPDATE groups SET state = ?, reason = ?, worker_id = NULL WHERE group_id = ?", (state, reason, group_id))
        db.execute("UPDATE rollouts SET payload = NULL WHERE group_id = ?", (group_id,))

    def _end_attempt(self, db: sqlite3.Connection, group_id: int, attempt: int, outcome: str, tokens: int) -> None:
        db.execute(
            "UPDATE attempts SET outcome = ?, tokens = tokens + ?, ended_at_s = ? WHERE group_id = ? AND attempt = ?",
            (outcome, tokens, self._clock(), group_id, attempt),
        )

    def _group(self, group_id: int) -> sqlite3.Row:
        row = self._db.row("SELECT * FROM groups WHERE group_id = ?", group_id)
        if row is None:
            raise BodyError(f"group {group_id} was never leased")
        return row

    def _missing_members(self, group_id: int) -> set[int]:
        here = {r["member"] for r in self._db.rows("SELECT member FROM rollouts WHERE group_id = ?", group_id)}
        failed = json.loads(self._group(group_id)["failed_members"])
        return set(range(self._rules.members)) - here - set(failed)


def _means(scores: Sequence[MemberScore]) -> dict[str, float]:
    names = {name for s in scores for name in s.metrics}
    means = {name: _mean([s.metrics[name] for s in scores if name in s.metrics]) for name in sorted(names)}
    return means | {"reward": _mean([s.reward for s in scores if s.reward is not None])}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
