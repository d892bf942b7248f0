"""A version's weights, copied out of the model while training goes on.

Invariants: what a copy holds are the weights of the moment at which it was begun; on CUDA the copy runs on a stream of its own
into page-locked memory, and whoever changes the weights makes the device wait for `copied` first, not the program.
"""

from __future__ import annotations

import torch
from safetensors.torch import save
from torch import Tensor, nn

from echo2.models.loading import DTYPES, Dtype, untied_weights


class WeightCopy:
    """Begun when it is made; on the CPU that takes as long as the copy."""

    def __init__(self, model: nn.Module, dtype: Dtype) -> None:
        weights = untied_weights(model)
        device = next(iter(weights.values())).device
        self.copied: torch.cuda.Event | None = None
        if device.type != "cuda":
            self._weights = {name: _host_copy(weight, dtype) for name, weight in weights.items()}
            return
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._weights = {name: _host_copy(weight, dtype) for name, weight in weights.items()}
            self.copied = stream.record_event()

    def payload(self) -> bytes:
        """The weights as one safetensors message; may be called by another thread, and waits for the copy."""
        if self.copied is not None:
            self.copied.synchronize()
        return save(self._weights, metadata={"format": "pt"})


def _host_copy(weight: Tensor, dtype: Dtype) -> Tensor:
    weight = weight.detach()
    wanted = DTYPES[dtype] if weight.is_floating_point() else weight.dtype
    if not weight.is_cuda:
        return weight.to(wanted, copy=True, memory_format=torch.contiguous_format)
    host = torch.empty(weight.shape, dtype=wanted, pin_memory=True)
    return host.copy_(weight.to(wanted), non_blocking=True)
