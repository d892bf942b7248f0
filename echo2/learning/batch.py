"""From a batch of groups to padded micro-batches.

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

from echo2.learning.advantages import group_advantages
from echo2.protocol import Batch, Rollout

PADDING_TOKEN_ID = 0
"""Any valid id serves: padding on the right is seen by no completion token."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some sequences of a batch, padded on the right to the longest, and their N completion tokens laid flat."""

    token_ids: Tensor
    """[rows, T] int64: prompts and completions without the last token, which predicts nothing."""
    places: Tensor
    """[N] int64: index into the flattened [rows · T] of the position that predicts each completion token."""
    targets: Tensor
    """[N] int64: the completion tokens."""
    behaviour_log_probs: Tensor
    """[N] float32: their log-probabilities when they were sampled."""
    advantages: Tensor
    """[N] float32."""


@dataclass(frozen=True, slots=True)
class _Sequence:
    prompt_token_ids: tuple[int, ...]
    rollout: Rollout
    advantage: float

    @property
    def length(self) -> int:
        """Positions to compute: all tokens but the last."""
        return len(self.prompt_token_ids) + len(self.rollout.token_ids) - 1


def micro_batches(batch: Batch, token_limit: int, device: torch.device) -> list[MicroBatch]:
    """The batch's sequences, sorted by length and packed into as few micro-batches as `token_limit` allows.

    Raises ValueError for an empty prompt or a reward that is not finite.
    """
    sequences = sorted(_sequences(batch), key=lambda sequence: sequence.length)
    parts: list[list[_Sequence]] = []
    for sequence in sequences:
        # Lengths rise, so the newest sequence sets the width of its micro-batch.
        if not parts or (len(parts[-1]) + 1) * sequence.length > token_limit:
            parts.append([])
        parts[-1].append(sequence)
    return [_padded(part, device) for part in parts]


def _sequences(batch: Batch) -> Iterator[_Sequence]:
    for group in batch.groups:
        if not group.prompt_token_ids:
            raise ValueError(f"group {group.group_id} has an empty prompt: nothing predicts its first token")
        advantages = group_advantages([member.reward for member in group.members])
        for member, advantage in zip(group.members, advantages, strict=True):
            yield _Sequence(group.prompt_token_ids, member.rollout, float(advantage))


def _padded(sequences: list[_Sequence], device: torch.device) -> MicroBatch:
    width = sequences[-1].length
    token_ids = np.full((len(sequences), width), PADDING_TOKEN_ID, np.int64)
    places = []
    for row, sequence in enumerate(sequences):
        start = len(sequence.prompt_token_ids)
        token_ids[row, :start] = sequence.prompt_token_ids
        token_ids[row, start : sequence.length] = sequence.rollout.token_ids[:-1]
        places.append(np.arange(start - 1, sequence.length, dtype=np.int64) + row * width)
    rollouts = [sequence.rollout for sequence in sequences]
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    advantages = np.repeat(np.array([sequence.advantage for sequence in sequences], np.float32), lengths)
    return MicroBatch(
        token_ids=torch.from_numpy(token_ids).to(device),
        places=torch.from_numpy(np.concatenate(places)).to(device),
        targets=torch.from_numpy(np.concatenate([r.token_ids for r in rollouts]).astype(np.int64)).to(device),
        behaviour_log_probs=torch.from_numpy(np.concatenate([r.log_probs for r in rollouts]).astype(np.float32)).to(device),
        advantages=torch.from_numpy(advantages).to(device),
    )
