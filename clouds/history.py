"""What is known of offers beside the catalog: what a run measured on its rented machines, what the user says, and priors.

Invariants: every figure names its source; what the user says of a place counts more than a measurement for D, and takes the
place of the prior for preemptions; what was measured nowhere is None or the prior, never a silent guess.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from echo2.capacity.offers import Offer, Rental
from echo2.config_activation import ActivationSection, PlaceSection


class Figure(NamedTuple):
    """A figure and where it is from."""

    value: float
    source: str


class History:
    """What the `rentals` that were paid for in the run `where` say of `offers`."""

    def __init__(self, offers: Sequence[Offer], rentals: Sequence[Rental], settings: ActivationSection, where: str) -> None:
        by_name = {offer.name: offer for offer in offers}
        self._rentals = [(by_name[rental.offer], rental) for rental in rentals if rental.offer in by_name]
        self._settings, self._where = settings, where

    def running(self, offer: Offer) -> int:
        """Machines of the offer that are paid for now."""
        return sum(rental.running for rented, rental in self._rentals if rented.name == offer.name)

    def throughput(self, offer: Offer) -> Figure | None:
        """μ of one worker on this kind of accelerator; None if it was not measured."""
        rates = [rental.groups_per_s for rented, rental in self._rentals if rented.accelerator == offer.accelerator]
        return self._mean(rates, "workers")

    def start_up(self, offer: Offer) -> Figure:
        """From launch until a worker registers: mean of the cloud, else the prior."""
        seen = [rental.start_up_s for rented, rental in self._rentals if rented.cloud == offer.cloud]
        return self._mean(seen, "starts") or Figure(self._settings.start_up_s, "prior activation.start_up_s")

    def dissemination(self, offer: Offer) -> Figure | None:
        """D: what the user says of the place, else the mean of the region; None where neither is known."""
        said = said_of_place(self._settings.places, offer, "dissemination_s")
        if said is not None:
            return Figure(said, "activation.places")
        here = (offer.cloud, offer.region)
        return self._mean(
            [rental.dissemination_s for rented, rental in self._rentals if (rented.cloud, rented.region) == here],
            "workers there",
        )

    def preemptions(self, offer: Offer) -> Figure:
        """λ = (λ₀·w + k)/(w + h): k of the machines that were rented for h hours in the region, of the same accelerator and
        market, ended by themselves; λ₀ is the prior, 0 on demand, and weighs w hours."""
        prior = Figure(0.0, "prior 0 on demand")
        if offer.spot:
            said = said_of_place(self._settings.places, offer, "spot_preemptions_per_hour")
            rate = self._settings.spot_preemptions_per_hour if said is None else said
            place = "activation.spot_preemptions_per_hour" if said is None else "activation.places"
            prior = Figure(rate, f"prior {place} = {rate:g}")
        alike = [rental for rented, rental in self._rentals if fails_like(rented) == fails_like(offer)]
        if not alike:
            return prior
        hours, lost, weight_h = math.fsum(rental.hours for rental in alike), sum(r.lost for r in alike), self._settings.prior_h
        source = f"{lost} in {hours:.1f} h in {self._where}; {prior.source} weighs {weight_h:g} h"
        return Figure(learned_rate(prior.value, weight_h, lost, hours), source)

    def _mean(self, values: Iterable[float | None], of: str) -> Figure | None:
        known = [value for value in values if value is not None]
        return Figure(math.fsum(known) / len(known), f"measured on {len(known)} {of} in {self._where}") if known else None


def said_of_place(places: Iterable[PlaceSection], offer: Offer, figure: str) -> float | None:
    """A figure that the user gave for the offer's region or, failing that, for its cloud."""
    said: dict[str, float] = {}
    for place in places:
        value = getattr(place, figure)
        if value is not None and place.cloud == offer.cloud and place.region in ("", offer.region):
            said[place.region] = value
    return said.get(offer.region, said.get(""))


def learned_rate(prior_per_hour: float, weight_h: float, lost: int, hours: float) -> float:
    """λ = (λ₀·w + k)/(w + h)."""
    return (prior_per_hour * weight_h + lost) / (weight_h + hours)


def fails_like(offer: Offer) -> tuple[str, str, str, bool]:
    """What is the same for offers whose machines are taken back alike."""
    return offer.cloud, offer.region, offer.accelerator, offer.spot
