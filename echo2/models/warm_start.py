"""Supervised steps that bring a fresh model to where reinforcement learning finds something to sharpen.

Invariants: progress is the probability with which the model samples the task's answer and ends, averaged over held-out prompts;
since each answer is a single text, that is the expected share of exact matches, free of sampling noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from echo2.errors import ConfigError
from echo2.tasks.base import Task
from echo2.tasks.order import PromptOrder
from echo2.tasks.tokenizer import TextTokenizer

LEARNING_RATE = 3e-3
BETAS = (0.9, 0.95)
WARMUP_STEPS = 20
BATCH_PROMPTS = 64
HELD_OUT_PROMPTS = 512
MAX_STEPS = 3000
PROGRESS_STEPS = 10
FIRST_PROMPT = 1 << 40
"""Group of the first supervised prompt, far from those that a run reaches; progress is measured from twice this on."""
IGNORED = -100


@dataclass(frozen=True, slots=True)
class WarmStart:
    """What a warm start reached."""

    steps: int
    exact_match: float
    """Expected share of exact matches when sampling at temperature 1."""


@dataclass(frozen=True, slots=True)
class Examples:
    """Right-padded prompts with answers: `token_ids` [rows, T], and `labels` [rows, T], IGNORED but at answer and end token."""

    token_ids: Tensor
    labels: Tensor


def warm_start(
    model: Any, task: Task, order: PromptOrder, tokenizer: TextTokenizer, target: float, progress: Callable[[str], None]
) -> WarmStart:
    """Train `model` in place until its expected exact match reaches `target`, on prompts that a run may train too.

    Raises ConfigError if the task has no answers, or the target is not reached in MAX_STEPS.
    """
    held_out = make_examples(task, order, tokenizer, 2 * FIRST_PROMPT, HELD_OUT_PROMPTS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0)
    for step in range(1, MAX_STEPS + 1):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, step / WARMUP_STEPS)
        examples = make_examples(task, order, tokenizer, FIRST_PROMPT + step * BATCH_PROMPTS, BATCH_PROMPTS)
        exact_match = _supervised_step(model, optimizer, examples)
        # The batch's own figure is noisy but free; the held-out one is worth its time only near the target.
        if exact_match >= target / 2:
            with torch.no_grad():
                exact_match = answer_probabilities(_log_probs(model, held_out)).mean().item()
            if exact_match >= target:
                return WarmStart(step, exact_match)
        if step % PROGRESS_STEPS == 0:
            progress(f"warm start: {step} supervised steps, exact match {exact_match:.2f} of {target:.2f}")
    raise ConfigError(
        f"model.warm_start_exact_match = {target:g} was not reached on {type(task).__name__} in {MAX_STEPS} supervised steps "
        f"(last {exact_match:.2f}): lower it or choose an easier task"
    )


def make_examples(task: Task, order: PromptOrder, tokenizer: TextTokenizer, first: int, count: int) -> Examples:
    """The prompts of `count` groups from `first` on with their answers. Raises ConfigError if the task has none."""
    rows = []
    for index in map(order.trained, range(first, first + count)):
        answer = task.answer(index)
        if answer is None:
            raise ConfigError(
                f"task {type(task).__name__} gives no answers for the tiny model's warm start: set "
                f"model.warm_start_exact_match=0, or implement its `answer`"
            )
        rows.append((tokenizer.encode(task.prompt(index)), [*tokenizer.encode(answer), tokenizer.eos_token_ids[0]]))
    length = max(len(prompt) + len(completion) for prompt, completion in rows)
    token_ids = torch.full((count, length), tokenizer.pad_token_id)
    labels = torch.full((count, length), IGNORED)
    for row, (prompt, completion) in enumerate(rows):
        end = len(prompt) + len(completion)
        token_ids[row, :end] = torch.tensor(prompt + completion)
        labels[row, len(prompt) : end] = torch.tensor(completion)
    return Examples(token_ids, labels)


def answer_probabilities(log_probs: Tensor) -> Tensor:
    """[rows]: probability of sampling each row's answer, from the log-probabilities [rows, T] of its tokens."""
    return log_probs.sum(1).exp()


def _supervised_step(model: Any, optimizer: torch.optim.Optimizer, examples: Examples) -> float:
    """One step on the answers' tokens; returns the batch's expected exact match before it."""
    log_probs = _log_probs(model, examples)
    loss = -log_probs.sum() / (examples.labels != IGNORED).sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return answer_probabilities(log_probs.detach()).mean().item()


def _log_probs(model: Any, examples: Examples) -> Tensor:
    """[rows, T − 1]: log-probability of each labelled token, 0 elsewhere."""
    logits = model(input_ids=examples.token_ids[:, :-1], use_cache=False).logits
    targets = examples.labels[:, 1:]
    return -F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
