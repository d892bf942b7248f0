"""The budget of a run: how long what is left of it lasts.

Invariants: what was spent is the ledger's word; while the ledger cannot be asked, spending is taken to have gone on at the rate
of the last question, so that a hub that is away buys nobody time.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from echo2.errors import UserError


class Budget:
    """`limit_usd` for the whole run, 0 for none; `spent_usd` asks the ledger and may raise UserError."""

    def __init__(self, limit_usd: float, spent_usd: Callable[[], float], clock: Callable[[], float]) -> None:
        self.limit_usd = limit_usd
        self._ask = spent_usd
        self._clock = clock
        self._known: tuple[float, float] | None = None
        self._usd_per_hour = 0.0

    @property
    def left_usd(self) -> float:
        """What was left when it was last asked for; infinite without a limit."""
        return self.limit_usd - self._known[0] if self.limit_usd and self._known else math.inf

    def lasts_s(self, usd_per_hour: float) -> float:
        """Seconds until the limit is reached at this rate, which is the rate from now on; 0 where it is reached already."""
        if not self.limit_usd:
            return math.inf
        left_usd = self.limit_usd - self._spent_usd()
        self._usd_per_hour = usd_per_hour
        if left_usd <= 0:
            return 0.0
        return 3600 * left_usd / usd_per_hour if usd_per_hour else math.inf

    def _spent_usd(self) -> float:
        now_s = self._clock()
        try:
            spent_usd = self._ask()
        except UserError:
            if self._known is None:
                raise
            spent_usd, asked_at_s = self._known
            spent_usd += self._usd_per_hour * max(0.0, now_s - asked_at_s) / 3600
        self._known = (spent_usd, now_s)
        return spent_usd
