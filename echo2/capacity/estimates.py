"""Estimates from observations: robust means and shares in which newer observations weigh more, each with its interval.

Invariants: pure functions; observations come oldest first; an interval is the central 95 % one and holds its estimate; too few
observations give None, never a guess.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Z = 1.959964
"""Standard normal quantile of the 95 % interval."""

EXACT_T = {1: 12.7062, 2: 4.3027}
"""Student's t where the expansion in 1/ν is too coarse."""

CLIPPED_SHARE = 0.05
"""Share of the observations at either end that a robust mean draws in."""

LEAST_TO_CLIP = 5
"""From so many observations on, at least the largest and the smallest are drawn in."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float
    count: int
    """Observations behind it."""

    def times(self, factor: float) -> Estimate:
        """The same in another unit, or of so many."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor, self.count)

    def inverse(self) -> Estimate:
        """Of 1/x; raises ZeroDivisionError where x may be 0 by its value."""
        return Estimate(1 / self.value, 1 / self.high, 1 / self.low if self.low > 0 else 2 / self.value, self.count)

    def around(self, value: float, count: int) -> Estimate:
        """This interval about another centre, from so many observations."""
        return Estimate(value, max(0.0, value - (self.value - self.low)), value + (self.high - self.value), count)


def decayed(ages: Iterable[float], half_life: float) -> list[float]:
    """Weights of observations of these ages: 1 for the newest, 1/2 after a half-life."""
    return [0.5 ** (age / half_life) for age in ages]


def robust_mean(values: Sequence[float], weights: Sequence[float]) -> Estimate | None:
    """The winsorised weighted mean of values from 0 up; None for fewer than two.

    The g largest and the g smallest of n values are drawn in to their neighbours, so that no single one moves the mean far. The
    interval is Student's, with (Σw)²/Σw² observations, widened by n/(n − 2g) for what was drawn in (Tukey and McLaughlin).

    >>> values = [1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0, 100.0]
    >>> round(robust_mean(values, [1.0] * len(values)).value, 3)
    1.013
    """
    count = len(values)
    if count < 2:
        return None
    clipped = max(1, int(CLIPPED_SHARE * count)) if count >= LEAST_TO_CLIP else 0
    ordered = sorted(values)
    low, high = ordered[clipped], ordered[count - 1 - clipped]
    drawn_in = [min(max(value, low), high) for value in values]
    total = math.fsum(weights)
    mean = math.fsum(w * x for w, x in zip(weights, drawn_in, strict=True)) / total
    effective = max(1.01, total * total / math.fsum(w * w for w in weights))
    variance = math.fsum(w * (x - mean) ** 2 for w, x in zip(weights, drawn_in, strict=True)) / total
    kept = (count - 2 * clipped) / count
    error = math.sqrt(variance / (effective - 1)) / kept
    half_width = student_t(max(1, round(effective * kept) - 1)) * error
    return Estimate(mean, max(0.0, mean - half_width), mean + half_width, count)


def share(outcomes: Sequence[bool], weights: Sequence[float]) -> Estimate | None:
    """The weighted share of true outcomes with Wilson's interval; None without outcomes."""
    if not outcomes:
        return None
    total = math.fsum(weights)
    effective = total * total / math.fsum(w * w for w in weights)
    p = math.fsum(w for w, outcome in zip(weights, outcomes, strict=True) if outcome) / total
    scale = 1 + Z * Z / effective
    centre = (p + Z * Z / (2 * effective)) / scale
    half_width = Z * math.sqrt(p * (1 - p) / effective + (Z / (2 * effective)) ** 2) / scale
    return Estimate(p, min(p, max(0.0, centre - half_width)), max(p, min(1.0, centre + half_width)), len(outcomes))


def total(parts: Sequence[Estimate]) -> Estimate | None:
    """The sum of independent estimates; None without any."""
    if not parts:
        return None
    value = math.fsum(part.value for part in parts)
    below = math.sqrt(math.fsum((part.value - part.low) ** 2 for part in parts))
    above = math.sqrt(math.fsum((part.high - part.value) ** 2 for part in parts))
    return Estimate(value, max(0.0, value - below), value + above, sum(part.count for part in parts))


def student_t(freedom: int) -> float:
    """The two-sided 95 % quantile of Student's t with so many degrees of freedom, to 1 %; Fisher's expansion in 1/ν.

    >>> [round(student_t(freedom), 2) for freedom in (1, 5, 30)]
    [12.71, 2.57, 2.04]
    """
    if freedom in EXACT_T:
        return EXACT_T[freedom]
    first = (Z**3 + Z) / 4
    second = (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96
    third = (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384
    return Z + first / freedom + second / freedom**2 + third / freedom**3
