"""Generation with Hugging Face transformers, on a CPU or one GPU.

Invariants: groups are decoded in sets, and what is begun meanwhile waits for the next one; a prompt is computed once for all
members of its group that begin with it; nothing computed with one version's weights is kept for the next set; a log-probability
is that of the distribution which the token was drawn from, in float32.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from echo2.dissemination.manifest import Content
from echo2.models.adapted import AdaptedModel
from echo2.models.loading import Dtype, build_model, load_weights, resolve_device
from echo2.protocol import Sampling
from echo2.rollout.engine import Engine
from echo2.rollout.members import Group, Member, refusal, temperature_of
from echo2.rollout.memory import shortage_as_such
from echo2.rollout.randomness import member_generator

COMPACT_BELOW = 0.75
"""Finished rows leave the batch when fewer than this share of its rows go on, since that copies the others' keys and values."""


class TransformersEngine(Engine):
    """Batched decoding: one forward pass over all prompts, then one for each token of the longest completion."""

    def __init__(self, model_folder: Path, dtype: Dtype, device: str, threads: int) -> None:
        """`model_folder` needs no weights. Raises ConfigError if it describes no model or the device is not there."""
        super().__init__()
        torch.set_num_threads(threads)
        self._model = build_model(model_folder, dtype, resolve_device(device, "worker.device"))
        config = self._model.config.get_text_config()
        self._max_positions: int = config.max_position_embeddings
        self._vocabulary_size: int = self._model.get_input_embeddings().num_embeddings
        self._load: Callable[[Content], None] = partial(load_weights, self._model)
        self._waiting: list[tuple[Group, Sampling]] = []
        self._decoding: _Decoding | None = None

    def adapt(self, base: Content, scale: float) -> None:
        """From now on snapshots hold adapters of `base`, which are scaled so; see `AdaptedModel`. Raises SnapshotError."""
        self._load = AdaptedModel(self._model, base, scale).load

    def load_weights(self, snapshot: Content, version: int) -> None:
        self._load(snapshot)
        self.version = version

    def _start(self, group: Group, sampling: Sampling) -> str | None:
        reason = refusal(group.lease, sampling, self._max_positions, self._vocabulary_size)
        if reason is None:
            self._waiting.append((group, sampling))
        return reason

    def _advance(self) -> list[Group]:
        with shortage_as_such():
            if self._decoding is None:
                groups = [group for group, _ in self._waiting]
                self._decoding = _Decoding(self._model, groups, self._waiting[0][1])
                self._waiting.clear()
            done = self._decoding.step(cast(int, self.version))
        if not self._decoding.open:
            self._decoding = None
        return done

    def _abandon(self, groups: Sequence[Group]) -> None:
        self._waiting = [(group, sampling) for group, sampling in self._waiting if group not in groups]
        if self._decoding is not None:
            self._decoding.open = [group for group in self._decoding.open if group not in groups]
            for member in (member for group in groups for member in group.members if not member.finished):
                member.failure = "nobody waits for it any more"
            if not self._decoding.open:
                self._decoding = None


