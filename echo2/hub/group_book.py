"""The ledger's rows about groups, and the small moves that all its parts share.

Invariant: every move is made inside a transaction of the caller's.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from echo2.capacity.admission import oldest_trainable_version
from echo2.config import Config
from echo2.config_evaluation import EvaluationSection
from echo2.hub.database import Database
from echo2.hub.evaluation_groups import EvaluationGroups
from echo2.hub.parts import Parts
from echo2.protocol import BodyError, GroupRollouts, Rollout, encode_rollout

NO_EVALUATION = EvaluationSection()
GROUPS_TO_SHOW = 64
"""Newest groups of those that were evaluated, and of those that were dropped, whose tokens stay to be looked at."""


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
    evaluation: EvaluationSection = NO_EVALUATION

    @property
    def evaluation_groups(self) -> EvaluationGroups:
        return EvaluationGroups(self.evaluation.prompts, self.evaluation.samples, self.members)


def means_over(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each figure over those that have it."""
    names = sorted({name for each in scores for name in each})
    return {name: fmean(each[name] for each in scores if name in each) for name in names}


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
        evaluation=config.evaluation,
    )


class GroupBook:
    """Groups, attempts and rollouts. `clock` gives seconds since the epoch; only this clock counts."""

    def __init__(self, database: Database, rules: LedgerRules, clock: Callable[[], float]) -> None:
        self.db = database
        self.rules = rules
        self.clock = clock
        self.parts = Parts(database)

    @property
    def current_step(self) -> int:
        """The step whose batch is being gathered or trained."""
        return self.db.value("SELECT MAX(step) + 1 FROM steps")

    @property
    def highest_version(self) -> int:
        """Newest version ever announced; −1 before the first."""
        return int(self.db.get("highest_version") or -1)

    def live_groups(self) -> int:
        """Groups admitted and not dropped; every committed step trained exactly B of them."""
        waiting = self.db.value(
            "SELECT COUNT(*) FROM groups WHERE state IN ('leased', 'generated', 'ready') AND evaluation IS NULL"
        )
        return self.current_step * self.rules.groups_per_batch + waiting

    def store(self, worker_id: str, group: GroupRollouts, row: sqlite3.Row) -> int:
        """Keep of a post what is not there yet, and count the rest as waste; returns the tokens that were kept."""
        group_id, kept, wasted = group.group_id, 0, 0
        missing = self.missing_members(group_id)
        for rollout in group.rollouts:
            if rollout.member in missing and self._takes(group, rollout, row):
                kept += self._keep(worker_id, group, rollout)
            elif not self._is_repeated(group, rollout):
                wasted += len(rollout.token_ids)
        failed = set(json.loads(row["failed_members"])) | {f.member for f in group.failures if f.member in missing}
        reason = "; ".join(sorted({f.reason for f in group.failures})) or row["reason"]
        given_up = sum(self._give_up(group_id, f.member) for f in group.failures)
        self.count_tokens(group_id, group.attempt, kept, wasted)
        self.db.execute(
            "UPDATE groups SET failed_members = ?, reason = ?, tokens = tokens + ?, oldest_version ="
            " (SELECT MIN(oldest_version) FROM (SELECT oldest_version FROM rollouts WHERE group_id = groups.group_id"
            " UNION ALL SELECT oldest_version FROM parts WHERE group_id = groups.group_id)) WHERE group_id = ?",
            (json.dumps(sorted(failed)), reason, kept - given_up, group_id),
        )
        return kept

    def _takes(self, group: GroupRollouts, rollout: Rollout, row: sqlite3.Row) -> bool:
        """Whether a missing member goes on with this: a part of it only from the newest attempt, its end from any."""
        newest = group.attempt == row["attempt"]
        return (newest or rollout.finish_reason is not None) and self.parts.fits(group.group_id, group.attempt, rollout)

    def _keep(self, worker_id: str, group: GroupRollouts, rollout: Rollout) -> int:
        """Add what is new of a rollout; gives its tokens."""
        new = self.parts.new_of(group.group_id, rollout)
        if new is None:
            return 0
        if new.finish_reason is None:
            self.parts.keep(group.group_id, group.attempt, new)
            return len(new.token_ids)
        whole = self.parts.joined(group.group_id, new)
        self.parts.forget(group.group_id, rollout.member)
        self.db.execute(
            "INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?, NULL, ?)",
            (
                group.group_id,
                whole.member,
                group.attempt,
                worker_id,
                int(whole.versions.min()),
                int(whole.versions.max()),
                len(whole.token_ids),
                encode_rollout(whole),
            ),
        )
        return len(new.token_ids)

    def _is_repeated(self, group: GroupRollouts, rollout: Rollout) -> bool:
        """Whether this very attempt has finished the member already."""
        place = (group.group_id, rollout.member, group.attempt)
        return self.db.row("SELECT 1 FROM rollouts WHERE group_id = ? AND member = ? AND attempt = ?", *place) is not None

    def _give_up(self, group_id: int, member: int) -> int:
        """The member failed: what was kept of it is waste; gives its tokens."""
        tokens = self.parts.forget(group_id, member)
        for attempt, count in tokens.items():
            self.count_tokens(group_id, attempt, -count, count)
        return sum(tokens.values())

    def expire_stale(self, step: int) -> None:
        """Drop what can no longer be trained; an open lease without tokens stays: its next worker brings a newer version."""
        oldest = oldest_trainable_version(step, self.rules.staleness_bound)
        for row in self.db.rows(
            "SELECT group_id, COALESCE(oldest_version, lease_version) AS version FROM groups"
            " WHERE state IN ('leased', 'generated', 'ready') AND step IS NULL AND evaluation IS NULL"
            " AND COALESCE(oldest_version, lease_version) < ?"
            " AND NOT (state = 'leased' AND worker_id IS NULL AND oldest_version IS NULL)",
            oldest,
        ):
            self.drop(row["group_id"], "expired", f"version {row['version']} at step {step}")

    def drop(self, group_id: int, state: str, reason: str) -> None:
        self.db.execute(
            "UPDATE groups SET state = ?, reason = ?, worker_id = NULL WHERE group_id = ?", (state, reason, group_id)
        )
        self.keep_to_show(group_id, "dropped")
        self.parts.forget(group_id)

    def keep_to_show(self, group_id: int, kind: str) -> None:
        """Nothing needs the group's tokens any more: they are there to be looked at until enough of its kind are newer."""
        if not self.db.row("SELECT 1 FROM rollouts WHERE group_id = ? AND payload IS NOT NULL", group_id):
            return
        key = f"{kind}_groups_to_show"
        *older, last = [*json.loads(self.db.get(key) or "[]"), group_id][-GROUPS_TO_SHOW - 1 :]
        if len(older) == GROUPS_TO_SHOW:
            self.db.execute("UPDATE rollouts SET payload = NULL WHERE group_id = ?", (older.pop(0),))
        self.db.set(key, json.dumps([*older, last]))

    def end_attempt(self, group_id: int, attempt: int, outcome: str) -> None:
        self.db.execute(
            "UPDATE attempts SET outcome = ?, ended_at_s = ? WHERE group_id = ? AND attempt = ?",
            (outcome, self.clock(), group_id, attempt),
        )

    def count_tokens(self, group_id: int, attempt: int, kept: int, wasted: int) -> None:
        """Tokens that the attempt handed in: kept in the group, or of no use."""
        self.db.execute(
            "UPDATE attempts SET tokens = tokens + ?, wasted_tokens = wasted_tokens + ? WHERE group_id = ? AND attempt = ?",
            (kept, wasted, group_id, attempt),
        )

    def group(self, group_id: int) -> sqlite3.Row:
        row = self.db.row("SELECT * FROM groups WHERE group_id = ?", group_id)
        if row is None:
            raise BodyError(f"group {group_id} was never leased")
        return row

    def members_of(self, row: sqlite3.Row) -> int:
        """How many members the group of this row is to have."""
        return self.rules.members if row["evaluation"] is None else self.rules.evaluation_groups.size(row["group_id"])

    def missing_members(self, group_id: int) -> set[int]:
        here = {r["member"] for r in self.db.rows("SELECT member FROM rollouts WHERE group_id = ?", group_id)}
        row = self.group(group_id)
        return set(range(self.members_of(row))) - here - set(json.loads(row["failed_members"]))
