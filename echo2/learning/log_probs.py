"""Log-probabilities of sampled tokens, without the logits of a whole batch in memory.

Invariants: the logits of position j belong to the token at j + 1; they are made at completion positions only, a tile at a
time, so [rows, T, vocabulary] never exists.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from echo2.errors import ConfigError
from echo2.learning.batch import MicroBatch
from echo2.learning.fused import head_log_probs
from echo2.learning.packing import packed_hidden


def completion_log_probs(
    model: Any, micro_batch: MicroBatch, temperature: float, autocast: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N] and entropies [N] of the distributions softmax(logits / temperature) at the N completion tokens.

    `autocast` is the number format of the model's matrix products, its head excepted; None leaves it to the weights. The
    model's attention must be the packed one if `micro_batch` is packed. Padding lies on the right, where causal attention
    cannot see it, so no mask is needed.
    """
    token_ids = micro_batch.token_ids
    with torch.autocast(token_ids.device.type, autocast, enabled=autocast is not None):
        if micro_batch.packed is None:
            hidden = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
        else:
            hidden = packed_hidden(model, token_ids, micro_batch.packed)
    hidden = hidden.flatten(0, 1).index_select(0, micro_batch.places)
    return head_log_probs(hidden, model.get_output_embeddings().weight, micro_batch.targets, temperature)


def recompute_layers(model: Any) -> None:
    """Make every layer of `model` keep its input alone in a forward pass, and compute the rest again for the gradient.

    Raises ConfigError if the model marks no layers for that.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"learner.gradient_checkpointing: {type(model).__name__} has no layers that can be computed again: set it to false"
        )
    for layer in layers:
        # transformers' own switch acts in training mode alone, which would bring dropout back.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


@torch.no_grad()
def check_head(model: Any) -> None:
    """Raise ConfigError if the model's logits are not a plain product of its last hidden state and its output embeddings."""
    head = model.get_output_embeddings().weight
    token_ids = torch.arange(min(8, len(head)), device=head.device)[None]
    hidden = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
    logits = model(input_ids=token_ids, use_cache=False).logits
    if not torch.allclose(hidden @ head.T, logits, rtol=1e-3, atol=1e-3):
        raise ConfigError(
            f"model.path: {type(model).__name__} does more to its logits than a linear head (a bias, scale or soft cap), which "
            f"the learner does not support: choose another model"
        )
