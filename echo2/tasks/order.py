"""Which prompt a group gets, and which prompts are held out for evaluation.

Invariants: over each epoch of a finite task every prompt that is not held out comes exactly once, in an order drawn from
(seed, epoch), so a group's id is all that a resume needs to know; no prompt is both trained and held out.
"""

from __future__ import annotations

import random
from functools import cached_property, lru_cache

from echo2.errors import ConfigError

HELD_OUT_FIRST = 3 << 40
"""Where a task that never runs out has its held-out prompts: at this index and after it, far from those that a run reaches."""


class PromptOrder:
    """The prompts of a task of `size` prompts (None: unlimited), of which `held_out` are never trained."""

    def __init__(self, size: int | None, seed: int, held_out: int = 0) -> None:
        """Raises ConfigError where nothing would be left to train."""
        if size is not None and held_out >= size:
            raise ConfigError(
                f"evaluation.prompts = {held_out} leaves none of the task's {size} prompts to train: lower it, or set "
                f"evaluation.every_steps=0"
            )
        self._size = size
        self._seed = seed
        self._held_out = held_out

    def trained(self, group_id: int) -> int:
        """The index of the prompt of group `group_id`."""
        if self._size is None:
            return group_id
        indices = self._kept
        return indices[_shuffled(len(indices), self._seed, str(group_id // len(indices)))[group_id % len(indices)]]

    def held_out(self, place: int) -> int:
        """The index of the prompt at `place` among the held-out ones, from 0 on."""
        if self._size is None:
            return HELD_OUT_FIRST + place
        return _shuffled(self._size, self._seed, "held out")[place]

    @cached_property
    def _kept(self) -> list[int]:
        """Indices of a finite task that are not held out, in rising order."""
        assert self._size is not None
        return sorted(set(range(self._size)) - {self.held_out(place) for place in range(self._held_out)})


@lru_cache(maxsize=4)
def _shuffled(size: int, seed: int, epoch: str) -> list[int]:
    order = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
