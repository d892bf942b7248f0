"""Where in a vLLM model each of a snapshot's weights goes, learned by watching vLLM place them once.

vLLM's own loaders decide that with every version anew, in Python, beside which an engine in the same process hardly generates.
What they decide depends on names and shapes alone, so that the copies they make can be made again without them.

Invariant: a placement, given the weights that it was learned from, leaves every parameter and buffer bit by bit as vLLM did.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""What makes of a layer's weight at most another order of it, as often as it is asked."""
PERIOD = 65_537
"""Of the numbers by which a weight's parts are recognised: a prime, which is no weight's width."""


class _View(NamedTuple):
    """A part of a tensor; the offset counts from the tensor's first element."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


class _Copy(NamedTuple):
    """A part of the snapshot's weight of this name, and the part of a parameter that it becomes."""

    name: str
    source: _View
    target: _View


class _Place(NamedTuple):
    """A parameter as it is before vLLM processes it, the layers that have it in common, and what it consists of."""

    layers: list[nn.Module]
    name: str
    shape: torch.Size
    dtype: torch.dtype
    copies: list[_Copy]

    @property
    def parameter(self) -> nn.Parameter:
        return getattr(self.layers[0], self.name)

    @property
    def taken_away(self) -> bool:
        """Whether vLLM, which has packed it, has no parameter any more."""
        return self.parameter.shape != self.shape

    def anew(self) -> nn.Parameter:
        parameter = nn.Parameter(torch.empty(self.shape, dtype=self.dtype, device="cpu"), requires_grad=False)
        for layer in self.layers:
            setattr(layer, self.name, parameter)
        return parameter

    def process(self) -> None:
        for layer in self.layers:
            if isinstance(method := getattr(layer, "quant_method", None), QuantizeMethodBase):
                method.process_weights_after_loading(layer)


class Placement:
    """The copies that load one model."""

    def __init__(self, places: list[_Place]) -> None:
        self._places = places

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Have the model compute with these weights, contiguous ones by the names of a snapshot."""
        kept = [place for place in self._places if not place.taken_away]
        _fill([(place, place.parameter) for place in kept], weights)
        for place in self._places:
            if place.taken_away:
                _fill([(place, place.anew())], weights)
            place.process()


def _fill(parameters: list[tuple[_Place, nn.Parameter]], weights: Mapping[str, Tensor]) -> None:
    """In one go: each return to Python makes an engine that generates meanwhile wait."""
    copies = [(copy, parameter) for place, parameter in parameters for copy in place.copies]
    if copies:
        targets = [copy.target.of(parameter) for copy, parameter in copies]
        torch._foreach_copy_(targets, [copy.source.of(weights[copy.name]) for copy, _ in copies])


@torch.no_grad()
def learn_placement(model: nn.Module, expected: Mapping[str, Tensor]) -> Placement | None:
    """The placement of weights like the `expected` ones, of which only shape and format are read, in a model in host memory
    that vLLM has not processed yet. The model is given other weights thereby.

    None where vLLM does more to weights than copy and pack them, as to quantised ones.
    """
    if not _is_plain(model):
        return None
    weights = {name: _recognisable(weight, seed) for seed, (name, weight) in enumerate(expected.items())}
    buffers = [buffer.clone() for buffer in model.buffers()]
    parameters = list(model.parameters())
    _blank(parameters)
    with _Watch(weights) as watch:
        model.load_weights(iter(weights.items()))
    placed = [parameter.clone() for parameter in parameters]
    _blank(parameters)
    places = _places(model, watch.copies)
    _fill([(place, place.parameter) for place in places], weights)
    found = zip([*model.parameters(), *model.buffers()], [*placed, *buffers], strict=True)
    return Placement(places) if all(torch.equal(one, other) for one, other in found) else None


def _is_plain(model: nn.Module) -> bool:
    """Whether each layer's processing is known to ask for nothing but its own weight."""
    if hasattr(model, "process_weights_after_loading"):
        return False
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and type(method) not in PLAIN:
            return False
        if is_deferred_attention_layer(layer) and type(layer) is not Attention:
            return False
    return True


def _recognisable(weight: Tensor, seed: int) -> Tensor:
    """A weight of the same shape and format whose parts differ from each other's and from another seed's."""
    noise = torch.randn(PERIOD, generator=torch.Generator().manual_seed(seed)).to(weight.dtype)
    count = weight.numel()
    return noise.repeat(-(-count // PERIOD))[:count].reshape(weight.shape)


def _blank(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.zero_()


def _view(tensor: Tensor) -> _View:
    return _View(tuple(tensor.shape), tensor.stride(), tensor.storage_offset())


class _Seen(NamedTuple):
    """A copy out of the weight of this name, into what lies at this address."""

    name: str
    source: _View
    address: int
    target: _View


class _Watch(TorchDispatchMode):
    """Notes what is copied out of given weights."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {_address(weight): name for name, weight in weights.items()}
        self.copies: list[_Seen] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and (name := self._names.get(_address(args[1]))) is not None:
            self.copies.append(_Seen(name, _view(args[1]), _address(args[0]), _view(args[0])))
        return func(*args, **(kwargs or {}))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _places(model: nn.Module, copies: list[_Seen]) -> list[_Place]:
    """One for each parameter that something was copied into."""
    places: dict[int, _Place] = {}
    for layer in model.modules():
        for name, own in layer.named_parameters(recurse=False):
            place = places.setdefault(_address(own), _Place([], name, own.shape, own.dtype, []))
            place.layers.append(layer)
    for seen in copies:
        if seen.address in places:
            places[seen.address].copies.append(_Copy(seen.name, seen.source, seen.target))
    return [place for place in places.values() if place.copies]
