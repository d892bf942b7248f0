"""Which of torch's errors say that memory ran out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from echo2.rollout.engine import OutOfMemory

CPU_ALLOCATOR = "DefaultCPUAllocator"
"""Names itself in the RuntimeError that it raises."""


@contextmanager
def shortage_as_such() -> Iterator[None]:
    """Raises OutOfMemory where memory, of a GPU or the machine, runs out within."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemory(str(error)) from error
    except RuntimeError as error:
        if CPU_ALLOCATOR in str(error):
            raise OutOfMemory(str(error)) from error
        raise
