"""Built-in tasks: short exercises with one right answer each.

Invariants: the reward is `exact_match_weight` for an exact match plus the remaining weight times the share of right places,
so it lies in [0, 1] and is 1 exactly where the whole answer is right and ended by itself; no text is both a prompt to train and
a held-out one, under whatever index and seed.
"""

from __future__ import annotations

import random
import string
from abc import abstractmethod

from blake3 import blake3

from echo2.config_tasks import ArithmeticTask, ReverseDigitsTask, SortDigitsTask
from echo2.tasks.base import PromptError, Score, Task
from echo2.tasks.order import HELD_OUT_FIRST

HELD_OUT_SHARE = 1 / 8
"""Share of all texts that are held out."""
MOST_DRAWS = 1000


class AnswerTask(Task):
    """An endless stream of prompts, each drawn from its own random stream and each with one right answer."""

    metric_names = frozenset({"exact_match"})

    def __init__(self, seed: int, exact_match_weight: float) -> None:
        self._seed = seed
        self._exact_match_weight = exact_match_weight

    @abstractmethod
    def exercise(self, randomness: random.Random) -> tuple[str, str]:
        """Draw a prompt and its answer."""

    def prompt(self, index: int) -> str:
        return self._exercise(index)[0]

    def answer(self, index: int) -> str:
        return self._exercise(index)[1]

    def score(self, index: int, completion: str, finished: bool) -> Score:
        answer = self.answer(index)
        exact_match = float(finished and completion == answer)
        weight = self._exact_match_weight
        reward = weight * exact_match + (1.0 - weight) * share_of_right_places(answer, completion)
        return Score(reward, {"exact_match": exact_match})

    def _exercise(self, index: int) -> tuple[str, str]:
        """Drawn until it falls on the index's side of the split."""
        randomness = random.Random(f"{self._seed}:{index}")
        for _ in range(MOST_DRAWS):
            prompt, answer = self.exercise(randomness)
            if is_held_out(prompt) == (index >= HELD_OUT_FIRST):
                return prompt, answer
        raise PromptError(
            f"{type(self).__name__} has too few prompts for a held-out split, such as {prompt!r}: widen the task's range, or "
            f"set evaluation.every_steps=0"
        )


class DigitsTask(AnswerTask):
    """A number of `min_digits` to `max_digits` digits after the task's verb."""

    verb: str

    def __init__(self, settings: ReverseDigitsTask | SortDigitsTask, seed: int) -> None:
        super().__init__(seed, settings.exact_match_weight)
        self._settings = settings
        self.required_characters = frozenset(string.digits + self.verb + " =")

    @abstractmethod
    def rearranged(self, digits: str) -> str:
        """The answer to `digits`."""

    def exercise(self, randomness: random.Random) -> tuple[str, str]:
        length = randomness.randint(self._settings.min_digits, self._settings.max_digits)
        digits = "".join(randomness.choices(string.digits, k=length))
        return f"{self.verb} {digits}=", self.rearranged(digits)


class ReverseDigits(DigitsTask):
    """`rev 4071=` → `1704`."""

    verb = "rev"

    def rearranged(self, digits: str) -> str:
        return digits[::-1]


class SortDigits(DigitsTask):
    """`sort 4071=` → `0147`."""

    verb = "sort"

    def rearranged(self, digits: str) -> str:
        return "".join(sorted(digits))


class Arithmetic(AnswerTask):
    """`17+25=` → `42`."""

    def __init__(self, settings: ArithmeticTask, seed: int) -> None:
        super().__init__(seed, settings.exact_match_weight)
        self._settings = settings
        self.required_characters = frozenset(string.digits + "=-" + settings.operators)

    def exercise(self, randomness: random.Random) -> tuple[str, str]:
        left, right = (randomness.randint(0, self._settings.max_operand) for _ in range(2))
        operator = randomness.choice(self._settings.operators)
        return f"{left}{operator}{right}=", str(left + right if operator == "+" else left - right)


def share_of_right_places(answer: str, completion: str) -> float:
    """Places where both texts have the same character, over the length of the longer one; 1 only for equal texts."""
    longer = max(len(answer), len(completion))
    return sum(a == b for a, b in zip(answer, completion, strict=False)) / longer if longer else 1.0


def is_held_out(prompt: str) -> bool:
    """Whether an exercise belongs to the held-out split; decided by its text alone."""
    return blake3(prompt.encode()).digest()[0] < 256 * HELD_OUT_SHARE
