"""From a batch of groups to micro-batches, packed or padded, and to the ranks' shares of them.

Invariants: the token ids that were sampled are the ones that are trained; every completion token of the batch counts in exactly
one micro-batch of one rank, with the advantage of its own group and member; a micro-batch holds at most `token_limit` tokens,
padding included, unless a single sequence is longer; every rank has as many micro-batches as the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from echo2.learning.objective import DEFAULT_OBJECTIVE, Objective
from echo2.learning.packing import Layout, layout
from echo2.protocol import Batch, Rollout

PADDING_TOKEN_ID = 0
"""Any valid id serves: padding on the right is seen by no completion token."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some sequences of a batch, end to end in one row or padded on the right to the longest, and their N completion tokens
    laid flat."""

    token_ids: Tensor
    """[rows, T] int64: prompts and completions without the last token, which predicts nothing; one row where packed."""
    packed: Layout | None
    """Where the sequences lie in the row; None where each has a row of its own."""
    places: Tensor
    """[N] int64: index into the flattened [rows · T] of the position that predicts each completion token."""
    targets: Tensor
    """[N] int64: the completion tokens."""
    behaviour_log_probs: Tensor
    """[N] float32: their log-probabilities when they were sampled."""
    advantages: Tensor
    """[N] float32."""
    lengths: Tensor
    """[rows] int64: completion tokens of each sequence, in the order in which they lie in the flat arrays."""
    counts: bool = True
    """False where its tokens count elsewhere: it only keeps this rank in step with others, which have one more to compute."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank computes of a batch."""

    parts: list[MicroBatch]
    tokens: int
    """Completion tokens of the whole batch, over all ranks."""
    sequences: int
    """Sequences of the whole batch, over all ranks."""


@dataclass(frozen=True, slots=True)
class _Sequence:
    prompt_token_ids: tuple[int, ...]
    rollout: Rollout
    advantage: float

    @property
    def length(self) -> int:
        """Positions to compute: all tokens but the last."""
        return len(self.prompt_token_ids) + len(self.rollout.token_ids) - 1


def rank_share(
    batch: Batch,
    token_limit: int,
    device: torch.device,
    objective: Objective = DEFAULT_OBJECTIVE,
    *,
    packed: bool = False,
    rank: int = 0,
    ranks: int = 1,
) -> Share:
    """What falls to `rank` of the sequences that `objective` trains, in as few micro-batches as `token_limit` allows.

    Packed, a micro-batch is one row without padding; otherwise neighbours in length share one, which keeps their padding short.
    Raises ValueError for an empty prompt or a reward that is not finite.
    """
    sequences = sorted(_sequences(batch, objective), key=lambda sequence: sequence.length)
    cut = [_cut(dealt, token_limit, packed) for dealt in _deal(sequences, ranks)]
    parts = [_laid_out(part, device, packed) for part in cut[rank]]
    missing = max(map(len, cut)) - len(parts)
    parts += [_laid_out(sequences[:1], device, packed, counts=False) for _ in range(missing)]
    return Share(parts, sum(len(sequence.rollout.token_ids) for sequence in sequences), len(sequences))


def _deal(sequences: Sequence[_Sequence], ranks: int) -> list[list[_Sequence]]:
    """Sequences of rising length, dealt so that ranks have about as many tokens: the longest first, each to who has least."""
    hands: list[list[_Sequence]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for sequence in reversed(sequences):
        load, rank = loads[0]
        hands[rank].append(sequence)
        heapq.heapreplace(loads, (load + sequence.length, rank))
    return [hand[::-1] for hand in hands]


def _cut(sequences: Sequence[_Sequence], token_limit: int, packed: bool) -> list[list[_Sequence]]:
    """Sequences of rising length as micro-batches."""
    parts: list[list[_Sequence]] = []
    filled = 0
    for sequence in sequences:
        # Lengths rise, so where there is padding the newest sequence sets the width of its micro-batch.
        beside = len(parts[-1]) if parts else 0
        filled = filled + sequence.length if packed else (beside + 1) * sequence.length
        if not parts or filled > token_limit:
            parts.append([])
            filled = sequence.length
        parts[-1].append(sequence)
    return parts


def _sequences(batch: Batch, objective: Objective) -> Iterator[_Sequence]:
    for group, rollout, advantage in objective.trained_members(batch):
        if not group.prompt_token_ids:
            raise ValueError(f"group {group.group_id} has an empty prompt: nothing predicts its first token")
        yield _Sequence(group.prompt_token_ids, rollout, advantage)


def _laid_out(sequences: Sequence[_Sequence], device: torch.device, packed: bool, counts: bool = True) -> MicroBatch:
    sizes = np.array([sequence.length for sequence in sequences])
    widths = sizes if packed else np.full_like(sizes, sizes[-1])
    token_ids = np.full(widths.sum(), PADDING_TOKEN_ID, np.int64)
    places = []
    for begin, sequence in zip(widths.cumsum() - widths, sequences, strict=True):
        prompt = len(sequence.prompt_token_ids)
        token_ids[begin : begin + prompt] = sequence.prompt_token_ids
        token_ids[begin + prompt : begin + sequence.length] = sequence.rollout.token_ids[:-1]
        places.append(np.arange(begin + prompt - 1, begin + sequence.length, dtype=np.int64))
    rollouts = [sequence.rollout for sequence in sequences]
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    advantages = np.repeat(np.array([sequence.advantage for sequence in sequences], np.float32), lengths)
    return MicroBatch(
        token_ids=torch.from_numpy(token_ids.reshape(1 if packed else len(sequences), -1)).to(device),
        packed=layout(sizes.tolist(), device) if packed else None,
        places=torch.from_numpy(np.concatenate(places)).to(device),
        targets=torch.from_numpy(np.concatenate([r.token_ids for r in rollouts]).astype(np.int64)).to(device),
        behaviour_log_probs=torch.from_numpy(np.concatenate([r.log_probs for r in rollouts]).astype(np.float32)).to(device),
        advantages=torch.from_numpy(advantages).to(device),
        lengths=torch.tensor(lengths).to(device),
        counts=counts,
    )
