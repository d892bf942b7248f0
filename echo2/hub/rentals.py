"""What each paid interval showed of its offer: how long it ran, how it ended, what its workers did.

Invariant: read-only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from echo2.capacity.offers import Rental
from echo2.hub.database import Database
from echo2.hub.intervals import read_intervals

MEAN_DISSEMINATION_S = (
    "SELECT worker_id, AVG(loaded_at_s - finished_at_s) AS mean_s FROM disseminations JOIN steps ON step = version - 1"
    " WHERE loaded_at_s >= finished_at_s GROUP BY worker_id"
)


def read_rentals(database: Database, groups_per_s: Mapping[str, float]) -> list[Rental]:
    """Every paid interval, oldest first; `groups_per_s` is μ of the workers that were measured, by worker id."""
    dissemination_s = {row["worker_id"]: row["mean_s"] for row in database.rows(MEAN_DISSEMINATION_S)}
    return [
        Rental(
            offer=interval.offer,
            hours=interval.hours,
            running=interval.running,
            lost=interval.lost,
            start_up_s=None if interval.registered_at_s is None else interval.registered_at_s - interval.launched_at_s,
            dissemination_s=_mean([dissemination_s[w] for w in interval.workers if w in dissemination_s]),
            groups_per_s=_mean([groups_per_s[w] for w in interval.workers if w in groups_per_s]),
        )
        for interval in read_intervals(database)
    ]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
