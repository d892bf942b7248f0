"""The weights of a model that vLLM runs, in the form in which it computes with them.

vLLM fuses, renames and, on CPUs, packs what a snapshot holds, which takes far longer than to copy the result. `SpareWeights`
does it in a second set of weights in host memory while the first one generates.

Invariant: a model is given weights that were taken whole, or keeps its own.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from echo2.rollout.vllm_placement import learn_placement

log = logging.getLogger(__name__)
PACKED = "cpu_linear"
"""Where vLLM's linear layers on CPUs have the function that computes with their packed weight."""
HOST = torch.device("cpu")
WEIGHTLESS = ("RotaryEmbedding", "ParallelLMHead")
"""In the names of the layers of which a snapshot has no weights: positions are computed, and an output embedding that is the
input's travels once."""


class SpareWeights:
    """A second set of a running model's weights; `load` may run in another thread than the model."""

    def __init__(self, vllm_config: VllmConfig, expected: Mapping[str, Tensor], model: nn.Module) -> None:
        """Of `model`, which runs with `vllm_config`, for snapshots of weights like the `expected` ones."""
        self._model_config = vllm_config.model_config
        with set_default_torch_dtype(self._model_config.dtype), HOST:
            self._model = initialize_model(_apart(vllm_config))
            _part(self._model, model)
            self._placement = learn_placement(self._model, expected)
            if self._placement is None:
                log.warning("vLLM places this model's weights itself with every version, which slows generation meanwhile")
                record_metadata_for_reloading(self._model)
            process_weights_after_loading(self._model, self._model_config, HOST)
        if not current_platform.is_cpu():
            for weight in _own_weights(self._model):
                # Locked pages are copied to the device several times as fast.
                weight.data = weight.data.pin_memory()

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take these weights, by the names of a snapshot, all of them."""
        if self._placement is not None:
            self._placement.load(weights)
            return
        initialize_layerwise_reload(self._model)
        self._model.load_weights(weights.items())
        finalize_layerwise_reload(self._model, self._model_config)
        pack_heads(self._model)

    @torch.no_grad()
    def give(self, model: nn.Module) -> None:
        """Copy the weights into the running model's, whose addresses stay, as recorded GPU graphs ask; swap what is packed."""
        for own, spare in zip(_own_weights(model), _own_weights(self._model), strict=True):
            own.data.copy_(spare.data)
        for own_layer, spare_layer in zip(model.modules(), self._model.modules(), strict=True):
            if hasattr(own_layer, PACKED):
                packed = getattr(own_layer, PACKED)
                setattr(own_layer, PACKED, getattr(spare_layer, PACKED))
                setattr(spare_layer, PACKED, packed)


def hush_weightless_layers() -> None:
    """Keep from the log that layers which have no weights of their own in a snapshot were given none."""
    # vLLM says so with every version, as a failure. It is none: names and shapes of all weights are checked before they are
    # taken, and the engine's proof comes after.
    logging.getLogger(finalize_layerwise_reload.__module__).addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    said = record.getMessage()
    return not (said.endswith(": Failed to load weights") and any(name in said for name in WEIGHTLESS))


def pack_heads(model: nn.Module) -> None:
    """Have the output embeddings anew. On CPUs their layer computes with a copy in an order of its own, which a reload leaves
    as it was where the weight is that of the input embeddings."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
            module.quant_method.process_weights_after_loading(module)


def _own_weights(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers, each once, in the order of the modules."""
    return [*model.parameters(), *model.buffers()]


def _apart(vllm_config: VllmConfig) -> Any:
    """The same configuration for a model that shares no registry of layers with the running one."""
    apart = copy.copy(vllm_config)
    apart.compilation_config = copy.copy(vllm_config.compilation_config)
    apart.compilation_config.static_forward_context = {}
    apart.compilation_config.static_all_moe_layers = []
    return apart


def _part(model: nn.Module, other: nn.Module) -> None:
    """Give `model` a copy of each layer that it has in common with `other`, as models have rotary embeddings."""
    common = {id(layer) for layer in other.modules()}
    copies: dict[int, nn.Module] = {}
    for layer in list(model.modules()):
        for name, child in layer.named_children():
            if id(child) in common:
                setattr(layer, name, copies.setdefault(id(child), copy.deepcopy(child)))
