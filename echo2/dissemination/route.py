"""Which snapshots to fetch for a version: a chain of deltas, or a full one and the deltas after it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Offer:
    """One thing that can be fetched: version `version` in full, or as a delta against `base_version`."""

    version: int
    base_version: int | None
    transfer_bytes: int


def cheapest_route(held_version: int | None, wanted_version: int, offers: Iterable[Offer]) -> tuple[Offer, ...] | None:
    """The offers to fetch, in order, to have `wanted_version` with the fewest bytes, and among these in the fewest steps.

    A chain may begin at `held_version`, or with an offer in full. Empty if that version is held; None if no chain leads there.
    Deltas that do not lead to a higher version are left out of account.
    """
    routes: dict[int, tuple[Offer, ...]] = {} if held_version is None else {held_version: ()}
    for offer in sorted(offers, key=lambda offer: offer.version):
        if offer.base_version is None:
            route: tuple[Offer, ...] = (offer,)
        elif offer.base_version < offer.version and offer.base_version in routes:
            route = (*routes[offer.base_version], offer)
        else:
            continue
        if offer.version not in routes or _cost(route) < _cost(routes[offer.version]):
            routes[offer.version] = route
    return routes.get(wanted_version)


def _cost(route: tuple[Offer, ...]) -> tuple[int, int]:
    return sum(offer.transfer_bytes for offer in route), len(route)