def sample(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution softmax(logits / temperature) at `uniforms`.

    logits [rows, vocabulary]; temperatures [rows], float32, where 0 stands for the most probable token, drawn with certainty;
    uniforms [rows], float64 in [0, 1). Returns token ids [rows] and their log-probabilities [rows], float32, which are not
    finite where the logits are not. The cumulative sum is in float64: in float32 it would lose the tail of a large vocabulary.
    """
    greedy = temperatures == 0.0
    log_probs = torch.log_softmax(logits.float() / temperatures.masked_fill(greedy, 1.0).unsqueeze(-1), dim=-1)
    cumulative = torch.cumsum(log_probs.exp(), dim=-1, dtype=torch.float64)
    # The first token whose cumulative value exceeds the threshold has a probability above 0, as one that equals it may not.
    token_ids = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1]).unsqueeze(-1), right=True)
    token_ids = token_ids.clamp_(max=logits.shape[-1] - 1).where(~greedy.unsqueeze(-1), logits.argmax(-1, keepdim=True))
    drawn = log_probs.gather(-1, token_ids).squeeze(-1)
    return token_ids.squeeze(-1), drawn.masked_fill(greedy & drawn.isfinite(), 0.0)


class _Decoding:
    """Groups that are decoded together, each step one token of every row.

    `_batch` lists the rows in the tensors' order, finished ones included until they are dropped; `_uniforms` [rows, steps that
    the longest may take]; `_temperatures` [rows]; `_token_ids` [rows] is the last token of each row and `_positions` [rows] its
    place; `_mask` [rows, width + steps] is 0 for padding, where width is that of the prompts with their prefixes.
    """

    def __init__(self, model: Any, groups: Sequence[Group], sampling: Sampling) -> None:
        self._model = model
        self._cache_argument = _cache_argument(model)
        self._sampling = sampling
        self.open = list(groups)
        self._batch = [row for group in self.open for row in group.members]
        self._cache = DynamicCache(config=model.config)
        uniforms = [_uniforms(group, row, sampling) for group in self.open for row in group.members]
        self._most_steps = max(map(len, uniforms))
        padded = np.stack([np.pad(each, (0, self._most_steps - len(each))) for each in uniforms])
        self._uniforms = torch.from_numpy(padded).to(model.device)
        self._temperatures = torch.tensor(_temperatures(groups, sampling), dtype=torch.float32, device=model.device)
        self._steps = 0

    @torch.inference_mode()
    def step(self, version: int) -> list[Group]:
        """Draw one token for every row with the weights that the model has now; gives the groups that this finished."""
        logits = self._next_logits() if self._steps else self._first_logits()
        self._token_ids, log_probs = sample(logits, self._temperatures, self._uniforms[:, self._steps])
        self._steps += 1
        for row, token_id, log_prob in zip(self._batch, self._token_ids.tolist(), log_probs.tolist(), strict=True):
            if not row.finished:
                row.append(token_id, log_prob, version, self._sampling)
        finished = [group for group in self.open if group.finished]
        self.open = [group for group in self.open if not group.finished]
        return finished

    def _first_logits(self) -> Tensor:
        """Run the prompts, left-padded, once each, then give every member a copy of its prompt's keys and values.

        A member that goes on from a prefix has a row of its own from the first.
        """
        contexts: list[tuple[int, ...]] = []
        copies: list[int] = []
        row_of: dict[tuple[int, int | None], int] = {}
        for index, group in enumerate(self.open):
            for member in group.members:
                key = (index, member.number if member.prefix else None)
                if key not in row_of:
                    row_of[key] = len(contexts)
                    contexts.append(group.lease.prompt_token_ids + member.prefix)
                copies.append(row_of[key])
        width = max(map(len, contexts))
        padded = np.zeros((len(contexts), width), np.int64)
        mask = np.ones((len(contexts), width + self._most_steps), np.int64)
        for row, context in enumerate(contexts):
            padded[row, width - len(context) :] = context
            mask[row, : width - len(context)] = 0
        self._mask = torch.from_numpy(mask).to(self._model.device)
        positions = (self._mask[:, :width].cumsum(-1) - 1).clamp_(min=0)
        logits = self._forward(torch.from_numpy(padded).to(self._model.device), positions)
        self._positions = positions[:, -1]
        return logits[self._select(copies)]

    def _next_logits(self) -> Tensor:
        growing = [index for index, row in enumerate(self._batch) if not row.finished]
        if len(growing) < COMPACT_BELOW * len(self._batch):
            self._batch = [self._batch[index] for index in growing]
            kept = self._select(growing)
            self._uniforms, self._temperatures = self._uniforms[kept], self._temperatures[kept]
            self._token_ids = self._token_ids[kept]
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


def _uniforms(group: Group, member: Member, sampling: Sampling) -> np.ndarray:
    """One number for every token that may be drawn after the prefix, float64 in [0, 1)."""
    random = member_generator(sampling.seed, group.lease.group_id, member.number).random(sampling.max_completion_tokens)
    return random[len(member.prefix) :]


def _temperatures(groups: Sequence[Group], sampling: Sampling) -> list[float]:
    """One for every row."""
    return [temperature_of(group.lease, sampling) for group in groups for _ in group.members]
