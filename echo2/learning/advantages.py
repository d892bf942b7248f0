"""Group-relative advantages.

Invariant: a group is judged by itself, by its identity and never by its place in a batch or the text of its prompt; a member
without a reward takes no part and is not a 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

STD_FLOOR = 1e-4
"""Added to the standard deviation, so that rewards which differ by rounding alone give no large advantages."""


def group_advantages(rewards: Sequence[float]) -> np.ndarray:
    """Advantages [n] of a group's n scored members: (reward − mean) / (unbiased standard deviation + 1e-4), as in GRPO.

    A single member, and rewards that are all equal (compared exactly), give exactly 0. Raises ValueError for a reward that is
    not finite.
    """
    values = np.asarray(rewards, np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"rewards {values.tolist()} are not all finite: a member that could not be scored must be left out")
    if len(values) < 2 or (values == values[0]).all():
        return np.zeros(len(values))
    return (values - values.mean()) / (values.std(ddof=1) + STD_FLOOR)
