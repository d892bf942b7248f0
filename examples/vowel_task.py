"""A task of one's own: write down the vowels of a word, in their order.

Used with the settings `task.type=python` and `task.path=vowel_task:VowelTask`, with this folder in PYTHONPATH.
"""

from __future__ import annotations

import random

from echo2.tasks import Score, Task

VOWELS = "aeiou"
CONSONANTS = "bcdfghjklmnpqrstvwxyz"


class VowelTask(Task):
    """`vowels banana=` → `aaa`, for made-up words of `syllables` syllables."""

    required_characters = frozenset(VOWELS + CONSONANTS + " =")
    metric_names = frozenset({"exact_match"})

    def __init__(self, seed: int, syllables: int = 3) -> None:
        self._seed = seed
        self._syllables = syllables

    def prompt(self, index: int) -> str:
        return f"vowels {self._word(index)}="

    def answer(self, index: int) -> str:
        return "".join(letter for letter in self._word(index) if letter in VOWELS)

    def score(self, index: int, completion: str, finished: bool) -> Score:
        answer = self.answer(index)
        right = sum(a == b for a, b in zip(answer, completion, strict=False)) / max(len(answer), len(completion))
        return Score(reward=right, metrics={"exact_match": float(finished and completion == answer)})

    def _word(self, index: int) -> str:
        """The word of prompt `index`: the same at every call, in every process."""
        randomness = random.Random(f"{self._seed}:{index}")
        return "".join(randomness.choice(CONSONANTS) + randomness.choice(VOWELS) for _ in range(self._syllables))
