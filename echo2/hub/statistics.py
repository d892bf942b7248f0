"""What the ledger says about the run so far: counts, rates, waste, and what the capacity model is calibrated with."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from echo2.capacity.calibration import GroupTime, Load, Observations, StepTime
from echo2.capacity.transfer import SeenLinks
from echo2.hub.database import Database
from echo2.hub.evaluation_groups import FIRST_EVALUATION_GROUP
from echo2.protocol import Telemetry

RATE_WINDOW_S = 30.0
STATES = ("leased", "generated", "ready", "trained", "filtered", "expired", "failed")

NEWEST_STEPS = 128
NEWEST_GROUPS = 2048
NEWEST_LOADS = 512
"""What a calibration looks back on: four half-lives of its weights."""


class Statistics:
    """Read-only views of the ledger."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._db = database
        self._clock = clock

    def groups_by_state(self) -> dict[str, int]:
        """Of the groups that are to be trained."""
        counts = {
            r["state"]: r["n"]
            for r in self._db.rows("SELECT state, COUNT(*) AS n FROM groups WHERE evaluation IS NULL GROUP BY state")
        }
        return {state: counts.get(state, 0) for state in STATES}

    def wasted_tokens(self) -> dict[str, int]:
        """Tokens that were generated and will not be trained, by cause; filtered ones taught that a prompt teaches nothing.

        What was `lost` with a worker is what its last heartbeat said that it had not handed in.
        """
        wasted = {
            "late": self._db.value("SELECT SUM(wasted_tokens) FROM attempts WHERE outcome != 'stale'"),
            "stale": self._db.value("SELECT SUM(wasted_tokens) FROM attempts WHERE outcome = 'stale'"),
            "lost": self._db.value("SELECT SUM(json_extract(telemetry, '$.open_tokens')) FROM workers WHERE state = 'lost'"),
        }
        dropped = self._db.rows(
            "SELECT state, SUM(tokens) AS tokens FROM groups WHERE state IN ('filtered', 'expired', 'failed')"
            " AND evaluation IS NULL GROUP BY state"
        )
        return {cause: tokens for cause, tokens in wasted.items() if tokens} | {r["state"]: r["tokens"] for r in dropped}

    def quiet_s(self, timeout_s: float) -> float | None:
        """Seconds since the last sign of life, if more than `timeout_s`: then the run is over, or waits for workers."""
        newest_s = self._db.value(
            "SELECT MAX(at) FROM (SELECT MAX(last_seen_at_s) AS at FROM workers UNION ALL SELECT MAX(finished_at_s) FROM steps"
            " UNION ALL SELECT MAX(scored_at_s) FROM groups UNION ALL SELECT MAX(at_s) FROM events)"
        )
        silence_s = self._clock() - newest_s
        return silence_s if newest_s and silence_s > timeout_s else None

    def rollouts_per_s(self, quiet: bool = False) -> float:
        """Scored members to train per second over the last half minute; in a `quiet` run the one that its last scores ended."""
        ended = self._clock()
        if quiet:
            ended = self._db.value("SELECT MAX(scored_at_s) FROM groups") or ended
        count = self._db.value(
            "SELECT COUNT(reward) FROM groups JOIN rollouts USING (group_id) WHERE groups.scored_at_s > ?"
            " AND evaluation IS NULL",
            ended - RATE_WINDOW_S,
        )
        began = self._db.value("SELECT MIN(leased_at_s) FROM groups") or ended
        return count / max(1.0, min(RATE_WINDOW_S, ended - began))

    def step_metrics(self) -> list[dict[str, float]]:
        """The metrics of every committed step, in order, each with its `step`."""
        rows = self._db.rows("SELECT step, metrics FROM steps ORDER BY step")
        return [json.loads(r["metrics"]) | {"step": r["step"]} for r in rows]

    def last_metrics(self) -> dict[str, float]:
        row = self._db.row("SELECT step, metrics FROM steps ORDER BY step DESC LIMIT 1")
        return json.loads(row["metrics"]) | {"step": row["step"]} if row else {}

    def evaluations(self) -> list[dict[str, float]]:
        """The figures of every evaluation that came to its end, by version."""
        rows = self._db.rows("SELECT figures FROM evaluations WHERE figures IS NOT NULL ORDER BY version")
        return [json.loads(r["figures"]) for r in rows]

    def max_trained_staleness(self) -> int | None:
        row = self._db.row("SELECT MAX(step - oldest_version) AS s FROM groups WHERE state = 'trained'")
        return row["s"] if row else None

    def versions_loaded(self) -> int:
        """Versions that at least one worker generated with."""
        return self._db.value("SELECT COUNT(DISTINCT version) FROM disseminations")

    def workers_seen(self) -> int:
        """Workers that delivered at least one rollout."""
        return self._db.value(
            "SELECT COUNT(DISTINCT name) FROM workers WHERE EXISTS"
            " (SELECT 1 FROM attempts WHERE attempts.worker_id = workers.worker_id AND outcome IN ('posted', 'part'))"
        )

    def events(self, limit: int = 20) -> list[dict[str, Any]]:
        """The newest events, newest first."""
        return [dict(r) for r in self._db.rows("SELECT * FROM events ORDER BY at_s DESC LIMIT ?", limit)]

    def observations(self, silence_s: float, since_s: float = 0.0) -> Observations:
        """What the newest steps, groups and snapshots say about the capacity model's terms, from `since_s` on.

        A worker that was silent for `silence_s` while others were heard does not count as there. Bounded in time and memory,
        however long the run.
        """
        steps = self._newest_steps()
        groups, accepted = self._groups_since(since_s)
        workers = self._db.rows("SELECT worker_id, state, last_seen_at_s, telemetry FROM workers")
        return Observations(
            steps=[step for step in steps if step.finished_at_s > since_s],
            groups=groups,
            accepted=accepted,
            loads=self._loads_since(since_s, {step.step: step for step in steps}),
            broadcasts_s=self._broadcasts_s(),
            links=self._links(),
            workers=_present(workers, silence_s, steps[-1].finished_at_s if steps else 0.0),
        )

    def _newest_steps(self) -> list[StepTime]:
        rows = self._db.rows(
            "SELECT step, finished_at_s, json_extract(metrics, '$.\"learner/step_s\"') AS work_s,"
            " json_extract(metrics, '$.\"learner/wait_s\"') AS wait_s FROM steps ORDER BY step DESC LIMIT ?",
            NEWEST_STEPS,
        )
        timed = [r for r in reversed(rows) if r["work_s"] is not None and r["wait_s"] is not None]
        return [StepTime(r["step"], r["finished_at_s"], r["work_s"], r["wait_s"]) for r in timed]

    def _broadcasts_s(self) -> dict[int, float]:
        """Seconds until the last worker had it, of each version that the newest steps tell the broadcast of."""
        rows = self._db.rows(
            "SELECT json_extract(metrics, '$.\"dissemination/version\"') AS version,"
            " json_extract(metrics, '$.\"dissemination/last_s\"') AS last_s FROM steps ORDER BY step DESC LIMIT ?",
            NEWEST_STEPS,
        )
        return {int(r["version"]): r["last_s"] for r in rows if r["version"] is not None and r["last_s"] is not None}

    def _links(self) -> SeenLinks:
        """As the newest step that published tells of them."""
        row = self._db.row(
            "SELECT metrics FROM steps WHERE json_extract(metrics, '$.\"dissemination/full_bytes\"') IS NOT NULL"
            " ORDER BY step DESC LIMIT 1"
        )
        metrics = json.loads(row["metrics"]) if row else {}
        return SeenLinks(
            full_bytes=metrics.get("dissemination/full_bytes"),
            delta_bytes=metrics.get("dissemination/delta_bytes"),
            source_bytes_per_s=metrics.get("dissemination/source_uplink_bytes_per_s"),
            worker_bytes_per_s=metrics.get("dissemination/worker_uplink_bytes_per_s"),
        )

    def _groups_since(self, since_s: float) -> tuple[list[GroupTime], list[bool]]:
        """Times of the groups that were scored, and whether each was accepted, unless it only grew too old; both by time."""
        newest = self._db.value("SELECT MAX(group_id) FROM groups WHERE group_id < ?", FIRST_EVALUATION_GROUP)
        rows = self._db.rows(
            "SELECT state, scored_at_s, attempts.worker_id AS worker_id, attempts.leased_at_s AS leased_at_s, ended_at_s,"
            " outcome FROM groups LEFT JOIN attempts USING (group_id, attempt) WHERE group_id > ? AND evaluation IS NULL"
            " AND state IN ('ready', 'trained', 'filtered', 'expired', 'failed')"
            " AND COALESCE(scored_at_s, groups.leased_at_s) > ? ORDER BY COALESCE(scored_at_s, groups.leased_at_s)",
            newest - NEWEST_GROUPS,
            since_s,
        )
        times = [
            GroupTime(r["worker_id"], r["leased_at_s"], r["ended_at_s"], r["scored_at_s"])
            for r in rows
            if r["outcome"] == "posted" and r["scored_at_s"] is not None
        ]
        return times, [r["state"] in ("ready", "trained") for r in rows if r["state"] != "expired"]

    def _loads_since(self, since_s: float, steps: Mapping[int, StepTime]) -> list[Load]:
        """Loads of versions that these steps made, without those from before a resume."""
        rows = self._db.rows(
            "SELECT version, fetch_s, loaded_at_s FROM disseminations ORDER BY rowid DESC LIMIT ?", NEWEST_LOADS
        )
        loads = []
        for row in reversed(rows):
            made = steps.get(row["version"] - 1)
            if made and row["loaded_at_s"] > max(since_s, made.finished_at_s - made.work_s):
                loads.append(Load(row["version"], row["fetch_s"], max(0.0, row["loaded_at_s"] - made.finished_at_s)))
        return loads


def _present(workers: Sequence[sqlite3.Row], silence_s: float, last_step_at_s: float) -> list[str]:
    """Ids of the workers that generate: the live ones that are not silent, or at the end of a run those that were there."""
    newest_s = max((worker["last_seen_at_s"] for worker in workers), default=0.0)
    loaded = [w for w in workers if Telemetry.model_validate_json(w["telemetry"]).version is not None]
    live = [w["worker_id"] for w in loaded if w["state"] == "live" and w["last_seen_at_s"] > newest_s - silence_s]
    return live or [w["worker_id"] for w in loaded if w["state"] == "left" and w["last_seen_at_s"] >= last_step_at_s]
