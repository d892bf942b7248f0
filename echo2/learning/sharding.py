"""Weights, gradients and optimizer state in equal parts on several devices (FSDP2), one process or *rank* for each.

Invariants: gradients are summed over the ranks, not averaged, so that a loss which each rank has already divided by the whole
batch's divisor has the gradient of the whole batch; every rank takes part in everything here, in the same order; with a single
device all of it is free of charge and of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Whole(nn.Module):
    """A model as if it were in one place: within a call its weights are gathered, a layer's for as long as it computes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[..., Any], *arguments: Any) -> Any:
        """`compute(model, *arguments)`."""
        return compute(self.model, *arguments)


class Shards:
    """The parts into which a learner's weights are cut, and the ranks that hold them; without a mesh, one that holds all."""

    def __init__(self, device: torch.device, mesh: DeviceMesh | None = None) -> None:
        """`device` is this rank's."""
        self.device = device
        self._mesh = mesh
        self.rank: int = mesh.get_rank() if mesh else 0
        self.ranks: int = mesh.size() if mesh else 1

    @property
    def leads(self) -> bool:
        """Whether this rank is the one that reads, writes and publishes."""
        return self.rank == 0

    def cut(self, model: nn.Module) -> Whole:
        """Leave of the weights of `model`, which is the same on all ranks, each its part, on its device."""
        whole = Whole(model)
        if self._mesh is None:
            return whole.to(self.device)
        from torch.distributed.fsdp import FSDPModule, fully_shard

        # Layer by layer, so that no device ever holds the whole.
        for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
            fully_shard(layer, mesh=self._mesh)
        fully_shard(whole, mesh=self._mesh)
        for module in whole.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return whole

    @torch.no_grad()
    def peek(self, whole: Whole, compute: Callable[..., Any], *arguments: Any) -> Any:
        """`whole(compute, *arguments)` without a gradient, which leaves nothing gathered."""
        result = whole(compute, *arguments)
        if self._mesh is not None:
            whole.reset_iter_state()
        return result

    def table(self, row: Tensor) -> Tensor:
        """Every rank's `row` [n], as [ranks, n]."""
        if self._mesh is None:
            return row[None]
        rows = [torch.empty_like(row) for _ in range(self.ranks)]
        torch.distributed.all_gather(rows, row, group=self._mesh.get_group())
        return torch.stack(rows)


def whole_weight(weight: Tensor) -> Tensor:
    """All of a weight, of which this rank may hold a part; on every rank."""
    from torch.distributed.tensor import DTensor

    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def own_part(weight: Tensor) -> Tensor:
    """What this rank holds of a weight."""
    from torch.distributed.tensor import DTensor

    return weight.to_local() if isinstance(weight, DTensor) else weight


def like(whole: Tensor, weight: Tensor) -> Tensor:
    """A copy of `whole`, cut and placed as `weight` is, without its storage."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(weight, DTensor):
        return whole.to(weight.device, copy=True)
    # Each rank has all of it, so nothing has to travel; the clone lets go of the rest.
    part = distribute_tensor(whole.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None)
    return part.clone()
