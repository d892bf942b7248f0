"""What a fleet of rented machines needs of a cloud.

Invariants, which every implementation holds: a machine has one name and one run, given at its launch; asking again for a name
whose machine is there, or is on its way, changes nothing; stopping a name also takes back a launch that is on its way, and may
be repeated; a list holds every machine of the run that is paid for, and for a while those that ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from echo2.capacity.offers import Offer
from echo2.errors import UserError


class CloudTrouble(UserError):
    """The cloud did not answer, or not to the end: nobody knows whether it did what it was asked for."""


class LaunchFailed(UserError):
    """There is no machine and there will be none: lack of capacity, a quota, a refusal."""


class SetupFailed(LaunchFailed):
    """There was a machine, but the worker could not be installed on it: another one would fare no better."""


class MachineFailed(LaunchFailed):
    """There was a machine, but not for long enough: taken back or out of order before a worker ran on it."""


@dataclass(frozen=True, slots=True)
class CloudMachine:
    """A machine as the cloud knows it. Times in seconds since the epoch."""

    name: str
    offer: str
    """The offer's name."""
    price_usd_per_hour: float
    launched_at_s: float
    """From when on it is paid for."""
    ended_at_s: float | None = None
    """Until when it was; None while it is there."""
    ending: str = ""
    """How it ended, for a message."""


class Cloud(Protocol):
    """Machines for rent, for workers of runs. Calls may come from several threads."""

    def launch(self, run_id: str, name: str, offer: Offer, workers: int) -> None:
        """Rent a machine for `workers` workers, called `name`, or `name`.0, `name`.1 … where it runs several.

        Returns once it is there, not once they are ready. Raises LaunchFailed, CloudTrouble.
        """

    def machines(self, run_id: str) -> list[CloudMachine]:
        """Those of the run. Raises CloudTrouble."""

    def stop(self, run_id: str, name: str) -> None:
        """End the machine; when this returns it is not paid for any more. Raises CloudTrouble."""
