"""Who works for the run, what they hold, and what they cost.

Invariants: only the hub's clock counts, so a worker whose clock is wrong stays alive; a worker is lost after it was silent for
the heartbeat time-out, never because it was busy; every paid interval runs from launch to termination.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from echo2.errors import UserError
from echo2.hub.database import Database
from echo2.protocol import Telemetry


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker as the hub last heard of it."""

    worker_id: str
    name: str
    state: str
    silent_s: float
    telemetry: Telemetry


class Roster:
    """Workers, the snapshots that they loaded, paid intervals and events."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._db = database
        self._clock = clock

    def register(self, name: str) -> tuple[str, list[str]]:
        """Enter a worker; returns its new id and the ids under which the same name was live before (now lost)."""
        worker_id = f"{name}-{secrets.token_hex(3)}"
        now = self._clock()
        with self._db.transaction():
            former = [
                r["worker_id"] for r in self._db.rows("SELECT worker_id FROM workers WHERE name = ? AND state = 'live'", name)
            ]
            self._db.execute("UPDATE workers SET state = 'lost' WHERE name = ? AND state = 'live'", (name,))
            self._db.execute(
                "INSERT INTO workers VALUES (?, ?, 'live', ?, ?, ?)", (worker_id, name, now, now, Telemetry().model_dump_json())
            )
        self.note("worker registered", worker_id, "")
        return worker_id, former

    def heartbeat(self, worker_id: str, telemetry: Telemetry) -> None:
        """The worker is alive. Raises UserError for one that the hub does not know or has given up."""
        row = self._db.row("SELECT state FROM workers WHERE worker_id = ?", worker_id)
        if row is None or row["state"] != "live":
            state = row["state"] if row else "unknown"
            raise UserError(f"worker {worker_id} is {state} to this hub: register again")
        with self._db.transaction():
            self._db.execute(
                "UPDATE workers SET last_seen_at_s = ?, telemetry = ? WHERE worker_id = ?",
                (self._clock(), telemetry.model_dump_json(), worker_id),
            )

    def is_live(self, worker_id: str) -> bool:
        return self._db.row("SELECT 1 FROM workers WHERE worker_id = ? AND state = 'live'", worker_id) is not None

    def leave(self, worker_id: str) -> None:
        """The worker said good-bye."""
        with self._db.transaction():
            self._db.execute(
                "UPDATE workers SET state = 'left', last_seen_at_s = ? WHERE worker_id = ?", (self._clock(), worker_id)
            )
        self.note("worker left", worker_id, "")

    def lose_silent(self, timeout_s: float) -> list[str]:
        """Mark as lost who was silent for longer than `timeout_s`; returns their ids."""
        with self._db.transaction():
            rows = self._db.rows(
                "SELECT worker_id FROM workers WHERE state = 'live' AND last_seen_at_s < ?", self._clock() - timeout_s
            )
            silent = [r["worker_id"] for r in rows]
            self._db.executemany("UPDATE workers SET state = 'lost' WHERE worker_id = ?", [(w,) for w in silent])
        for worker_id in silent:
            self.note("worker lost", worker_id, f"silent for more than {timeout_s:g} s")
        return silent

    def forgive_silence(self) -> None:
        """The hub itself was away: nobody's silence during that time counts."""
        with self._db.transaction():
            self._db.execute("UPDATE workers SET last_seen_at_s = ? WHERE state = 'live'", (self._clock(),))

    def live_workers(self) -> list[WorkerRecord]:
        now = self._clock()
        return [
            WorkerRecord(
                r["worker_id"],
                r["name"],
                r["state"],
                max(0.0, now - r["last_seen_at_s"]),
                Telemetry.model_validate_json(r["telemetry"]),
            )
            for r in self._db.rows("SELECT * FROM workers WHERE state = 'live' ORDER BY name")
        ]

    # --- dissemination

    def record_load(self, worker_id: str, version: int, snapshot_id: str, announced_at_s: float, fetch_s: float) -> None:
        """A worker generates with `version` from now on."""
        with self._db.transaction():
            self._db.execute(
                "INSERT OR IGNORE INTO disseminations VALUES (?, ?, ?, ?, ?, ?)",
                (version, snapshot_id, announced_at_s, worker_id, self._clock(), fetch_s),
            )

    def receivers(self, version: int) -> set[str]:
        """Live workers that generate with `version` or a newer one."""
        return {w.worker_id for w in self.live_workers() if w.telemetry.version is not None and w.telemetry.version >= version}

    # --- money

    def open_interval(self, name: str, offer: str, price_usd_per_hour: float) -> None:
        """A worker was launched and is paid for from now on; said again, it changes nothing."""
        with self._db.transaction():
            if not self._db.rows("SELECT 1 FROM paid_intervals WHERE name = ? AND terminated_at_s IS NULL", name):
                self._db.execute(
                    "INSERT INTO paid_intervals VALUES (?, ?, ?, ?, NULL)", (name, offer, price_usd_per_hour, self._clock())
                )

    def close_interval(self, name: str) -> None:
        """The worker was terminated: nothing more is paid for it."""
        with self._db.transaction():
            self._db.execute(
                "UPDATE paid_intervals SET terminated_at_s = ? WHERE name = ? AND terminated_at_s IS NULL",
                (self._clock(), name),
            )

    def cost_usd(self) -> float:
        """Money over all intervals, the open ones up to now."""
        now = self._clock()
        return sum(
            r["price_usd_per_hour"] * max(0.0, (r["terminated_at_s"] or now) - r["launched_at_s"]) / 3600
            for r in self._db.rows("SELECT * FROM paid_intervals")
        )

    # --- events

    def note(self, kind: str, subject: str, detail: str | dict) -> None:
        """Remember that something happened."""
        text = detail if isinstance(detail, str) else json.dumps(detail)
        with self._db.transaction():
            self._db.execute("INSERT INTO events VALUES (?, ?, ?, ?)", (self._clock(), kind, subject, text))

    def note_once(self, kind: str, subject: str, detail: str) -> bool:
        """Remember what happened, unless the same kind of thing was noted of `subject` before; returns whether it was new."""
        known = self._db.row("SELECT 1 FROM events WHERE kind = ? AND subject = ?", kind, subject) is not None
        if not known:
            self.note(kind, subject, detail)
        return not known
