"""The random numbers of a member.

Invariant: they depend on (run seed, group, member) alone, so a member comes out the same whichever worker generates it, in
whichever batch, at whichever attempt.
"""

from __future__ import annotations

import numpy as np

WORD = 2**64


def member_generator(seed: int, group_id: int, member: int) -> np.random.Generator:
    """A Philox stream keyed by seed and group, in a block of its counter that is the member's own."""
    key = np.array([seed % WORD, group_id], np.uint64)
    counter = np.array([0, 0, 0, member], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))
