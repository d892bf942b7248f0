"""What a task is: prompts by index, and a judge of completions.

Invariants: a prompt depends on (seed, index) alone, so a cursor into a task is one number; scoring that fails raises
`ScoringError` and is never a reward of 0. Nothing here imports torch or transformers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real

from echo2.errors import UserError


class ScoringError(UserError):
    """A completion that could not be scored; the message says why."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a completion earned."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    """Named figures to report beside the reward; built-in tasks give `exact_match`, 0 or 1."""


class Task(ABC):
    """Prompts and rewards. A task of your own is made as `YourTask(seed=<run.seed>, **task.options)`."""

    required_characters: frozenset[str] = frozenset()
    """Characters of prompts and answers, which the model's tokenizer must be able to encode."""

    metric_names: frozenset[str] | None = None
    """Names of the metrics that scores come with; None where they are not known before."""

    @property
    def size(self) -> int | None:
        """Number of prompts; None if they never run out. Whoever counts further starts again at `index % size`."""
        return None

    @abstractmethod
    def prompt(self, index: int) -> str:
        """The prompt at `index`, 0 ≤ index < size; the same at every call."""

    @abstractmethod
    def score(self, index: int, completion: str, finished: bool) -> Score:
        """Judge the text that was sampled after `prompt(index)`.

        `completion` is decoded from the tokens before the end of sequence; `finished` is False where the completion was
        cut off by its length limit instead.
        """

    def answer(self, index: int) -> str | None:
        """The right completion, from which the tiny model's warm start learns; None where there is no single one."""
        return None


class PromptError(UserError):
    """A prompt that could not be had; the message says why."""


def checked_prompt(task: Task, index: int) -> str:
    """`task.prompt` with everything that it may do wrong turned into PromptError."""
    try:
        prompt = task.prompt(index)
    except Exception as error:  # a task is the user's code and may raise anything
        raise PromptError(f"{type(task).__name__}.prompt at index {index} raised {type(error).__name__}: {error}") from error
    if not isinstance(prompt, str) or not prompt:
        raise PromptError(f"{type(task).__name__}.prompt at index {index} returned {prompt!r}: return a text that is not empty")
    return prompt


def checked_score(task: Task, index: int, completion: str, finished: bool) -> Score:
    """`task.score` with everything that it may do wrong turned into ScoringError.

    Returns a score whose reward and metrics are finite Python floats.
    """
    try:
        score = task.score(index, completion, finished)
    except Exception as error:  # a scorer is the user's code and may raise anything
        raise ScoringError(f"{_call(task, index)} raised {type(error).__name__}: {error}") from error
    if not isinstance(score, Score):
        raise ScoringError(f"{_call(task, index)} returned {score!r}: return an echo2.tasks.Score")
    if not isinstance(score.metrics, Mapping):
        raise ScoringError(f"{_call(task, index)} gave metrics {score.metrics!r}: give a dict of numbers")
    metrics = {str(name): _finite(task, index, f"metric {name}", value) for name, value in score.metrics.items()}
    return Score(_finite(task, index, "reward", score.reward), metrics)


def _finite(task: Task, index: int, name: str, value: object) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ScoringError(f"{_call(task, index)} gave {name} {value!r}: give a finite number")
    return float(value)


def _call(task: Task, index: int) -> str:
    return f"{type(task).__name__}.score at index {index}"
