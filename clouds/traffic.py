"""What clouds ask for the bytes that a machine sends and receives.

Invariant: a price is on file with its source, given by the user, or said to be unknown and taken as that of the largest cloud.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from clouds.history import Figure, said_of_place
from echo2.capacity.offers import Offer
from echo2.config_activation import PlaceSection


@dataclass(frozen=True, slots=True)
class TrafficPrice:
    """What a cloud asks for a gigabyte, 10⁹ bytes."""

    egress_usd_per_gb: float
    ingress_usd_per_gb: float
    source: str


@cache
def known_prices() -> Mapping[str, TrafficPrice]:
    """Prices on file, by the catalog's name of the cloud."""
    text = resources.files("clouds").joinpath("traffic.toml").read_text(encoding="utf-8")
    return {
        entry["name"]: TrafficPrice(entry["egress_usd_per_gb"], entry.get("ingress_usd_per_gb", 0.0), entry["source"])
        for entry in tomllib.loads(text)["cloud"]
    }


def traffic_usd_per_hour(offer: Offer, places: Iterable[PlaceSection], sent_gb: float, received_gb: float) -> Figure:
    """Of a machine that sends and receives so many gigabytes an hour."""
    aws = known_prices()["aws"]
    unknown = TrafficPrice(aws.egress_usd_per_gb, aws.ingress_usd_per_gb, f"unknown price, taken as that of {aws.source}")
    price = known_prices().get(offer.cloud, unknown)
    egress = said_of_place(places, offer, "egress_usd_per_gb")
    ingress = said_of_place(places, offer, "ingress_usd_per_gb")
    source = price.source if egress is None and ingress is None else "activation.places"
    sent_usd = sent_gb * (price.egress_usd_per_gb if egress is None else egress)
    received_usd = received_gb * (price.ingress_usd_per_gb if ingress is None else ingress)
    return Figure(sent_usd + received_usd, source)
