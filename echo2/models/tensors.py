"""The tensors of a safetensors message, where they lie.

Invariant: nothing is copied, so that weights of many gigabytes are in memory once while a model takes them.
"""

from __future__ import annotations

import json
import math
import warnings

import torch
from torch import Tensor

from echo2.dissemination.manifest import Content
from echo2.errors import SnapshotError

FORMATS = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


def tensors_in(snapshot: Content) -> dict[str, Tensor]:
    """The tensors by name, which look into `snapshot` and must not be written to.

    Raises SnapshotError unless it is a complete safetensors message of formats that weights have.
    """
    view = memoryview(snapshot)
    start = 8 + int.from_bytes(view[:8], "little")
    try:
        header = json.loads(bytes(view[8:start]))
        header.pop("__metadata__", None)
        return {name: _tensor(view[start:], **fields) for name, fields in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise SnapshotError(f"snapshot of {len(view)} bytes is not a complete safetensors message ({error!r})") from None


def _tensor(data: memoryview, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    """Raises ValueError, TypeError, KeyError or RuntimeError for what does not fit together or is cut short."""
    first, end = data_offsets
    count = math.prod(shape)
    if not 0 <= first <= end <= len(data) or end - first != count * FORMATS[dtype].itemsize:
        raise ValueError(f"{shape} of {dtype} in the bytes {first} to {end} of {len(data)}")
    if not count:
        return torch.empty(shape, dtype=FORMATS[dtype])
    with warnings.catch_warnings():
        # torch warns of memory that must not be written to, which is what is wanted here.
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(data, dtype=FORMATS[dtype], count=count, offset=first).reshape(shape)
