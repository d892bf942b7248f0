"""Drift: whether a run still does what its own terms predicted, and which term moved if not.

Invariants: pure; the start of the workers is no drift, and more workers are none either; a departure is told once, and what was
measured last is the reference from then on. A model that does not describe the run is said to, once, and changes are held
against what it is off by from then on.
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
    """By the former terms, less what the model was off by when they were measured."""
    former: Terms
    present: Terms
    term: TermName | None
    """The term that moved; None where none explains it."""
    explained: float
    """What the former terms predict with that term's present value; `predicted` where there is none."""

    kind = "capacity drift"

    @property
    def subject(self) -> str:
        """The term that moved, for an event of the ledger."""
        return self.term or "unexplained"

    def __str__(self) -> str:
        moved = "fell" if self.observed < self.predicted else "rose"
        told = f"utilisation {moved} to {_percent(self.observed)} where {_percent(self.predicted)} were predicted: "
        if self.term is None:
            return told + "no term that was measured explains it, so the cause lies outside the capacity model"
        before, now = value_of(self.former, self.term), value_of(self.present, self.term)
        change = f"{self.term} moved from {before:.3g} to {now:.3g} {UNITS[self.term]}{self._workers()}"
        return told + f"{change}, with which {_percent(self.explained)} would be predicted"

    def _workers(self) -> str:
        gone = self.former.workers - self.present.workers
        return f" ({gone} of {self.former.workers} workers are gone)" if self.term == "μ" and gone > 0 else ""


@dataclass(frozen=True, slots=True)
class Misfit:
    """Utilisation that is not what the terms predict that were measured at the same time."""

    observed: float
    predicted: float

    kind = "capacity misfit"
    subject = "model"

    def __str__(self) -> str:
        return (
            f"the capacity model does not describe this run: utilisation is {_percent(self.observed)} where the terms "
            f"measured at the same time predict {_percent(self.predicted)}; from now on changes of it are told"
        )


def find_departure(config: Config, former: Terms, present: Terms, observed: float, offset: float = 0.0) -> Departure | None:
    """What moved, if utilisation is not what the former terms predicted; raises UserError where a term is impossible.

    The term that moved is the one whose present value, put into the former terms, brings the prediction nearest to what is
    observed. `offset` is what was observed less what was predicted when the former terms were measured.
    """

    def predict(terms: Terms) -> float:
        return min(1.0, max(0.0, predict_run(config, terms).utilisation + offset))

    predicted = predict(former)
    gap = observed - predicted
    if abs(gap) <= LEAST_DEPARTURE:
        return None
    explained = {name: predict(with_term(former, present, name)) for name in TERM_NAMES}
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
            # At the same μ a longer L is spent in more slots.
            return replace(terms, latency=other.latency, worker_slots=other.worker_slots)
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
        self._offset = 0.0
        self._misfit_told = False
        self._departed = False
        self._fewer_since_s: float | None = None
        self.predicted: float | None = None
        """Utilisation that the reference predicts; None before there is one."""
        self.observed: float | None = None
        """Utilisation of the last whole window."""

    def look(self, observe: Callable[[float], Observations]) -> Departure | Misfit | None:
        """Look at what was observed since a time; a departure is told once two windows in a row show it.

        One window suffices where workers have been gone for longer than the heartbeat time-out: that is no accident. A misfit
        is told once, with the first reference that has one. `observe` gives the observations since a time on the ledger's
        clock. Raises UserError where a term is impossible.
        """
        seen = observe(self._since_s or 0.0)
        if not seen.steps:
            return None
        newest_s = seen.steps[-1].finished_at_s
        if self._since_s is None or len(seen.workers) > self._workers:
            self._since_s, self._workers, self._reference = newest_s, len(seen.workers), None
            return None
        self._count_workers(len(seen.workers), newest_s)
        if len(seen.steps) < WINDOW_STEPS or newest_s - self._since_s < WINDOW_S:
            return None
        calibration = calibrate(seen)
        if calibration.missing:
            return None
        self._since_s, self._workers, self.observed = newest_s, len(seen.workers), seen.utilisation
        return self._judge(calibration.terms(self._place), seen.utilisation or 0.0, newest_s)

    def _count_workers(self, workers: int, now_s: float) -> None:
        """Remember since when there are fewer than in the reference window."""
        if self._reference is None or workers >= self._reference.workers:
            self._fewer_since_s = None
        elif self._fewer_since_s is None:
            self._fewer_since_s = now_s

    def _judge(self, present: Terms, observed: float, now_s: float) -> Departure | Misfit | None:
        if self._reference is None:
            predicted = self._refer_to(present, observed)
            if not self._offset or self._misfit_told:
                return None
            self._misfit_told = True
            return Misfit(observed, predicted)
        departure = find_departure(self._config, self._reference, present, observed, self._offset)
        fewer_s = 0.0 if self._fewer_since_s is None else now_s - self._fewer_since_s
        certain = self._departed or fewer_s > self._config.hub.heartbeat_timeout_s
        self._departed = departure is not None
        if departure is None or not certain:
            return None
        self._refer_to(present, observed)
        return departure

    def _refer_to(self, terms: Terms, observed: float) -> float:
        """Hold what comes against these terms; returns what they predict."""
        predicted = predict_run(self._config, terms).utilisation
        off = observed - predicted
        self._offset = off if abs(off) > LEAST_DEPARTURE else 0.0
        self._reference, self._departed, self._fewer_since_s, self.predicted = terms, False, None, predicted
        return predicted


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
