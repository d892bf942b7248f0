"""Drift: whether a run still does what its own terms predicted, and which term moved if not.

Invariants: pure; the start of the workers is no drift, and more workers are none either; a departure is told once, and what was
measured last is the reference from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from echo2.capacity.calibration import Observations, calibrate
from echo2.capacity.terms import TERM_NAMES, TermName, Terms, predict_run

if TYPE_CHECKING:
    from echo2.config import Config

LEAST_DEPARTURE = 0.10
"""Difference between observed and predicted utilisation that is told."""

WINDOW_STEPS = 20
WINDOW_S = 10.0
"""Least length of a window, in steps and in seconds."""

EXPLAINING_SHARE = 0.5
"""Share of the departure that a term has to explain to be named."""

UNITS: dict[TermName, str] = {"T": "s", "L": "s", "D_tx": "s", "D_fix": "s", "α": "%", "μ": "groups/s"}


@dataclass(frozen=True, slots=True)
class Departure:
    """Utilisation that is not what the former terms predicted."""

    observed: float
    predicted: float
    former: Terms
    present: Terms
    term: TermName | None
    """The term that moved; None where none explains it."""
    explained: float
    """What the former terms predict with that term's present value; `predicted` where there is none."""

    def __str__(self) -> str:
        moved = "fell" if self.observed < self.predicted else "rose"
        told = f"utilisation {moved} to {_percent(self.observed)} where {_percent(self.predicted)} were predicted: "
        if self.term is None:
            return told + "no term that was measured explains it, so the cause lies outside the capacity model"
        before, now = value_of(self.former, self.term), value_of(self.present, self.term)
        change = f"{self.term} moved from {before:.3g} to {now:.3g} {UNITS[self.term]}{self._workers()}"
        return told + f"{change}, which explains {_percent(self.explained)}"

    def _workers(self) -> str:
        gone = self.former.workers - self.present.workers
        return f" ({gone} of {self.former.workers} workers are gone)" if self.term == "μ" and gone > 0 else ""


def find_departure(config: Config, former: Terms, present: Terms, observed: float) -> Departure | None:
    """What moved, if utilisation is not what the former terms predicted; raises UserError where a term is impossible.

    The term that moved is the one whose present value, put into the former terms, brings the prediction nearest to what is
    observed.
    """
    predicted = predict_run(config, former).utilisation
    gap = observed - predicted
    if abs(gap) <= LEAST_DEPARTURE:
        return None
    explained = {name: predict_run(config, with_term(former, present, name)).utilisation for name in TERM_NAMES}
    name = min(TERM_NAMES, key=lambda name: abs(observed - explained[name]))
    if abs(observed - explained[name]) > (1 - EXPLAINING_SHARE) * abs(gap):
        return Departure(observed, predicted, former, present, None, predicted)
    return Departure(observed, predicted, former, present, name, explained[name])


def with_term(terms: Terms, other: Terms, name: TermName) -> Terms:
    """`terms` with one term of `other`."""
    match name:
        case "T":
            return replace(terms, learner_step_s=other.learner_step_s)
        case "L":
            return replace(terms, latency=other.latency)
        case "D_tx":
            return replace(terms, transfer_s=other.transfer_s)
        case "D_fix":
            return replace(terms, fixed_s=other.fixed_s)
        case "α":
            return replace(terms, accepted_share=other.accepted_share)
        case "μ":
            return replace(terms, groups_per_s=other.groups_per_s, workers=other.workers)


def value_of(terms: Terms, name: TermName) -> float:
    """The term's figure in the unit of `UNITS`; of L the mean."""
    values: dict[TermName, float] = {
        "T": terms.learner_step_s,
        "L": terms.latency.mean_s,
        "D_tx": terms.transfer_s,
        "D_fix": terms.fixed_s,
        "α": 100 * terms.accepted_share,
        "μ": terms.groups_per_s,
    }
    return values[name]


class DriftWatch:
    """Looks at a run in windows; the first one after the start is the reference.

    A window has at least `WINDOW_STEPS` and `WINDOW_S`, and lasts until every term was measured in it.
    """

    def __init__(self, config: Config, place: str) -> None:
        self._config = config
        self._place = place
        self._since_s: float | None = None
        self._workers = 0
        self._reference: Terms | None = None
        self._departed = False
        self.predicted: float | None = None
        """Utilisation that the reference predicts; None before there is one."""
        self.observed: float | None = None
        """Utilisation of the last whole window."""

    def look(self, observe: Callable[[float], Observations]) -> Departure | None:
        """Look at what was observed since a time; a departure is told once two windows in a row show it.

        `observe` gives the observations since a time on the ledger's clock. Raises UserError where a term is impossible.
        """
        seen = observe(self._since_s or 0.0)
        if not seen.steps:
            return None
        newest_s = seen.steps[-1].finished_at_s
        if self._since_s is None or len(seen.workers) > self._workers:
            self._since_s, self._workers, self._reference = newest_s, len(seen.workers), None
            return None
        if len(seen.steps) < WINDOW_STEPS or newest_s - self._since_s < WINDOW_S:
            return None
        calibration = calibrate(seen)
        if calibration.missing:
            return None
        self._since_s, self._workers, self.observed = newest_s, len(seen.workers), seen.utilisation
        return self._judge(calibration.terms(self._place), seen.utilisation or 0.0)

    def _judge(self, present: Terms, observed: float) -> Departure | None:
        if self._reference is None:
            self._refer_to(present)
            return None
        departure = find_departure(self._config, self._reference, present, observed)
        confirmed, self._departed = departure is not None and self._departed, departure is not None
        if not confirmed:
            return None
        self._refer_to(present)
        return departure

    def _refer_to(self, terms: Terms) -> None:
        self._reference, self._departed = terms, False
        self.predicted = predict_run(self._config, terms).utilisation


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
