"""What the ledger says of each paid interval: how long, how it ended, and what its worker showed.

Invariants: read-only; an interval that is paid for still ends, for its hours, with the last sign of life in the ledger.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from echo2.capacity.offers import Rental
from echo2.hub.database import Database

LAST_SIGN_OF_LIFE = (
    "SELECT MAX(at) FROM (SELECT MAX(last_seen_at_s) AS at FROM workers UNION ALL SELECT MAX(finished_at_s) FROM steps"
    " UNION ALL SELECT MAX(at_s) FROM events UNION ALL SELECT MAX(launched_at_s) FROM paid_intervals)"
)
MEAN_DISSEMINATION_S = (
    "SELECT worker_id, AVG(loaded_at_s - finished_at_s) AS mean_s FROM disseminations JOIN steps ON step = version - 1"
    " WHERE loaded_at_s >= finished_at_s GROUP BY worker_id"
)


def read_rentals(database: Database, groups_per_s: Mapping[str, float]) -> list[Rental]:
    """Every paid interval, oldest first; `groups_per_s` is μ of the workers that were measured, by worker id.

    A worker belongs to the interval of its name in which it registered. The fleet notes when one ended by itself, and that note
    comes after the interval's end and before the next one of the same name.
    """
    now_s = database.value(LAST_SIGN_OF_LIFE) or 0.0
    registered: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for row in database.rows("SELECT name, worker_id, registered_at_s FROM workers ORDER BY registered_at_s"):
        registered[row["name"]].append((row["registered_at_s"], row["worker_id"]))
    ended: dict[str, list[float]] = defaultdict(list)
    for row in database.rows("SELECT subject, at_s FROM events WHERE kind = 'worker ended'"):
        ended[row["subject"]].append(row["at_s"])
    dissemination_s = {row["worker_id"]: row["mean_s"] for row in database.rows(MEAN_DISSEMINATION_S)}
    intervals = database.rows("SELECT * FROM paid_intervals ORDER BY launched_at_s")
    launches: dict[str, list[float]] = defaultdict(list)
    for row in intervals:
        launches[row["name"]].append(row["launched_at_s"])
    rentals = []
    for row in intervals:
        name, launched_s, terminated_s = row["name"], row["launched_at_s"], row["terminated_at_s"]
        next_s = _first_after(launches[name], launched_s, math.inf)
        workers = [(at_s, worker) for at_s, worker in registered[name] if launched_s <= at_s < next_s]
        rentals.append(
            Rental(
                offer=row["offer"],
                hours=max(0.0, (now_s if terminated_s is None else terminated_s) - launched_s) / 3600,
                running=terminated_s is None,
                lost=terminated_s is not None and any(terminated_s <= at_s <= next_s for at_s in ended[name]),
                start_up_s=workers[0][0] - launched_s if workers else None,
                dissemination_s=_mean([dissemination_s[w] for _, w in workers if w in dissemination_s]),
                groups_per_s=_mean([groups_per_s[w] for _, w in workers if w in groups_per_s]),
            )
        )
    return rentals


def _first_after(times_s: Sequence[float], after_s: float, otherwise_s: float) -> float:
    return min((at_s for at_s in times_s if at_s > after_s), default=otherwise_s)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
