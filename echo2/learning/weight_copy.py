"""A version's weights, copied out of the model while training goes on.

Invariants: what a copy holds are the weights of the moment at which it was begun; on CUDA the copy runs on a stream of its own
into page-locked memory, and whoever changes the weights makes the device wait for `copied` first, not the program. Of weights
that are cut into parts, every rank gives its own, one weight after the other, and one rank keeps the whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors.torch import save
from torch import Tensor

from echo2.learning.sharding import Shards, whole_weight
from echo2.models.loading import DTYPES, Dtype


class WeightCopy:
    """Begun when it is made; on the CPU that takes as long as the copy."""

    def __init__(self, weights: Mapping[str, Tensor], dtype: Dtype, shards: Shards) -> None:
        self.copied: torch.cuda.Event | None = None
        self._weights: dict[str, Tensor] = {}
        if shards.device.type != "cuda":
            self._gather(weights, dtype, shards.leads)
            return
        stream = torch.cuda.Stream(shards.device)
        stream.wait_stream(torch.cuda.current_stream(shards.device))
        with torch.cuda.stream(stream):
            self._gather(weights, dtype, shards.leads)
            self.copied = stream.record_event()

    def payload(self) -> bytes:
        """The weights as one safetensors message; may be called by another thread of the rank that leads, and waits for the
        copy."""
        if self.copied is not None:
            self.copied.synchronize()
        return save(self._weights, metadata={"format": "pt"})

    def _gather(self, weights: Mapping[str, Tensor], dtype: Dtype, kept: bool) -> None:
        for name, weight in weights.items():
            wanted = DTYPES[dtype] if weight.is_floating_point() else weight.dtype
            whole = whole_weight(weight.detach().to(wanted))
            if kept:
                self._weights[name] = _host_copy(whole)


def _host_copy(weight: Tensor) -> Tensor:
    if not weight.is_cuda:
        return weight.clone(memory_format=torch.contiguous_format)
    return torch.empty(weight.shape, dtype=weight.dtype, pin_memory=True).copy_(weight, non_blocking=True)
