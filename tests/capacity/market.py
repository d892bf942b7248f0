"""Small markets for tests of activation: candidates whose figures are round."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from echo2.capacity.limits import Limits, Quota
from echo2.capacity.offers import Candidate, Offer
from echo2.capacity.selection import Selection

PLACES = (("a", "north", "north-1"), ("a", "north", "north-2"), ("b", "south", ""), ("c", "west", "west-1"))


def candidate(
    rate: float,
    usd: float,
    place: tuple[str, str, str] = PLACES[0],
    *,
    spot: bool = False,
    gpus: int = 1,
    running: int = 0,
    start_up_s: float = 0.0,
    latency_s: float = 1.0,
    kind: str = "m",
) -> Candidate:
    """A machine that makes `rate` groups/s for `usd` an hour, and is never preempted."""
    offer = Offer(place[0], usd, place[1], place[2], kind, "G", gpus, spot=spot)
    return Candidate(offer, gpus, rate, latency_s, 1.0, 0.0, start_up_s, 0.0, running, {})


@st.composite
def markets(draw: st.DrawFn, most: int = 4) -> tuple[list[Candidate], float, Limits]:
    """Candidates, a need and limits, such that counts up to 5 hold the cheapest plan or nearly so."""
    found = [
        candidate(
            draw(st.sampled_from([1.0, 1.5, 2.0, 4.0])),
            draw(st.integers(1, 12)) / 2,
            draw(st.sampled_from(PLACES)),
            spot=draw(st.booleans()),
            gpus=draw(st.sampled_from([1, 2])),
            running=draw(st.sampled_from([0, 0, 0, 1, 2])),
            start_up_s=draw(st.sampled_from([0.0, 360.0, 1800.0])),
            kind=f"m{number}",
        )
        for number in range(draw(st.integers(1, most)))
    ]
    limits = Limits(
        budget_usd_per_hour=draw(st.sampled_from([math.inf, math.inf, 3.0, 8.0, 20.0])),
        quotas=tuple(draw(st.lists(st.sampled_from(QUOTAS), max_size=2, unique=True))),
        failure_domain=draw(st.sampled_from(["zone", "region", "cloud"])),
        max_domain_share=draw(st.sampled_from([1.0, 1.0, 0.8, 0.6, 0.5])),
        min_on_demand_share=draw(st.sampled_from([0.0, 0.0, 0.25, 0.5, 1.0])),
        switching_horizon_h=draw(st.sampled_from([0.5, 1.0, 10.0])),
    )
    return found, draw(st.sampled_from([0.5, 1.0, 2.0, 3.5, 5.0])), limits


QUOTAS = (
    Quota("a", 2),
    Quota("a", 0, spot=True),
    Quota("b", 3),
    Quota("c", 1, "west", "G"),
    Quota("a", 4, "north", spot=False),
)


def all_selections(candidates: Sequence[Candidate], limits: Limits, most: int) -> Iterator[Selection]:
    """Every selection with counts up to `most`."""
    for counts in itertools.product(range(most + 1), repeat=len(candidates)):
        yield Selection(tuple(candidates), counts, limits)


def cheapest_by_trying(candidates: Sequence[Candidate], need: float, limits: Limits, most: int = 5) -> float:
    """Cost of the cheapest selection with counts up to `most` that keeps to everything; infinite where there is none."""
    allowed = (each for each in all_selections(candidates, limits, most) if not each.violations(need))
    return min((each.cost_usd_per_hour for each in allowed), default=math.inf)
