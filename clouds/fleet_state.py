"""What a fleet of rented machines knows, on disk.

Invariant: a reader finds the former state or the new one, never a part; what `save` was given survives kill −9 and power loss.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from clouds.cloud import CloudMachine
from clouds.reconciler import Memory
from echo2.capacity.offers import Offer
from echo2.durability import naming, write_atomically
from echo2.errors import UserError


@dataclass(frozen=True, slots=True)
class Record:
    """A machine that was asked for and is not known to be gone. Times in seconds since the epoch."""

    offer: Offer
    workers: int
    """Workers that it runs."""
    asked_at_s: float
    seen: CloudMachine | None = None
    """As the cloud listed it last; None if it never did."""
    was_ready: bool = False
    draining_since_s: float | None = None
    failed: bool = False
    """Whether its launch failed though the cloud lists it."""
    lost: bool = False
    """Whether its workers fell silent though the cloud lists it."""
    stopping: bool = False
    """Whether it was told to stop."""
    stopped: bool = False
    """Whether the cloud said that it did."""


@dataclass(frozen=True, slots=True)
class FleetState:
    """What the next process must know of this one."""

    memory: Memory = field(default_factory=Memory)
    records: dict[str, Record] = field(default_factory=dict)
    """By the machine's name."""


_STATE = TypeAdapter(FleetState)


def save_state(file: Path, state: FleetState) -> None:
    """Returns once it is on the disk. Raises DiskError where that does not take it."""
    with naming(file):
        write_atomically(file, json.dumps(asdict(state), indent=1) + "\n")


def load_state(file: Path) -> FleetState | None:
    """What was saved last; None if nothing was. Raises UserError for a file that is damaged."""
    try:
        return _STATE.validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise UserError(
            f"{file} is damaged ({error.error_count()} faults): delete it, and the fleet takes up what the cloud lists"
        ) from None
