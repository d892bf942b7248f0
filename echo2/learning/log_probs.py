"""Log-probabilities of sampled tokens, without the logits of a whole batch in memory.

Invariants: the logits of position j belong to the token at j + 1; they are made at completion positions only, a chunk at a
time, in the forward pass and again in the backward pass, so [rows, T, vocabulary] never exists.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from echo2.errors import ConfigError
from echo2.learning.batch import MicroBatch

CHUNK_LOGITS = 1 << 25
"""Logits held at a time: 128 MiB in float32."""


def completion_log_probs(model: Any, micro_batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N] and entropies [N] of the distributions softmax(logits / temperature) at the N completion tokens.

    Only the log-probabilities carry a gradient. Padding lies on the right, where causal attention cannot see it, so no mask
    is needed.
    """
    hidden = model.base_model(input_ids=micro_batch.token_ids, use_cache=False).last_hidden_state
    hidden = hidden.flatten(0, 1).index_select(0, micro_batch.places)
    head = model.get_output_embeddings().weight
    return _HeadLogProbs.apply(hidden, head, micro_batch.targets, temperature)


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


class _HeadLogProbs(torch.autograd.Function):
    """Linear head, temperature and log-softmax in one, over chunks of rows whose logits are recomputed for the gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        log_probs, entropies, normalisers = (hidden.new_empty(len(hidden)) for _ in range(3))
        for part in _chunks(hidden, head):
            logits = (hidden[part] @ head.T).div_(temperature)
            normalisers[part] = logits.logsumexp(-1)
            log_probs[part] = logits.gather(-1, targets[part, None])[:, 0] - normalisers[part]
            probabilities = (logits - normalisers[part, None]).exp_()
            entropies[part] = normalisers[part] - probabilities.mul_(logits).sum(-1)
        ctx.save_for_backward(hidden, head, targets, normalisers)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        # d log p(target) / d logits = (one-hot(target) − p) / temperature
        hidden, head, targets, normalisers = ctx.saved_tensors
        hidden_gradient, head_gradient = torch.empty_like(hidden), torch.zeros_like(head)
        scaled = gradients[0][:, None] / ctx.temperature
        for part in _chunks(hidden, head):
            logits = (hidden[part] @ head.T).div_(ctx.temperature)
            logits_gradient = (logits - normalisers[part, None]).exp_().mul_(-scaled[part])
            logits_gradient.scatter_add_(1, targets[part, None], scaled[part])
            hidden_gradient[part] = logits_gradient @ head
            head_gradient.addmm_(logits_gradient.T, hidden[part])
        return hidden_gradient, head_gradient, None, None


def _chunks(hidden: Tensor, head: Tensor) -> list[slice]:
    rows = max(1, CHUNK_LOGITS // len(head))
    return [slice(start, start + rows) for start in range(0, len(hidden), rows)]
