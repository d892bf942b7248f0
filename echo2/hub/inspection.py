"""How a run stands, for the hub itself and for a look from outside it.

Invariant: a look from outside changes nothing in the run's directory.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from echo2.capacity.calibration import Observations, calibrate
from echo2.capacity.offers import Rental
from echo2.errors import UserError
from echo2.hub.completions import Completion, read_completions
from echo2.hub.costs import Costs, read_costs
from echo2.hub.database import Database, unreadable
from echo2.hub.group_book import rules_of
from echo2.hub.ledger import Ledger
from echo2.hub.mismatch import recent_mismatches
from echo2.hub.prompts import Prompts
from echo2.hub.rentals import read_rentals
from echo2.hub.roster import Roster, WorkerRecord
from echo2.hub.statistics import Statistics
from echo2.run_directory import RunRecord, read_run

MISSED_HEARTBEATS = 3.5
DEPARTED_WORKERS = 50
"""Workers that are no longer live, of which a status tells."""


def inspect_run(path: Path) -> dict[str, Any]:
    """The status of the run in directory `path`, read from its ledger; raises UserError if there is none yet."""
    run = read_run(path)
    with _open_ledger(run) as database:
        return describe_run(run, database)


def is_complete(run: RunRecord) -> bool:
    """Whether all steps that the run's configuration asks for are in its ledger. Raises UserError for one that is damaged."""
    if not run.ledger.exists():
        return False
    with _open_ledger(run) as database:
        return Ledger(database, rules_of(run.config)).current_step >= run.config.run.steps


def observe_run(run: RunRecord, since_s: float = 0.0) -> Observations:
    """What the run's ledger says about the capacity model's terms, from `since_s` on; raises UserError if there is none yet."""
    with _open_ledger(run) as database:
        return Statistics(database).observations(_silence_s(run), since_s)


def rentals_of(run: RunRecord) -> list[Rental]:
    """The run's paid intervals, oldest first, with what was measured in each; raises UserError if there is no ledger yet."""
    with _open_ledger(run) as database:
        measured = calibrate(Statistics(database).observations(_silence_s(run))).worker_groups_per_s
        return read_rentals(database, {worker: rate.value for worker, rate in measured.items()})


def costs_of(run: RunRecord) -> Costs:
    """What the run's money went into; raises UserError if there is no ledger yet."""
    with _open_ledger(run) as database:
        return read_costs(database)


def completions_of(run: RunRecord, groups: int, step: int | None = None, evaluation: int | None = None) -> list[Completion]:
    """Of the newest groups; raises UserError if there is no ledger yet, or the run's task cannot be made here."""
    with _open_ledger(run) as database:
        return read_completions(database, Prompts(run), groups, step, evaluation)


def snapshot_bytes_of(run: RunRecord) -> float | None:
    """Bytes of the newest version as workers fetch it, a delta where there is one; None before the first step."""
    with _open_ledger(run) as database:
        metrics = Statistics(database).last_metrics()
        return metrics.get("dissemination/delta_bytes", metrics.get("dissemination/full_bytes"))


def _silence_s(run: RunRecord) -> float:
    """A worker that missed so many seconds of heartbeats is taken as gone, long before its leases are given to others."""
    return MISSED_HEARTBEATS * run.config.worker.heartbeat_interval_s


@contextmanager
def _open_ledger(run: RunRecord) -> Iterator[Database]:
    if not run.ledger.exists():
        raise UserError(f"run {run.path} has no ledger yet: its hub has not started")
    database = Database(run.ledger, run.run_id, read_only=True)
    try:
        yield database
    except sqlite3.DatabaseError as error:
        raise unreadable(run.ledger, error) from None
    finally:
        database.close()


def describe_run(run: RunRecord, database: Database) -> dict[str, Any]:
    """The run's status: counts, rates, waste, workers, the last step, the measured terms, money, events.

    `workers` are the live ones by name, and then those that left or were lost with what they were last, the newest first;
    `workers_omitted` is how many more of these there are.
    `quiet_s` is how long nothing has happened, where that is longer than a worker may be silent, and None otherwise; the rate
    of such a run is the one before it fell quiet.
    """
    ledger, roster, statistics = Ledger(database, rules_of(run.config)), Roster(database), Statistics(database)
    quiet_s = statistics.quiet_s(run.config.hub.heartbeat_timeout_s)
    live, (departed, departures) = roster.live_workers(), roster.departed_workers(DEPARTED_WORKERS)
    return {
        "run_id": run.run_id,
        "step": ledger.current_step,
        "total_steps": run.config.run.steps,
        "version": ledger.highest_version,
        "staleness_bound": run.config.staleness.bound,
        "max_trained_staleness": statistics.max_trained_staleness(),
        "groups": statistics.groups_by_state(),
        "wasted_tokens": statistics.wasted_tokens(),
        "quiet_s": quiet_s,
        "rollouts_per_s": statistics.rollouts_per_s(quiet=quiet_s is not None),
        "workers": [_describe_worker(worker) for worker in (*live, *departed)],
        "workers_live": len(live),
        "workers_omitted": departures - len(departed),
        "workers_seen": statistics.workers_seen(),
        "log_prob_differences": [asdict(found) for found in recent_mismatches(database)],
        "versions_disseminated": statistics.versions_loaded(),
        "last_step": statistics.last_metrics(),
        "evaluations": statistics.evaluations(),
        "measured_terms": calibrate(statistics.observations(_silence_s(run))).figures(),
        "cost_usd": roster.cost_usd(),
        "events": statistics.events(),
    }


def _describe_worker(worker: WorkerRecord) -> dict[str, Any]:
    telemetry = worker.telemetry
    return {
        "worker_id": worker.worker_id,
        "state": worker.state,
        "silent_s": round(worker.silent_s, 3),
        "version": telemetry.version,
        "groups": telemetry.groups,
        "groups_per_s": telemetry.groups_per_s,
        "tokens": telemetry.tokens,
        "tokens_per_s": telemetry.tokens_per_s,
        "slots": telemetry.slots,
        "latency_s": {"p50": telemetry.latency_p50_s, "p90": telemetry.latency_p90_s, "p99": telemetry.latency_p99_s},
        "left_at_s": worker.left_at_s,
        "reason": worker.reason,
    }
