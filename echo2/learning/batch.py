"""From a batch of groups to micro-batches, packed or padded.

Invariants: the token ids that were sampled are the ones that are trained; every completion token of the batch is in exactly one
micro-batch, with the advantage of its own group and member; a micro-batch holds at most `token_limit` tokens, padding included,
unless a single sequence is longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from echo2.learning.objective import DEFAULT_OBJECTIVE, Objective
from echo2.learning.packing import Layout, layout
from echo2.protocol import Batch, ScoredRollout, TrainingGroup

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
    origins: tuple[tuple[TrainingGroup, ScoredRollout], ...]
    """Group and member that each sequence comes from, in that order."""


@dataclass(frozen=True, slots=True)
class _Sequence:
    group: TrainingGroup
    member: ScoredRollout
    advantage: float

    @property
    def length(self) -> int:
        """Positions to compute: all tokens but the last."""
        return len(self.group.prompt_token_ids) + len(self.member.rollout.token_ids) - 1


def micro_batches(
    batch: Batch,
    token_limit: int,
    device: torch.device,
    objective: Objective = DEFAULT_OBJECTIVE,
    *,
    packed: bool = False,
) -> list[MicroBatch]:
    """The sequences that `objective` trains, sorted by length, in as few micro-batches as `token_limit` allows.

    Packed, a micro-batch is one row without padding; otherwise neighbours in length share one, which keeps their padding short.
    Raises ValueError for an empty prompt or a reward that is not finite.
    """
    sequences = sorted(_sequences(batch, objective), key=lambda sequence: sequence.length)
    parts: list[list[_Sequence]] = [[]]
    filled = 0
    for sequence in sequences:
        # Lengths rise, so where there is padding the newest sequence sets the width of its micro-batch.
        filled = filled + sequence.length if packed else (len(parts[-1]) + 1) * sequence.length
        if parts[-1] and filled > token_limit:
            parts.append([])
            filled = sequence.length
        parts[-1].append(sequence)
    return [_laid_out(part, device, packed) for part in parts if part]


def _sequences(batch: Batch, objective: Objective) -> Iterator[_Sequence]:
    for group, member, advantage in objective.trained_members(batch):
        if not group.prompt_token_ids:
            raise ValueError(f"group {group.group_id} has an empty prompt: nothing predicts its first token")
        yield _Sequence(group, member, advantage)


def _laid_out(sequences: list[_Sequence], device: torch.device, packed: bool) -> MicroBatch:
    sizes = np.array([sequence.length for sequence in sequences])
    widths = sizes if packed else np.full_like(sizes, sizes[-1])
    token_ids = np.full(widths.sum(), PADDING_TOKEN_ID, np.int64)
    places = []
    for begin, sequence in zip(widths.cumsum() - widths, sequences, strict=True):
        prompt = len(sequence.group.prompt_token_ids)
        token_ids[begin : begin + prompt] = sequence.group.prompt_token_ids
        token_ids[begin + prompt : begin + sequence.length] = sequence.member.rollout.token_ids[:-1]
        places.append(np.arange(begin + prompt - 1, begin + sequence.length, dtype=np.int64))
    rollouts = [sequence.member.rollout for sequence in sequences]
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
        origins=tuple((sequence.group, sequence.member) for sequence in sequences),
    )
