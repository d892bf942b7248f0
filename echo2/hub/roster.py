"""Who works for the run, what they hold, and what they cost.

Invariants: only the hub's clock counts, so a worker whose clock is wrong stays alive; a worker is lost after it was silent for
the heartbeat time-out, never because it was busy; a name goes to whichever process asks for it last, and never back to one
that it was taken from; every paid interval runs from launch to termination.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from echo2.errors import NameTaken, UserError
from echo2.hub.database import Database
from echo2.hub.intervals import LAST_SIGN_OF_LIFE, machine_of
from echo2.protocol import CrewMember, Telemetry

FLEET_ENDED = "fleet ended"
"""Kind of event: the fleet of rented machines ended before the run did."""
WORKER_LEFT, DISMISSED = "worker left", "the hub had no more for it to do"
"""Kind of event, and its detail where the worker did not leave for a reason of its own."""
TOLD_TO_END = "it was told to end"
"""Another such detail: the worker gave no reason, as on SIGTERM."""
WORKER_LOST = "worker lost"
"""Kind of event; its detail says why the hub has given the worker up."""
HUB_WAS_AWAY = "hub was away"
"""Kind of event: workers had no hub until now, and some may have ended for it."""


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker as the hub last heard of it."""

    worker_id: str
    name: str
    state: str
    silent_s: float
    telemetry: Telemetry
    left_at_s: float | None = None
    """When it left or was lost, in seconds since the epoch; None while it is live."""
    reason: str = ""
    """Why it did, where that is known."""


def by_reason(reasons: Mapping[str, str]) -> str:
    """What happened to which members of a group, each reason told once.

    >>> by_reason({"0": "no memory", "1": "no memory", "3": "no number"})
    'members 0, 1: no memory; member 3: no number'
    """
    members: dict[str, list[str]] = {}
    for member, reason in reasons.items():
        members.setdefault(reason, []).append(member)
    return "; ".join(f"member{'s' * (len(own) > 1)} {', '.join(own)}: {reason}" for reason, own in members.items())


