"""Evaluations: groups with held-out prompts that the workers generate like others, and that no batch ever takes.

Invariants: an evaluation is of one version, and only workers that hold it or a newer one take part; one goes on at a time, and
the next one cuts it short; its groups are leased, lost, posted and scored as others are, so it survives what they survive;
they are no live groups, so admission does not see them; its figures are told at one step, also where that step is replayed.
"""

from __future__ import annotations

import json
from collections import defaultdict

from echo2.hub.evaluation_figures import PromptResult, figures_of
from echo2.hub.group_book import GroupBook, means_over


class Evaluations:
    """The evaluations of a run, within the ledger's transactions."""

    def __init__(self, book: GroupBook) -> None:
        self._book = book
        self._db = book.db
        self._settings = book.rules.evaluation
        self._groups = book.rules.evaluation_groups
        self._due_slots = 0.0

    def open_if_due(self, version: int) -> int | None:
        """Begin the evaluation of `version` if it is due and was not begun; returns the version of the one it cuts short."""
        if not self._settings.is_due(version, self._book.rules.total_steps):
            return None
        if self._db.row("SELECT 1 FROM evaluations WHERE version = ?", version):
            return None
        overtaken = self._db.row("SELECT version FROM evaluations WHERE figures IS NULL")
        if overtaken:
            self._close(overtaken["version"], f"overtaken by the evaluation of version {version}")
        now = self._book.clock()
        self._db.execute("INSERT INTO evaluations VALUES (?, ?, NULL, NULL)", (version, now))
        # A resume may have taken back an evaluation of this version, whose groups are begun anew.
        self._db.executemany(
            "INSERT INTO groups (group_id, state, attempt, lease_version, leased_at_s, evaluation)"
            " VALUES (?, 'leased', 0, ?, ?, ?) ON CONFLICT (group_id) DO UPDATE SET state = 'leased', worker_id = NULL,"
            " failed_members = '[]', oldest_version = NULL, tokens = 0, reason = NULL, scores = NULL, scored_at_s = NULL",
            [(group_id, version, now, version) for group_id in self._groups.of_version(version)],
        )
        return overtaken["version"] if overtaken else None

    def waiting(self, version: int, limit: int) -> list[int]:
        """Up to `limit` groups that nobody works at and that a worker which holds `version` may take."""
        rows = self._db.rows(
            "SELECT group_id FROM groups WHERE state = 'leased' AND worker_id IS NULL"
            " AND evaluation = (SELECT version FROM evaluations WHERE figures IS NULL AND version <= ?)"
            " ORDER BY group_id LIMIT ?",
            version,
            limit,
        )
        return [row["group_id"] for row in rows]

    def claim(self, limit: int) -> int:
        """How many of `limit` slots come to the evaluation before training has what it can use; over many calls, its share."""
        self._due_slots += self._settings.share * limit
        whole = int(self._due_slots)
        self._due_slots -= whole
        return whole

    def settle(self) -> bool:
        """Give the evaluation that goes on its figures once no group of it is left; whether that happened."""
        with self._db.transaction():
            row = self._db.row("SELECT * FROM evaluations WHERE figures IS NULL")
            if row is None or self._db.row(
                "SELECT 1 FROM groups WHERE evaluation = ? AND state IN ('leased', 'generated')", row["version"]
            ):
                return False
            figures = self._figures(row["version"], row["opened_at_s"])
            self._db.execute("UPDATE evaluations SET figures = ? WHERE version = ?", (json.dumps(figures), row["version"]))
        return True

    def tell(self, step: int) -> None:
        """The oldest figures that were not told yet become those of `step`."""
        self._db.execute(
            "UPDATE evaluations SET step = ? WHERE version ="
            " (SELECT MIN(version) FROM evaluations WHERE figures IS NOT NULL AND step IS NULL)",
            (step,),
        )

    def told(self, step: int) -> dict[str, float]:
        """The figures that are told at `step`."""
        row = self._db.row("SELECT figures FROM evaluations WHERE step = ? ORDER BY version DESC", step)
        return json.loads(row["figures"]) if row else {}

    def take(self, version: int) -> dict[str, float] | None:
        """The figures of `version`, told now at the current step; None while it goes on or has not begun."""
        with self._db.transaction():
            row = self._db.row("SELECT figures FROM evaluations WHERE version = ? AND figures IS NOT NULL", version)
            if row is None:
                return None
            self._db.execute("UPDATE evaluations SET step = ? WHERE version = ?", (self._book.current_step, version))
        return json.loads(row["figures"])

    def resume(self, version: int) -> None:
        """The learner goes on from `version`: what newer ones were like is taken back."""
        for row in self._db.rows("SELECT version FROM evaluations WHERE version > ?", version):
            self._close(row["version"], f"the learner resumed from version {version}")

    def _close(self, version: int, reason: str) -> None:
        """Give up an evaluation with all that is left of it."""
        for row in self._db.rows(
            "SELECT group_id FROM groups WHERE evaluation = ? AND state IN ('leased', 'generated', 'evaluated')", version
        ):
            self._book.drop(row["group_id"], "expired", reason)
        self._db.execute(
            "DELETE FROM rollouts WHERE group_id IN (SELECT group_id FROM groups WHERE evaluation = ?)", (version,)
        )
        self._db.execute("DELETE FROM evaluations WHERE version = ?", (version,))

    def _figures(self, version: int, opened_at_s: float) -> dict[str, float]:
        """Of the evaluation of `version`, of which nothing is left to do."""
        rewards: dict[int, list[float]] = defaultdict(list)
        scores: dict[int, list[dict[str, float]]] = defaultdict(list)
        for row in self._db.rows(
            "SELECT group_id, reward, scores FROM rollouts JOIN groups USING (group_id)"
            " WHERE evaluation = ? AND state = 'evaluated' AND reward IS NOT NULL",
            version,
        ):
            place = self._groups.place(row["group_id"])
            rewards[place].append(row["reward"])
            scores[place].append(json.loads(row["scores"]))
        results = [PromptResult(rewards[place], means_over(scores[place])) for place in rewards]
        figures = figures_of(results, self._settings)
        return figures | {"eval/version": float(version)} | self._versions(version) | self._cost(version, opened_at_s)

    def _versions(self, version: int) -> dict[str, float]:
        """From which version to which the tokens are that were scored."""
        row = self._db.row(
            "SELECT MIN(rollouts.oldest_version) AS oldest, MAX(newest_version) AS newest FROM rollouts"
            " JOIN groups USING (group_id) WHERE evaluation = ? AND state = 'evaluated' AND reward IS NOT NULL",
            version,
        )
        if row is None or row["oldest"] is None:
            return {}
        return {"eval/oldest_version": float(row["oldest"]), "eval/newest_version": float(row["newest"])}

    def _cost(self, version: int, opened_at_s: float) -> dict[str, float]:
        """How long it took, and its share of the tokens of all groups that were scored meanwhile."""
        row = self._db.row(
            "SELECT SUM(tokens) AS everything, SUM(CASE WHEN evaluation = ? THEN tokens END) AS own"
            " FROM groups WHERE scored_at_s >= ?",
            version,
            opened_at_s,
        )
        share = (row["own"] or 0) / row["everything"] if row and row["everything"] else 0.0
        return {"eval/duration_s": self._book.clock() - opened_at_s, "eval/token_share": share}
