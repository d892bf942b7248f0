"""What the ledger says about the run so far: counts, rates, waste, and the measured terms of the capacity model."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from echo2.hub.database import Database
from echo2.protocol import Telemetry

RATE_WINDOW_S = 30.0
STATES = ("leased", "generated", "ready", "trained", "filtered", "expired", "failed")
WASTED = ("late", "stale")


class Statistics:
    """Read-only views of the ledger."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._db = database
        self._clock = clock

    def groups_by_state(self) -> dict[str, int]:
        counts = {r["state"]: r["n"] for r in self._db.rows("SELECT state, COUNT(*) AS n FROM groups GROUP BY state")}
        return {state: counts.get(state, 0) for state in STATES}

    def wasted_tokens(self) -> dict[str, int]:
        """Tokens that were generated and will not be trained, by cause; filtered ones taught that a prompt teaches nothing."""
        wasted = {
            r["outcome"]: r["tokens"]
            for r in self._db.rows("SELECT outcome, SUM(tokens) AS tokens FROM attempts GROUP BY outcome")
            if r["outcome"] in WASTED
        }
        dropped = self._db.rows(
            "SELECT state, SUM(tokens) AS tokens FROM groups WHERE state IN ('filtered', 'expired', 'failed') GROUP BY state"
        )
        return wasted | {r["state"]: r["tokens"] for r in dropped}

    def rollouts_per_s(self) -> float:
        """Scored members per second over the last half minute."""
        since = self._clock() - RATE_WINDOW_S
        count = self._db.value(
            "SELECT COUNT(reward) FROM groups JOIN rollouts USING (group_id) WHERE groups.scored_at_s > ?", since
        )
        first = self._db.row("SELECT MIN(leased_at_s) AS at FROM groups")
        began = first["at"] if first and first["at"] is not None else self._clock()
        return count / max(1.0, min(RATE_WINDOW_S, self._clock() - began))

    def step_metrics(self) -> list[dict[str, float]]:
        """The metrics of every committed step, in order, each with its `step`."""
        rows = self._db.rows("SELECT step, metrics FROM steps ORDER BY step")
        return [json.loads(r["metrics"]) | {"step": r["step"]} for r in rows]

    def last_metrics(self) -> dict[str, float]:
        row = self._db.row("SELECT step, metrics FROM steps ORDER BY step DESC LIMIT 1")
        return json.loads(row["metrics"]) | {"step": row["step"]} if row else {}

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

    def measured_terms(self) -> Mapping[str, float]:
        """Terms of the capacity model by their config names, as far as the run has measured them.

        T is the median step; L the median over steps of a batch's slowest group, from lease to score; α the share of groups
        trained among those settled; μ the sum of the workers' groups per second while generating; D_tx the mean transfer and
        D_fix the rest of the mean time from publication to load.
        """
        terms: dict[str, float] = {}
        steps = [m["learner/step_s"] for m in self.step_metrics() if "learner/step_s" in m]
        if steps:
            terms["learner_step_s"] = statistics.median(steps)
        slowest = self._db.rows(
            "SELECT MAX(scored_at_s - leased_at_s) AS s FROM groups WHERE state = 'trained' GROUP BY step ORDER BY step"
        )
        if slowest:
            terms["group_latency_s"] = statistics.median(r["s"] for r in slowest)
        counts = self.groups_by_state()
        settled = sum(counts[s] for s in ("trained", "filtered", "expired", "failed"))
        if counts["trained"]:
            terms["accepted_share"] = counts["trained"] / settled
        return terms | self._pool_terms() | self._dissemination_terms()

    def _pool_terms(self) -> dict[str, float]:
        speeds = []
        for row in self._db.rows("SELECT telemetry FROM workers WHERE state IN ('live', 'left')"):
            speeds.append(Telemetry.model_validate_json(row["telemetry"]).groups_per_s)
        return {"groups_per_s": sum(speeds)} if any(speeds) else {}

    def _dissemination_terms(self) -> dict[str, float]:
        exports = [m["dissemination/export_s"] for m in self.step_metrics() if "dissemination/export_s" in m]
        loads = self._db.rows("SELECT loaded_at_s - announced_at_s AS latency_s, fetch_s FROM disseminations WHERE version > 0")
        if not loads:
            return {}
        transfer_s = statistics.mean(r["fetch_s"] for r in loads)
        latency_s = statistics.mean(max(0.0, r["latency_s"]) for r in loads) + (statistics.mean(exports) if exports else 0.0)
        return {"transfer_s": transfer_s, "dissemination_fixed_s": max(0.0, latency_s - transfer_s)}
