"""What a run's money went into: by offer, by what came of it, and per step, rollout and token.

Invariants: read-only; every paid interval is split without remainder, so that the uses add up to what was paid; what is counted
is rent as the ledger has it, without the traffic that a cloud bills by the byte.

**Uses.** Of a paid interval, the time until its first worker registers is a start (or "never came up"); of the rest, the time
in which no lease is out is idle. The time in which leases are out is shared among them by how long each was, and each counts
for what came of its group: trained, evaluated, filtered, expired, failed; late or stale where a post was of no use any more;
returned by a worker that left, lost with one that did not answer; under way where it is not decided yet.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from echo2.hub.database import Database
from echo2.hub.intervals import PaidInterval, read_intervals

USEFUL = ("trained", "evaluated", "under way")
"""Uses that are no waste."""

FATES = {"late": "late", "stale": "stale", "returned": "returned", "timeout": "lost", "lost": "lost", "engine_failed": "failed"}
"""Uses of attempts that came to nothing, by outcome."""

UNDECIDED = ("leased", "generated", "ready")


@dataclass(frozen=True, slots=True)
class OfferCost:
    """What one offer cost, and what its workers made."""

    offer: str
    launches: int
    running: int
    lost: int
    """Machines that ended by themselves."""
    hours: float
    usd: float
    scored_groups: int
    scored_rollouts: int


@dataclass(frozen=True, slots=True)
class Costs:
    """A run's money."""

    usd: float
    hours: float
    """Of all machines."""
    running: int
    """Machines that are paid for still."""
    offers: tuple[OfferCost, ...]
    """The dearest first."""
    uses: Mapping[str, float]
    """USD by what came of it, the most first."""
    steps: int
    scored_groups: int
    scored_rollouts: int
    trained_rollouts: int
    tokens: int
    """Of all completions that workers handed in."""
    trained_tokens: int

    @property
    def wasted_usd(self) -> float:
        """What did not go into what was trained, evaluated or is under way."""
        return math.fsum(usd for use, usd in self.uses.items() if use not in USEFUL)

    def rates(self) -> dict[str, float | None]:
        """USD per unit; None where there is none of it yet."""
        units = {
            "usd_per_step": self.steps,
            "usd_per_1000_scored_rollouts": self.scored_rollouts / 1000,
            "usd_per_1000_trained_rollouts": self.trained_rollouts / 1000,
            "usd_per_million_tokens": self.tokens / 1e6,
            "usd_per_million_trained_tokens": self.trained_tokens / 1e6,
        }
        return {name: self.usd / count if count else None for name, count in units.items()}


@dataclass(frozen=True, slots=True)
class Use:
    """A lease of a worker, from when to when, and what came of it."""

    began_at_s: float
    ended_at_s: float
    what: str


def read_costs(database: Database) -> Costs:
    """The money of the run whose ledger this is."""
    intervals = read_intervals(database)
    leases, made = _leases(database), _made(database)
    uses: dict[str, float] = defaultdict(float)
    for interval in intervals:
        for what, usd in uses_of(interval, [use for worker in interval.workers for use in leases.get(worker, ())]).items():
            uses[what] += usd
    offers = sorted({interval.offer for interval in intervals})
    by_offer = [_offer_cost(offer, [each for each in intervals if each.offer == offer], made) for offer in offers]
    return Costs(
        usd=math.fsum(interval.usd for interval in intervals),
        hours=math.fsum(interval.hours for interval in intervals),
        running=sum(interval.running for interval in intervals),
        offers=tuple(sorted(by_offer, key=lambda cost: -cost.usd)),
        uses=dict(sorted(uses.items(), key=lambda item: -item[1])),
        steps=database.value("SELECT COUNT(*) FROM steps"),
        scored_groups=sum(groups for groups, _ in made.values()),
        scored_rollouts=sum(rollouts for _, rollouts in made.values()),
        trained_rollouts=database.value(
            "SELECT COUNT(reward) FROM rollouts JOIN groups USING (group_id) WHERE state = 'trained'"
        ),
        tokens=database.value("SELECT SUM(tokens + wasted_tokens) FROM attempts"),
        trained_tokens=database.value("SELECT SUM(tokens) FROM groups WHERE state = 'trained'"),
    )


