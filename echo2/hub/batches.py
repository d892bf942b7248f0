"""The batches of the learner's steps, from assignment to training, and back again when the learner resumes.

Invariants: a step's batch is assigned once and kept, so a learner that comes back from an older checkpoint is given the same
batches again and its replay repeats what was lost; no group with staleness > S is assigned; payloads are kept for as long as a
checkpoint that the run may go on from can ask for them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping

from echo2.errors import UserError
from echo2.hub.group_book import GroupBook


class Batches:
    """Which groups train at which step."""

    def __init__(self, book: GroupBook) -> None:
        self._book = book
        self._db = book.db

    def assign(self, step: int) -> list[int] | None:
        """The group ids of the batch for `step`, oldest version first; None while it is not full. Always the same."""
        if step != self._book.current_step:
            raise UserError(
                f"step {step} was asked for, but the ledger stands at step {self._book.current_step}: resume from a checkpoint"
            )
        size = self._book.rules.groups_per_batch
        with self._db.transaction():
            assigned = self._assigned(step)
            if assigned:
                return assigned
            self._book.expire_stale(step)
            rows = self._db.rows(
                "SELECT group_id FROM groups WHERE state = 'ready' AND step IS NULL AND oldest_version <= ?"
                " ORDER BY oldest_version, group_id LIMIT ?",
                step,
                size,
            )
            if len(rows) < size:
                return None
            self._db.executemany("UPDATE groups SET step = ? WHERE group_id = ?", [(step, r["group_id"]) for r in rows])
            self._db.execute("UPDATE groups SET step = ? WHERE state = 'filtered' AND step IS NULL", (step,))
        return self._assigned(step)

    def scored_means(self, step: int) -> dict[str, float]:
        """Means over every group scored for `step`, the filtered ones included, and how many there were."""
        rows = self._db.rows("SELECT state, scores FROM groups WHERE step = ? AND scores IS NOT NULL", step)
        scores = [json.loads(r["scores"]) for r in rows]
        names = {name for s in scores for name in s}
        means = {name: statistics.fmean(s[name] for s in scores if name in s) for name in sorted(names)}
        return means | {"groups": len(rows), "filtered": sum(r["state"] == "filtered" for r in rows)}

    def commit(self, step: int, metrics: Mapping[str, float], oldest_checkpoint: int) -> None:
        """Step `step` is done: its groups are trained. Payloads that no kept checkpoint can ask for again are let go."""
        if self._db.row("SELECT 1 FROM steps WHERE step = ?", step):
            return
        if not self._assigned(step):
            raise UserError(f"step {step} was committed without a batch; the ledger stands at step {self._book.current_step}")
        with self._db.transaction(durable=True):
            self._db.execute("UPDATE groups SET state = 'trained' WHERE step = ? AND state = 'ready'", (step,))
            self._db.execute("INSERT INTO steps VALUES (?, ?, ?)", (step, self._book.clock(), json.dumps(dict(metrics))))
            self._book.expire_stale(step + 1)
            self._prune(oldest_checkpoint)

    def resume(self, version: int) -> int:
        """Go back to the moment before step `version`; returns how many steps will be replayed."""
        ahead = self._book.current_step - version
        if ahead < 0:
            raise UserError(
                f"the checkpoint holds version {version}, but the ledger only knows {self._book.current_step} steps"
            )
        with self._db.transaction(durable=True):
            gone = self._db.value(
                "SELECT COUNT(*) FROM rollouts JOIN groups USING (group_id)"
                " WHERE step >= ? AND state = 'trained' AND reward IS NOT NULL AND payload IS NULL",
                version,
            )
            if gone:
                raise UserError(
                    f"{gone} rollouts trained since version {version} are no longer kept: "
                    "restore a newer checkpoint or start another run"
                )
            self._db.execute("UPDATE groups SET state = 'ready' WHERE state = 'trained' AND step >= ?", (version,))
            self._db.execute("DELETE FROM steps WHERE step >= ?", (version,))
        return ahead

    def _assigned(self, step: int) -> list[int]:
        rows = self._db.rows(
            "SELECT group_id FROM groups WHERE step = ? AND state = 'ready' ORDER BY oldest_version, group_id", step
        )
        return [r["group_id"] for r in rows]

    def _prune(self, oldest_checkpoint: int) -> None:
        pruned = int(self._db.get("payloads_pruned_below_step") or 0)
        if oldest_checkpoint > pruned:
            self._db.execute(
                "UPDATE rollouts SET payload = NULL WHERE group_id IN"
                " (SELECT group_id FROM groups WHERE step >= ? AND step < ?)",
                (pruned, oldest_checkpoint),
            )
            self._db.set("payloads_pruned_below_step", str(oldest_checkpoint))