class Roster:
    """Workers, the snapshots that they loaded, paid intervals and events."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._db = database
        self._clock = clock

    def register(self, name: str, process: str = "") -> tuple[str, list[str]]:
        """Enter a worker; returns its new id and the ids under which the same name was live before (now lost).

        `process` tells one process from another. Raises NameTaken for one that had the name and has lost it to another.
        """
        worker_id = f"{name}-{secrets.token_hex(4)}"
        now = self._clock()
        with self._db.transaction():
            holders = self._db.rows(
                "SELECT worker_id, process FROM workers LEFT JOIN processes USING (worker_id)"
                " WHERE name = ? AND state = 'live'",
                name,
            )
            if any(holder["process"] != process for holder in holders) and self._had(name, process):
                raise NameTaken(f"another worker has taken the name {name}: give each worker a --name of its own")
            former = [holder["worker_id"] for holder in holders]
            self._db.execute("UPDATE workers SET state = 'lost' WHERE name = ? AND state = 'live'", (name,))
            self._db.execute(
                "INSERT INTO workers VALUES (?, ?, 'live', ?, ?, ?)", (worker_id, name, now, now, Telemetry().model_dump_json())
            )
            self._db.execute("INSERT INTO processes VALUES (?, ?)", (worker_id, process))
        self.note("worker registered", worker_id, "")
        for replaced in former:
            self.note(WORKER_LOST, replaced, f"{worker_id} has taken its name")
        return worker_id, former

    def _had(self, name: str, process: str) -> bool:
        found = self._db.row(
            "SELECT 1 FROM workers JOIN processes USING (worker_id) WHERE name = ? AND process = ?", name, process
        )
        return found is not None

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

    def leave(self, worker_id: str, reason: str = "") -> None:
        """The worker said good-bye, for this reason; `DISMISSED` where it was told to."""
        with self._db.transaction():
            self._db.execute(
                "UPDATE workers SET state = 'left', last_seen_at_s = ? WHERE worker_id = ?", (self._clock(), worker_id)
            )
        self.note(WORKER_LEFT, worker_id, reason)

    def lose_silent(self, timeout_s: float) -> list[str]:
        """Mark as lost who was silent for longer than `timeout_s`; returns their ids."""
        with self._db.transaction():
            rows = self._db.rows(
                "SELECT worker_id FROM workers WHERE state = 'live' AND last_seen_at_s < ?", self._clock() - timeout_s
            )
            silent = [r["worker_id"] for r in rows]
            self._db.executemany("UPDATE workers SET state = 'lost' WHERE worker_id = ?", [(w,) for w in silent])
        for worker_id in silent:
            self.note(WORKER_LOST, worker_id, f"silent for more than {timeout_s:g} s")
        return silent

    def heard_after_loss(self, worker_id: str) -> None:
        """A worker that was given up hands in after all: nothing that it had drawn is lost."""
        with self._db.transaction():
            self._db.execute(
                "UPDATE workers SET telemetry = json_set(telemetry, '$.open_tokens', 0) WHERE worker_id = ? AND state = 'lost'",
                (worker_id,),
            )

    def forgive_silence(self) -> None:
        """The hub itself was away: nobody's silence during that time counts, nor does it who ended for it (`crew`)."""
        now = self._clock()
        away_s = now - self._db.value(LAST_SIGN_OF_LIFE)
        with self._db.transaction():
            orphans = self._db.execute("UPDATE workers SET last_seen_at_s = ? WHERE state = 'live'", (now,)).rowcount
            if orphans:
                detail = f"from {orphans} workers, for {max(0.0, away_s):.0f} s"
                self._db.execute("INSERT INTO events VALUES (?, ?, 'hub', ?)", (now, HUB_WAS_AWAY, detail))

    def live_workers(self) -> list[WorkerRecord]:
        return [self._record(r) for r in self._db.rows("SELECT * FROM workers WHERE state = 'live' ORDER BY name")]

    def departed_workers(self, limit: int) -> tuple[list[WorkerRecord], int]:
        """The `limit` workers that were heard last of those that are no longer live, and how many there are in all.

        A process that has registered more than once is the one that it was last.
        """
        rows = self._db.rows(
            "SELECT last.*, at_s AS left_at_s, detail AS reason, COUNT(*) OVER () AS departed FROM"
            " (SELECT workers.*, MAX(registered_at_s) FROM workers LEFT JOIN processes USING (worker_id)"
            " GROUP BY COALESCE(NULLIF(process, ''), worker_id)) AS last"
            " LEFT JOIN (SELECT subject, MAX(at_s) AS at_s, detail FROM events WHERE kind IN (?, ?) GROUP BY subject)"
            " ON subject = worker_id WHERE state <> 'live' ORDER BY last_seen_at_s DESC, worker_id LIMIT ?",
            *(WORKER_LEFT, WORKER_LOST, limit),
        )
        return [self._record(r, r["left_at_s"], r["reason"] or "") for r in rows], rows[0]["departed"] if rows else 0

    def _record(self, row: sqlite3.Row, left_at_s: float | None = None, reason: str = "") -> WorkerRecord:
        silent_s = max(0.0, self._clock() - row["last_seen_at_s"])
        telemetry = Telemetry.model_validate_json(row["telemetry"])
        return WorkerRecord(row["worker_id"], row["name"], row["state"], silent_s, telemetry, left_at_s, reason)

    # --- machines

    def crew(self) -> list[CrewMember]:
        """Every name under which a worker registered, as the last one of that name stands."""
        now = self._clock()
        rows = self._db.rows(
            "SELECT name, state, MAX(registered_at_s), last_seen_at_s, json_extract(telemetry, '$.version') AS version,"
            " worker_id IN (SELECT subject FROM events WHERE kind = ? AND detail = ?) OR state <> 'left' AND"
            " last_seen_at_s IN (SELECT at_s FROM events WHERE kind = ?) AS excused FROM workers GROUP BY name ORDER BY name",
            *(WORKER_LEFT, DISMISSED, HUB_WAS_AWAY),
        )
        return [
            CrewMember(
                name=r["name"],
                live=r["state"] == "live",
                ready=r["version"] is not None,
                silent_s=max(0.0, now - r["last_seen_at_s"]),
                excused=bool(r["excused"]),
            )
            for r in rows
        ]

    def drain(self, machine: str) -> None:
        """The workers of `machine` are to finish what they hold and leave; said again, it changes nothing."""
        with self._db.transaction():
            self._db.execute("INSERT OR IGNORE INTO draining VALUES (?, ?)", (machine, self._clock()))

    def is_draining(self, worker_id: str) -> bool:
        machines = {r["name"] for r in self._db.rows("SELECT name FROM draining")}
        row = self._db.row("SELECT name FROM workers WHERE worker_id = ?", worker_id)
        return row is not None and machine_of(row["name"], machines) in machines

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

    def paid_for(self) -> set[str]:
        """Names of those whose paid interval goes on."""
        return {r["name"] for r in self._db.rows("SELECT name FROM paid_intervals WHERE terminated_at_s IS NULL")}

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

    def record_interval(
        self, name: str, offer: str, price_usd_per_hour: float, launched_at_s: float, ended_at_s: float | None
    ) -> None:
        """A machine is or was paid for as its cloud says; said again, it changes nothing but its end."""
        with self._db.transaction():
            self._db.execute(
                "INSERT INTO paid_intervals VALUES (?, ?, ?, ?, ?) ON CONFLICT (name, launched_at_s)"
                " DO UPDATE SET terminated_at_s = excluded.terminated_at_s",
                (name, offer, price_usd_per_hour, launched_at_s, ended_at_s),
            )

    def cost_usd(self) -> float:
        """Money over all intervals, the open ones up to now."""
        now = self._clock()
        return sum(
            r["price_usd_per_hour"] * max(0.0, (r["terminated_at_s"] or now) - r["launched_at_s"]) / 3600
            for r in self._db.rows("SELECT * FROM paid_intervals")
        )

    # --- events

    def note(self, kind: str, subject: str, detail: str | Mapping[str, str]) -> None:
        """Remember that something happened; `detail` may be reasons by member."""
        text = detail if isinstance(detail, str) else by_reason(detail)
        with self._db.transaction():
            self._db.execute("INSERT INTO events VALUES (?, ?, ?, ?)", (self._clock(), kind, subject, text))

    def fleet_ending(self, since_s: float) -> str:
        """Why the fleet of rented machines ended before the run, by its own word after this time; empty where it did not."""
        row = self._db.row("SELECT detail FROM events WHERE kind = ? AND at_s >= ? ORDER BY at_s DESC", FLEET_ENDED, since_s)
        return row["detail"] if row else ""

    def note_once(self, kind: str, subject: str, detail: str) -> bool:
        """Remember what happened, unless the same kind of thing was noted of `subject` before; returns whether it was new."""
        known = self._db.row("SELECT 1 FROM events WHERE kind = ? AND subject = ?", kind, subject) is not None
        if not known:
            self.note(kind, subject, detail)
        return not known