def uses_of(interval: PaidInterval, leases: Sequence[Use]) -> dict[str, float]:
    """USD of one interval by what came of it.

    Two dollars an hour: a quarter of an hour to start, a lease of half an hour, and one that dies with the machine a quarter
    after it.

    >>> interval = PaidInterval("m", "o", 2.0, 0.0, 3600.0, False, True, ("w",), 900.0)
    >>> uses_of(interval, [Use(900.0, 2700.0, "trained"), Use(2700.0, 9000.0, "lost")])
    {'start': 0.5, 'idle': 0.0, 'trained': 1.0, 'lost': 0.5}
    """
    ended_s, usd_per_s = max(interval.launched_at_s, interval.ended_at_s), interval.price_usd_per_hour / 3600
    if interval.registered_at_s is None:
        return {"never came up": interval.usd}
    up_s = min(interval.registered_at_s, ended_s)
    spans = [(max(use.began_at_s, up_s), min(use.ended_at_s, ended_s), use.what) for use in leases]
    spans = [(began_s, until_s, what) for began_s, until_s, what in spans if began_s < until_s]
    shares: dict[str, float] = defaultdict(float)
    for began_s, until_s, what in spans:
        shares[what] += until_s - began_s
    busy_s, all_s = _covered_s((began_s, until_s) for began_s, until_s, _ in spans), math.fsum(shares.values())
    found = {"start": (up_s - interval.launched_at_s) * usd_per_s, "idle": (ended_s - up_s - busy_s) * usd_per_s}
    return found | {what: busy_s * usd_per_s * share_s / all_s for what, share_s in shares.items()}


def _covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that are in at least one of the spans."""
    covered_s, until_s = 0.0, -math.inf
    for began_s, ended_s in sorted(spans):
        covered_s += max(0.0, ended_s - max(began_s, until_s))
        until_s = max(until_s, ended_s)
    return covered_s


def _leases(database: Database) -> dict[str, list[Use]]:
    """By worker id; one that is out still lasts for ever."""
    found: dict[str, list[Use]] = defaultdict(list)
    for row in database.rows(
        "SELECT attempts.worker_id AS worker_id, attempts.leased_at_s AS began_at_s, ended_at_s, outcome, state"
        " FROM attempts JOIN groups USING (group_id)"
    ):
        use = FATES.get(row["outcome"], row["state"])
        what = "under way" if row["outcome"] == "out" or use in UNDECIDED else use
        found[row["worker_id"]].append(Use(row["began_at_s"], row["ended_at_s"] or math.inf, what))
    return found


def _made(database: Database) -> dict[str, tuple[int, int]]:
    """Groups and rollouts that were scored, by the id of their worker; a group that several made counts for one of them."""
    rows = database.rows(
        "SELECT worker_id, COUNT(DISTINCT group_id) FILTER (WHERE first) AS groups, COUNT(*) AS rollouts FROM"
        " (SELECT worker_id, group_id, member = MIN(member) OVER (PARTITION BY group_id) AS first FROM rollouts"
        " WHERE reward IS NOT NULL) GROUP BY worker_id"
    )
    return {row["worker_id"]: (row["groups"], row["rollouts"]) for row in rows}


def _offer_cost(offer: str, intervals: Sequence[PaidInterval], made: Mapping[str, tuple[int, int]]) -> OfferCost:
    counts = [made.get(worker, (0, 0)) for interval in intervals for worker in interval.workers]
    return OfferCost(
        offer=offer,
        launches=len(intervals),
        running=sum(interval.running for interval in intervals),
        lost=sum(interval.lost for interval in intervals),
        hours=math.fsum(interval.hours for interval in intervals),
        usd=math.fsum(interval.usd for interval in intervals),
        scored_groups=sum(groups for groups, _ in counts),
        scored_rollouts=sum(rollouts for _, rollouts in counts),
    )
