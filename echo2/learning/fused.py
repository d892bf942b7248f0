"""Linear head, temperature and log-softmax in one function, tile by tile, so that no token has all its logits in memory.

Invariants: what exists of [N, V] at any time are two tiles of `TILE_LOGITS`; the logits are made in the forward pass and again
in the backward pass; products and sums are in float32 (float64 for float64 inputs) whatever the weights' number format.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

TILE_VOCABULARY = 2048
"""Tokens of the vocabulary in a tile: enough to make its products worthwhile."""
TILE_LOGITS = 1 << 22
"""Logits in a tile: 16 MiB in float32, which stays near the processor."""


def head_log_probs(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N] of `targets` [N] under softmax(hidden [N, H] · headᵀ [H, V] / temperature), and the entropies [N]
    of these distributions; both float32, or float64 if `hidden` is.

    Hidden states and head may be of two number formats; each gets its gradient in its own.
    """
    return _HeadLogProbs.apply(hidden, head, targets, temperature)


class _HeadLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        normalisers, log_probs, entropies = _statistics(hidden, head, targets, temperature)
        ctx.save_for_backward(hidden, head, targets, normalisers, entropies)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, head, targets, normalisers, entropies = ctx.saved_tensors
        by_log_prob, by_entropy = (None if gradient is None else gradient / ctx.temperature for gradient in gradients)
        if by_log_prob is None:
            by_log_prob = torch.zeros_like(normalisers)
        hidden_gradient = torch.zeros_like(hidden, dtype=normalisers.dtype)
        head_gradient = torch.empty_like(head) if ctx.needs_input_grad[1] else None
        for columns in _tiles(len(head), TILE_VOCABULARY):
            tile_head = head[columns].to(normalisers.dtype)
            tile_gradient = None if head_gradient is None else torch.zeros_like(tile_head)
            for rows in _tiles(len(hidden), _tile_rows(head)):
                tile_hidden = hidden[rows].to(normalisers.dtype)
                logits = (tile_hidden @ tile_head.T).div_(ctx.temperature)
                surprise = None if by_entropy is None else (by_entropy[rows], entropies[rows])
                gradient = _logits_gradient(logits, normalisers[rows], by_log_prob[rows], surprise)
                places, inside = _places(targets[rows], columns, len(tile_head))
                gradient.scatter_add_(1, places[:, None], torch.where(inside, by_log_prob[rows], 0.0)[:, None])
                hidden_gradient[rows].addmm_(gradient, tile_head)
                if tile_gradient is not None:
                    tile_gradient.addmm_(gradient.T, tile_hidden)
            if head_gradient is not None:
                head_gradient[columns] = tile_gradient
        return hidden_gradient.to(hidden.dtype), head_gradient, None, None


def _logits_gradient(
    logits: Tensor, normalisers: Tensor, by_log_prob: Tensor, by_entropy: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Overwrites a tile of logits z with the gradient by z, but for what the targets' own logits add to it.

    ∂ log p(target) / ∂z = one-hot(target) − p and ∂H / ∂z = −p·(log p + H).
    """
    log_probs = logits.sub_(normalisers[:, None])
    if by_entropy is None:
        return log_probs.exp_().mul_(-by_log_prob[:, None])
    gradients, entropies = by_entropy
    probs = log_probs.exp()
    return log_probs.add_(entropies[:, None]).mul_(-gradients[:, None]).sub_(by_log_prob[:, None]).mul_(probs)


def _statistics(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logarithms of the softmax's denominators, log-probabilities and entropies, each [N], in one pass over the tiles.

    The running sums Σ e^(z − m) and Σ z·e^(z − m) are scaled anew whenever a tile raises the maximum m (Milakov and Gimelshein,
    "Online normalizer calculation for softmax"); the entropy is ln Σ e^z − Σ p·z.
    """
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    maxima = torch.full((len(hidden),), -torch.inf, dtype=dtype, device=hidden.device)
    sums, weighted, chosen = (torch.zeros_like(maxima) for _ in range(3))
    for columns in _tiles(len(head), TILE_VOCABULARY):
        tile_head = head[columns].to(dtype)
        for rows in _tiles(len(hidden), _tile_rows(head)):
            logits = (hidden[rows].to(dtype) @ tile_head.T).div_(temperature)
            places, inside = _places(targets[rows], columns, len(tile_head))
            chosen[rows] += torch.where(inside, logits.gather(1, places[:, None])[:, 0], 0.0)
            maximum = torch.maximum(maxima[rows], logits.amax(1))
            shrink = (maxima[rows] - maximum).exp_()
            maxima[rows] = maximum
            powers = (logits - maximum[:, None]).exp_()
            weighted[rows] = weighted[rows] * shrink + torch.linalg.vecdot(powers, logits)
            sums[rows] = sums[rows] * shrink + powers.sum(1)
    normalisers = maxima + sums.log()
    return normalisers, chosen - normalisers, normalisers - weighted / sums


def _tiles(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _tile_rows(head: Tensor) -> int:
    return max(1, TILE_LOGITS // min(len(head), TILE_VOCABULARY))


def _places(targets: Tensor, columns: slice, width: int) -> tuple[Tensor, Tensor]:
    """Where each target lies in the tile, and whether it lies there at all."""
    inside = (targets >= columns.start) & (targets < columns.stop)
    return (targets - columns.start).clamp_(0, width - 1), inside
