"""Generation with Hugging Face transformers, on a CPU or one GPU.

Invariants: a prompt is computed once for all members of its group; nothing computed with one version's weights is kept for the
next call; a log-probability is that of the distribution which the token was drawn from, in float32.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from echo2.dissemination.manifest import Content
from echo2.models.adapted import AdaptedModel
from echo2.models.loading import Dtype, build_model, load_weights, resolve_device
from echo2.protocol import FinishReason, GroupRollouts, Lease, Rollout, RolloutFailure, Sampling
from echo2.rollout.engine import Engine
from echo2.rollout.randomness import member_generator

COMPACT_BELOW = 0.75
"""Finished rows leave the batch when fewer than this share of its rows go on, since that copies the others' keys and values."""


class TransformersEngine(Engine):
    """Batched decoding: one forward pass over all prompts, then one for each token of the longest completion."""

    def __init__(self, model_folder: Path, dtype: Dtype, device: str, threads: int) -> None:
        """`model_folder` needs no weights. Raises ConfigError if it describes no model or the device is not there."""
        torch.set_num_threads(threads)
        self._model = build_model(model_folder, dtype, resolve_device(device))
        config = self._model.config.get_text_config()
        self._max_positions: int = config.max_position_embeddings
        self._vocabulary_size: int = self._model.get_input_embeddings().num_embeddings
        self._load: Callable[[Content], None] = partial(load_weights, self._model)

    def adapt(self, base: Content, scale: float) -> None:
        """From now on snapshots hold adapters of `base`, which are scaled so; see `AdaptedModel`. Raises SnapshotError."""
        self._load = AdaptedModel(self._model, base, scale).load

    def load_weights(self, snapshot: Content, version: int) -> None:
        self._load(snapshot)
        self.version = version

    def generate(self, leases: Sequence[Lease], sampling: Sampling, should_stop: Callable[[], bool]) -> Iterator[GroupRollouts]:
        """As `Engine.generate`; a group whose prompt the model cannot take is all failures.

        If weights are loaded between two results, the next tokens are drawn from the new ones and carry their version. Raises
        RuntimeError before the first `load_weights`.
        """
        if self.version is None:
            raise RuntimeError("generate was called before load_weights: there is no version to generate with")
        possible = []
        for lease in leases:
            reason = self._refusal(lease, sampling)
            if reason is None:
                possible.append(lease)
            else:
                failures = tuple(RolloutFailure(member=member, reason=reason) for member in lease.members)
                yield GroupRollouts(lease.group_id, lease.attempt, (), failures)
        if not possible:
            return
        decoding = _Decoding(self._model, possible, sampling)
        while decoding.open and not should_stop():
            yield from decoding.step(self.version)
        yield from decoding.leave()

    def _refusal(self, lease: Lease, sampling: Sampling) -> str | None:
        """Why nothing can be generated for this lease; None if something can."""
        prompt, longest = lease.prompt_token_ids, sampling.max_completion_tokens
        if not lease.members:
            return "no member is asked for"
        if not prompt:
            return "the prompt is empty"
        if len(prompt) + longest > self._max_positions:
            return (
                f"the prompt's {len(prompt)} tokens and sampling.max_completion_tokens = {longest} exceed the model's "
                f"{self._max_positions} positions"
            )
        if not 0 <= min(prompt) <= max(prompt) < self._vocabulary_size:
            return f"the prompt has a token id outside the model's vocabulary of {self._vocabulary_size}"
        return None


