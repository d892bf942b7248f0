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
from echo2.protocol import Batch, ScoredRollout, TrainingGroup

PADDING_TOKEN_ID = 0
"""Any valid id serves: padding on the right is seen by no completion token."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some sequences of a batch, in one row or padded on the right to the longest, and their N completion tokens laid flat."""

    token_ids: Tensor
    """[rows, T] int64: prompts and completions without the last token, which predicts nothing; one row where packed, in which
    the members of a group share their prompt."""
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
    """[sequences] int64: completion tokens of each, in the order in which they lie in the flat arrays."""
    origins: Tensor
    """[sequences] int64: where each of these sequences stands among those that the objective trains, in the batch's order."""
    counts: bool = True
    """False where its tokens count elsewhere: it only keeps this rank in step with others, which have one more to compute."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank computes of a batch."""

    parts: list[MicroBatch]
    tokens: int
    """Completion tokens of the whole batch, over all ranks."""
    origins: list[tuple[TrainingGroup, ScoredRollout]]
    """Group and member of each sequence of the whole batch, over all ranks, in the batch's order."""

    @property
    def sequences(self) -> int:
        """Sequences of the whole batch, over all ranks."""
        return len(self.origins)


@dataclass(frozen=True, slots=True)
class _Sequence:
    origin: int
    group: TrainingGroup
    member: ScoredRollout
    advantage: float

    @property
    def length(self) -> int:
        """Positions to compute: all tokens but the last."""
        return len(self.group.prompt_token_ids) + len(self.member.rollout.token_ids) - 1


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

    Packed, a micro-batch is one row without padding, with the prompt of a group once; otherwise neighbours in length share one,
    which keeps their padding short.
    Raises ValueError for an empty prompt or a reward that is not finite.
    """
    listed = list(_sequences(batch, objective))
    sequences = sorted(listed, key=lambda sequence: sequence.length)
    cut = [_cut(dealt, token_limit, packed) for dealt in _deal(sequences, ranks)]
    parts = [_laid_out(part, device, packed) for part in cut[rank]]
    missing = max(map(len, cut)) - len(parts)
    parts += [_laid_out(sequences[:1], device, packed, counts=False) for _ in range(missing)]
    origins = [(sequence.group, sequence.member) for sequence in listed]
    return Share(parts, sum(len(member.rollout.token_ids) for _, member in origins), origins)


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
    return _cut_packed(sequences, token_limit) if packed else _cut_padded(sequences, token_limit)


def _cut_padded(sequences: Sequence[_Sequence], token_limit: int) -> list[list[_Sequence]]:
    parts: list[list[_Sequence]] = []
    for sequence in sequences:
        # Lengths rise, so the newest sequence sets the width of its micro-batch.
        if not parts or (len(parts[-1]) + 1) * sequence.length > token_limit:
            parts.append([])
        parts[-1].append(sequence)
    return parts


def _cut_packed(sequences: Sequence[_Sequence], token_limit: int) -> list[list[_Sequence]]:
    """Members of a group lie side by side, so that few micro-batches hold its prompt; equal lengths are neighbours in each."""
    parts: list[list[_Sequence]] = []
    filled, former = 0, None
    for sequence in sorted(sequences, key=lambda sequence: sequence.group.group_id):
        shared = len(sequence.group.prompt_token_ids) if sequence.group is former else 0
        filled += sequence.length - shared
        if not parts or filled > token_limit:
            parts.append([])
            filled = sequence.length
        parts[-1].append(sequence)
        former = sequence.group
    return [sorted(part, key=lambda sequence: sequence.length) for part in parts]


def _sequences(batch: Batch, objective: Objective) -> Iterator[_Sequence]:
    for origin, (group, member, advantage) in enumerate(objective.trained_members(batch)):
        if not group.prompt_token_ids:
            raise ValueError(f"group {group.group_id} has an empty prompt: nothing predicts its first token")
        yield _Sequence(origin, group, member, advantage)


def _laid_out(sequences: Sequence[_Sequence], device: torch.device, packed: bool, counts: bool = True) -> MicroBatch:
    token_ids, spans = (_shared_row if packed else _padded_rows)(sequences)
    rollouts = [sequence.member.rollout for sequence in sequences]
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    places = [span[len(span) - length :] for span, length in zip(spans, lengths, strict=True)]
    advantages = np.repeat(np.array([sequence.advantage for sequence in sequences], np.float32), lengths)
    return MicroBatch(
        token_ids=torch.from_numpy(token_ids).to(device),
        packed=layout(spans, device) if packed else None,
        places=torch.from_numpy(np.concatenate(places)).to(device),
        targets=torch.from_numpy(np.concatenate([r.token_ids for r in rollouts]).astype(np.int64)).to(device),
        behaviour_log_probs=torch.from_numpy(np.concatenate([r.log_probs for r in rollouts]).astype(np.float32)).to(device),
        advantages=torch.from_numpy(advantages).to(device),
        lengths=torch.tensor(lengths).to(device),
        origins=torch.tensor([sequence.origin for sequence in sequences]).to(device),
        counts=counts,
    )


def _padded_rows(sequences: Sequence[_Sequence]) -> tuple[np.ndarray, list[np.ndarray]]:
    """A row of token ids for each of the sequences, and the places of its tokens in the flattened rows."""
    token_ids = np.full((len(sequences), sequences[-1].length), PADDING_TOKEN_ID, np.int64)
    for row, sequence in zip(token_ids, sequences, strict=True):
        row[: sequence.length] = [*sequence.group.prompt_token_ids, *sequence.member.rollout.token_ids[:-1]]
    begins = range(0, token_ids.size, token_ids.shape[1])
    return token_ids, [np.arange(begin, begin + each.length) for begin, each in zip(begins, sequences, strict=True)]


def _shared_row(sequences: Sequence[_Sequence]) -> tuple[np.ndarray, list[np.ndarray]]:
    """One row of token ids, each group's prompt once, and the places of each sequence's tokens in it."""
    pieces: list[np.ndarray] = []
    prompts: dict[int, np.ndarray] = {}
    spans = []
    filled = 0

    def placed(token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        nonlocal filled
        pieces.append(np.asarray(token_ids, np.int64))
        filled += len(token_ids)
        return np.arange(filled - len(token_ids), filled)

    for sequence in sequences:
        group = sequence.group
        if group.group_id not in prompts:
            prompts[group.group_id] = placed(group.prompt_token_ids)
        spans.append(np.concatenate([prompts[group.group_id], placed(sequence.member.rollout.token_ids[:-1])]))
    return np.concatenate(pieces)[None], spans
