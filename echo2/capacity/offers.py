"""Offers, and what a run may expect of each: throughput, cost, preemptions, all with their source.

Invariants: frozen values; an offer holds what the market says, a candidate what it comes to for one run; every figure of a
candidate says where it is from; impossible figures are refused with a UserError that names them.

**Effective throughput.** A machine that is preempted λ times an hour and replaced at once is paid for 1/λ hours while up and
for s start-up seconds before. While up for a time U it completes μ·max(0, U − L) groups, since what is under way when it goes
is lost. With exponential U:

    ν = μ · exp(−λL) / (1 + λs)

**Effective price.** c = p + traffic: the rent, and what the cloud asks for the bytes of weights and rollouts.
**Cost per rollout** is c / (G·ν), with G members to a group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from echo2.errors import UserError

LEAST_USE = 0.01
"""Share of its throughput that must be left of a machine once preemptions have taken theirs."""

FigureName = Literal["price", "μ", "preemptions", "start-up", "D", "traffic"]
DomainName = Literal["zone", "region", "cloud"]


@dataclass(frozen=True, slots=True)
class Offer:
    """Something that can be rented: one machine of a kind at a place, on demand or spot."""

    cloud: str
    price_usd_per_hour: float
    """Of the whole machine."""
    region: str = ""
    zone: str = ""
    """Empty where the cloud names no zones."""
    instance_type: str = ""
    accelerator: str = ""
    """As the catalog calls it, such as `A100-80GB`."""
    accelerators: float = 0
    """In one machine; some clouds rent a share of one."""
    gpu: str = ""
    """The same as `echo2.capacity.roofline.known_gpus` calls it; empty where it is not on file."""
    spot: bool = False
    """Whether the cloud may take it back."""

    @property
    def name(self) -> str:
        """What tells it from others, in the ledger too.

        >>> Offer("aws", 2.4701, "ap-south-1", "aps1-az2", "p5.4xlarge", "H100", 1, spot=True).name
        'aws/ap-south-1/aps1-az2/p5.4xlarge/spot'
        >>> Offer("local", 0.0).name
        'local'
        """
        parts = (self.cloud, self.region, self.zone, self.instance_type, "spot" if self.spot else "")
        return "/".join(part for part in parts if part)

    @property
    def hardware(self) -> str:
        """Accelerators, such as `8 × H100`."""
        return f"{self.accelerators:g} × {self.accelerator}"

    def domain(self, level: DomainName) -> str:
        """What fails together with it at this level; a cloud without zones fails by region."""
        parts = {"cloud": (self.cloud,), "region": (self.cloud, self.region), "zone": (self.cloud, self.region, self.zone)}
        return "/".join(part for part in parts[level] if part)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An offer that a run's workers fit on. Raises UserError for figures that cannot be."""

    offer: Offer
    workers: int
    """Workers on one machine."""
    groups_per_s: float
    """μ: of one machine while it is up."""
    group_latency_s: float
    """L."""
    dissemination_s: float
    """D: from the end of a step until its workers generate with the version."""
    preemptions_per_hour: float
    """λ."""
    start_up_s: float
    """s: from launch until its workers take leases; paid."""
    traffic_usd_per_hour: float
    """Weights and rollouts that the cloud bills by the byte."""
    running: int = 0
    """Machines of this offer that run now."""
    provenance: Mapping[FigureName, str] = field(default_factory=dict)
    """Where each figure comes from, in words."""
    launchable: bool = True
    """Whether others can be launched now."""

    def __post_init__(self) -> None:
        least = {"groups_per_s": 0.0, "group_latency_s": None, "dissemination_s": None, "preemptions_per_hour": None}
        for name in (*least, "start_up_s", "traffic_usd_per_hour"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0) or value == least.get(name):
                raise UserError(f"{name} = {value!r} of {self.offer.name} cannot be: give a finite number, from 0 up or above")
        if not (math.isfinite(self.offer.price_usd_per_hour) and self.offer.price_usd_per_hour >= 0):
            raise UserError(f"price_usd_per_hour = {self.offer.price_usd_per_hour!r} of {self.offer.name} is no price")
        if self.workers < 1 or self.running < 0:
            raise UserError(f"{self.offer.name} has workers = {self.workers} and running = {self.running}: give counts")

    @property
    def effective_groups_per_s(self) -> float:
        """ν.

        Taken back once an hour, it starts for 6 minutes of 66 and loses 36 s of the other 60:

        >>> offer = Offer("aws", 1.0, spot=True)
        >>> candidate = Candidate(offer, 1, 2.0, 36.0, 1.0, 1.0, 360.0, 0.1)
        >>> round(candidate.effective_groups_per_s, 6), round(2.0 * math.exp(-0.01) / 1.1, 6)
        (1.800091, 1.800091)
        """
        per_s = self.preemptions_per_hour / 3600
        return self.groups_per_s * math.exp(-per_s * self.group_latency_s) / (1 + per_s * self.start_up_s)

    @property
    def is_of_use(self) -> bool:
        """Whether preemptions leave it `LEAST_USE` of its throughput."""
        return self.effective_groups_per_s >= LEAST_USE * self.groups_per_s

    @property
    def usd_per_hour(self) -> float:
        """c: rent and traffic of one machine."""
        return self.offer.price_usd_per_hour + self.traffic_usd_per_hour

    @property
    def start_usd(self) -> float:
        """Rent until a machine that is launched now takes leases."""
        return self.offer.price_usd_per_hour * self.start_up_s / 3600

    @property
    def age_s(self) -> float:
        """D + L: from the end of a step until a group made with its version is scored."""
        return self.dissemination_s + self.group_latency_s

    def usd_per_group(self, start_usd_per_hour: float = 0.0) -> float:
        """Cost of one group, with so much an hour for its start."""
        return (self.usd_per_hour + start_usd_per_hour) / (3600 * self.effective_groups_per_s)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An offer that is not rented, and why."""

    offer: Offer
    reason: str
    """In a few words, the same for all that are refused alike."""
    sentence: str
    """With the numbers of this one."""


@dataclass(frozen=True, slots=True)
class Rental:
    """One paid interval of a worker, and what it showed."""

    offer: str
    """The offer's name."""
    hours: float
    running: bool
    """Whether it is paid for still."""
    lost: bool
    """Whether it ended by itself; the fleet ends what it no longer needs."""
    start_up_s: float | None
    """From launch until the worker registered; None if it never did."""
    dissemination_s: float | None
    """Mean D of its loads; None before the first."""
    groups_per_s: float | None
    """μ of the worker; None if it was not measured."""
