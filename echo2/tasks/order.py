"""Which prompt a group gets.

Invariant: over each epoch of a finite task every prompt comes exactly once, in an order drawn from (seed, epoch); so a group's
id is all that a resume needs to know.
"""

from __future__ import annotations

import random
from functools import lru_cache


def prompt_index(group_id: int, size: int | None, seed: int) -> int:
    """The index of the prompt of group `group_id` in a task of `size` prompts (None: unlimited, each prompt once)."""
    if size is None:
        return group_id
    return _shuffled(size, seed, group_id // size)[group_id % size]


@lru_cache(maxsize=4)
def _shuffled(size: int, seed: int, epoch: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
