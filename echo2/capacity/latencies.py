"""Latency distributions: how long a group takes from its lease to its scores, or a learner step from start to end.

Invariants: frozen values, seconds, never negative; every draw comes from the generator that the caller gives, so that a seed
decides all; impossible numbers are refused with a UserError that names them.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, pstdev
from typing import Protocol

from echo2.errors import UserError


class Latency(Protocol):
    """A distribution of seconds."""

    @property
    def mean_s(self) -> float:
        """Mean, seconds."""

    @property
    def cv(self) -> float:
        """Coefficient of variation: standard deviation over mean."""

    def share_within(self, seconds: float) -> float:
        """Share of all draws that do not exceed `seconds`."""

    def sampler(self, generator: random.Random) -> Callable[[], float]:
        """A function that gives one draw per call, seconds."""

    def scaled_to(self, mean_s: float) -> Latency:
        """The same shape with another mean."""

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Constant:
    """Always the same.

    >>> Constant(0.8).share_within(0.7), Constant(0.8).share_within(0.8)
    (0.0, 1.0)
    """

    mean_s: float

    def __post_init__(self) -> None:
        _check_seconds("the constant latency", self.mean_s)

    @property
    def cv(self) -> float:
        return 0.0

    def share_within(self, seconds: float) -> float:
        return float(seconds >= self.mean_s)

    def sampler(self, generator: random.Random) -> Callable[[], float]:
        return lambda: self.mean_s

    def scaled_to(self, mean_s: float) -> Constant:
        return Constant(mean_s)


@dataclass(frozen=True)
class Lognormal:
    """Lognormal by its mean, above 0, and its coefficient of variation, from 0 up; its median is mean/√(1 + cv²).

    >>> round(Lognormal(2.0, 0.75).share_within(1.6), 12)
    0.5
    """

    mean_s: float
    cv: float

    def __post_init__(self) -> None:
        _check_seconds("the mean latency", self.mean_s)
        if self.mean_s == 0:
            raise UserError("the mean latency = 0 has no lognormal distribution: give seconds above 0, or a constant")
        if not (math.isfinite(self.cv) and self.cv >= 0):
            raise UserError(f"the latency's cv = {self.cv!r} is not a finite number from 0 up: give deviation over mean")

    @cached_property
    def _logarithm(self) -> tuple[float, float]:
        """Mean and standard deviation of the logarithm: σ² = ln(1 + cv²)."""
        variance = math.log1p(self.cv * self.cv)
        return math.log(self.mean_s) - variance / 2, math.sqrt(variance)

    def share_within(self, seconds: float) -> float:
        mu, sigma = self._logarithm
        if seconds <= 0 or sigma == 0:
            return float(seconds >= self.mean_s)
        return math.erfc((mu - math.log(seconds)) / (sigma * math.sqrt(2))) / 2

    def sampler(self, generator: random.Random) -> Callable[[], float]:
        mu, sigma = self._logarithm
        gauss, exp = generator.gauss, math.exp
        return lambda: exp(gauss(mu, sigma))

    def scaled_to(self, mean_s: float) -> Latency:
        return Lognormal(mean_s, self.cv) if mean_s else Constant(0.0)


@dataclass(frozen=True)
class Empirical:
    """Measured latencies, each as likely as any other.

    >>> latency = Empirical((1.0, 3.0, 2.0, 4.0))
    >>> latency.mean_s, latency.share_within(3.0)
    (2.5, 0.75)
    """

    samples_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.samples_s:
            raise UserError("an empirical latency has no samples: give at least one measured group latency")
        for sample_s in self.samples_s:
            _check_seconds("a measured latency", sample_s)

    @cached_property
    def _sorted_s(self) -> list[float]:
        return sorted(self.samples_s)

    @cached_property
    def mean_s(self) -> float:
        return fmean(self.samples_s)

    @cached_property
    def cv(self) -> float:
        return pstdev(self.samples_s) / self.mean_s if self.mean_s else 0.0

    def share_within(self, seconds: float) -> float:
        return bisect_right(self._sorted_s, seconds) / len(self.samples_s)

    def sampler(self, generator: random.Random) -> Callable[[], float]:
        samples_s, count, draw = self.samples_s, len(self.samples_s), generator.random
        return lambda: samples_s[int(draw() * count)]

    def scaled_to(self, mean_s: float) -> Latency:
        if not self.mean_s:
            return Constant(mean_s)
        return Empirical(tuple(sample_s * mean_s / self.mean_s for sample_s in self.samples_s))


def _check_seconds(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise UserError(f"{name} = {value!r} is not a finite number from 0 up: give seconds")
