"""A model whose weights are those of a base plus low-rank adapters, which are all that a new version brings.

Invariants: every version is made of the base's weights anew, so nothing of an earlier one is left and no rounding adds up; a
version's adapters are taken whole or not at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from echo2.dissemination.manifest import Content
from echo2.errors import SnapshotError
from echo2.models.loading import load_weights
from echo2.models.tensors import tensors_in

A, B = ".lora_A.weight", ".lora_B.weight"


class AdaptedModel:
    """Merges adapters into a model: W = W₀ + scale · B·A (Hu et al. 2021, "LoRA"), in float32, cast to the model's format."""

    def __init__(self, model: Any, base: Content, scale: float) -> None:
        """`base` has all weights of the model, as `export_weights` writes them, and stays in host memory.

        Raises SnapshotError if they are another model's.
        """
        load_weights(model, base)
        self._model = model
        self._base = tensors_in(base)
        self._scale = scale
        self._adapted: set[str] = set()

    @torch.no_grad()
    def load(self, snapshot: Content) -> None:
        """Take a version's adapters. Raises SnapshotError, with the model unchanged, if they do not fit it."""
        adapters = tensors_in(snapshot)
        names = {name.removesuffix(A).removesuffix(B) for name in adapters}
        if adapters.keys() != {name + half for name in names for half in (A, B)} or self._adapted not in (set(), names):
            raise SnapshotError("snapshot does not hold the run's adapters: it is of another model")
        for name in names:
            self._check(name, adapters[name + A], adapters[name + B])
        for name in names:
            self._merge(name, adapters[name + A], adapters[name + B])
        self._adapted = names

    def _check(self, name: str, a: Tensor, b: Tensor) -> None:
        base = self._base.get(f"{name}.weight")
        if base is None:
            raise SnapshotError(f"snapshot adapts {name}, which the model does not have: it is of another model")
        shape = (b.shape[0], a.shape[1])
        if a.shape[0] != b.shape[1] or base.shape != (shape[::-1] if self._turned(name) else shape):
            raise SnapshotError(f"snapshot's adapter of {name} does not have the shape of its weight: it is of another model")

    def _merge(self, name: str, a: Tensor, b: Tensor) -> None:
        weight = self._model.get_submodule(name).weight
        change = (b.to(weight.device).float() @ a.to(weight.device).float()) * self._scale
        weight.copy_(self._base[f"{name}.weight"].to(weight.device).float() + (change.T if self._turned(name) else change))

    def _turned(self, name: str) -> bool:
        """Whether the layer holds its weight the other way round, as GPT-2's do."""
        return not isinstance(self._model.get_submodule(name), nn.Linear)
