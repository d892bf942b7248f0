"""How large a run's snapshots are, before the model is loaded.

Invariant: a look at the headers of the weights, no more.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from echo2.capacity.transfer import cap_warning, told_bytes
from echo2.config import Config

TINY_PARAMETERS = 600_000
LENGTH_BYTES = 8
"""What stands before the header of a safetensors file: its length."""
MOST_HEADER_BYTES = 100_000_000
VALUE_BYTES = {"float32": 4, "bfloat16": 2}


def snapshot_bytes(config: Config) -> int:
    """About how many bytes a snapshot in full has; 0 where that cannot be told, as with adapters, which are small."""
    told = told_bytes(config)
    if told or config.learner.lora.rank or config.learner.engine == "simulated":
        return told
    return VALUE_BYTES[config.model.dtype] * _parameters(config.model.path)


def warning_of_cap(config: Config) -> str:
    """What is to be said of a cap on the uplink under which snapshots come too late; empty where nothing is."""
    warning = cap_warning(config, snapshot_bytes(config))
    return f"warning: {warning}" if warning else ""


def _parameters(path: str) -> int:
    if path == "tiny":
        return TINY_PARAMETERS
    return sum(_values_in(file) for file in Path(path).expanduser().glob("*.safetensors"))


def _values_in(file: Path) -> int:
    """Values of all tensors in a safetensors file; 0 for one that is none, which is for others to say."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
        try:
            header = json.loads(opened.read(length)) if length <= MOST_HEADER_BYTES else {}
        except ValueError:
            return 0
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