def sample(logits: Tensor, temperature: float, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution softmax(logits / temperature) at `uniforms`.

    logits [rows, vocabulary]; uniforms [rows], float64 in [0, 1). Returns token ids [rows] and their log-probabilities [rows],
    float32. The cumulative sum is in float64: in float32 it would lose the tail of a large vocabulary.
    """
    log_probs = torch.log_softmax(logits.float() / temperature, dim=-1)
    cumulative = torch.cumsum(log_probs.exp(), dim=-1, dtype=torch.float64)
    # The first token whose cumulative value exceeds the threshold has a probability above 0, as one that equals it may not.
    token_ids = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1]).unsqueeze(-1), right=True)
    token_ids = token_ids.clamp_(max=logits.shape[-1] - 1)
    return token_ids.squeeze(-1), log_probs.gather(-1, token_ids).squeeze(-1)


@dataclass(slots=True)
class _Row:
    """One member while it grows."""

    member: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    failure: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    def append(self, token_id: int, log_prob: float, version: int, sampling: Sampling) -> None:
        if not math.isfinite(log_prob):
            self.failure = f"token {len(self.token_ids)} has the log-probability {log_prob}: version {version} has bad weights"
            return
        self.token_ids.append(token_id)
        self.log_probs.append(log_prob)
        self.versions.append(version)
        if token_id in sampling.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) == sampling.max_completion_tokens:
            self.finish_reason = "length"


@dataclass(slots=True)
class _Group:
    """A lease and its rows."""

    lease: Lease
    rows: list[_Row]

    @property
    def finished(self) -> bool:
        return all(row.finished for row in self.rows)

    def result(self) -> GroupRollouts:
        """What is finished of the group."""
        rollouts = tuple(
            Rollout(
                row.member,
                np.array(row.token_ids, np.int32),
                np.array(row.log_probs, np.float32),
                np.array(row.versions, np.int32),
                row.finish_reason,
            )
            for row in self.rows
            if row.finish_reason is not None
        )
        failures = tuple(RolloutFailure(member=row.member, reason=row.failure) for row in self.rows if row.failure is not None)
        return GroupRollouts(self.lease.group_id, self.lease.attempt, rollouts, failures)


class _Decoding:
    """Groups that are decoded together, each step one token of every row.

    `_batch` lists the rows in the tensors' order, finished ones included until they are dropped; `_uniforms` [rows,
    max_completion_tokens]; `_token_ids` [rows] is the last token of each row and `_positions` [rows] its place; `_mask`
    [rows, prompt width + max_completion_tokens] is 0 for padding.
    """

    def __init__(self, model: Any, leases: Sequence[Lease], sampling: Sampling) -> None:
        self._model = model
        self._cache_argument = _cache_argument(model)
        self._sampling = sampling
        self.open = [_Group(lease, [_Row(member) for member in lease.members]) for lease in leases]
        self._batch = [row for group in self.open for row in group.rows]
        self._cache = DynamicCache(config=model.config)
        self._uniforms = torch.from_numpy(_uniforms(leases, sampling)).to(model.device)
        self._steps = 0

    @torch.inference_mode()
    def step(self, version: int) -> list[GroupRollouts]:
        """Draw one token for every row with the weights that the model has now; gives the groups that this finished."""
        logits = self._next_logits() if self._steps else self._first_logits()
        self._token_ids, log_probs = sample(logits, self._sampling.temperature, self._uniforms[:, self._steps])
        self._steps += 1
        for row, token_id, log_prob in zip(self._batch, self._token_ids.tolist(), log_probs.tolist(), strict=True):
            if not row.finished:
                row.append(token_id, log_prob, version, self._sampling)
        finished = [group for group in self.open if group.finished]
        self.open = [group for group in self.open if not group.finished]
        return [group.result() for group in finished]

    def leave(self) -> list[GroupRollouts]:
        """What is finished of the groups that are not; groups without a finished member are left out."""
        return [group.result() for group in self.open if any(row.finished for row in group.rows)]

    def _first_logits(self) -> Tensor:
        """Run the prompts, left-padded, once each, then give every member a copy of its prompt's keys and values."""
        prompts = [group.lease.prompt_token_ids for group in self.open]
        width = max(len(prompt) for prompt in prompts)
        padded = np.zeros((len(prompts), width), np.int64)
        mask = np.ones((len(prompts), width + self._sampling.max_completion_tokens), np.int64)
        for row, prompt in enumerate(prompts):
            padded[row, width - len(prompt) :] = prompt
            mask[row, : width - len(prompt)] = 0
        self._mask = torch.from_numpy(mask).to(self._model.device)
        positions = (self._mask[:, :width].cumsum(-1) - 1).clamp_(min=0)
        logits = self._forward(torch.from_numpy(padded).to(self._model.device), positions)
        self._positions = positions[:, -1]
        copies = [index for index, group in enumerate(self.open) for _ in group.rows]
        return logits[self._select(copies)]

    def _next_logits(self) -> Tensor:
        growing = [index for index, row in enumerate(self._batch) if not row.finished]
        if len(growing) < COMPACT_BELOW * len(self._batch):
            self._batch = [self._batch[index] for index in growing]
            kept = self._select(growing)
            self._uniforms, self._token_ids = self._uniforms[kept], self._token_ids[kept]
        self._positions = self._positions + 1
        return self._forward(self._token_ids.unsqueeze(-1), self._positions.unsqueeze(-1))

    def _forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Run `token_ids` [rows, n] after what the cache holds; the logits [rows, vocabulary] that follow the last."""
        return self._model(
            input_ids=token_ids,
            attention_mask=self._mask[:, : self._cache.get_seq_length() + token_ids.shape[1]],
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: self._cache},
        ).logits[:, -1]

    def _select(self, rows: list[int]) -> Tensor:
        """Make these rows, which may repeat, the rows of the cache, the mask and the positions; gives their index tensor."""
        index = torch.tensor(rows, device=self._model.device)
        self._cache.batch_select_indices(index)
        self._mask, self._positions = self._mask[index], self._positions[index]
        return index


def _cache_argument(model: Any) -> str:
    """What this release of transformers calls the cache; under another name it would be ignored without a word."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def _uniforms(leases: Sequence[Lease], sampling: Sampling) -> np.ndarray:
    """One number for every token that may be drawn, [rows, max_completion_tokens], float64 in [0, 1)."""
    members = [(lease.group_id, member) for lease in leases for member in lease.members]
    return np.stack([member_generator(sampling.seed, *member).random(sampling.max_completion_tokens) for member in members])
