"""Relaxations: what would have to give for a plan to exist where none keeps to all limits.

Invariants: each relaxation changes one limit, as little as its steps allow, and comes with the cheapest plan that it allows;
that plan keeps to everything else; a share of one domain moves on until the plan is no larger than whole machines make it;
shares move by hundredths, quotas by accelerators, staleness by learner steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from echo2.capacity.limits import TOLERANCE, Limits
from echo2.capacity.offers import Candidate
from echo2.capacity.selection import Selection, select
from echo2.capacity.slow_end import least_integer
from echo2.capacity.tables import number, percent
from echo2.errors import WaitTimeout

MOST_SLACK_STEPS = 256
"""Steps up to which S + 1 − κ is raised."""

SIZED = 2.0
"""Times the need, or the largest of its machines, that a plan with another share of one domain gives at most."""

UNLIMITED = 10**9
"""A quota that nothing exhausts."""


@dataclass(frozen=True, slots=True)
class Relaxation:
    """One change, and the cheapest plan with it."""

    name: str
    """What is changed."""
    sentence: str
    """From what to what."""
    selection: Selection
    needed_groups_per_s: float
    """The throughput that this plan gives at least."""
    fresh_s: float
    """What D + L comes to at most for its machines."""


def is_fresh(candidate: Candidate, fresh_s: float) -> bool:
    """Whether its groups are scored before they are too old: D + L ≤ (S + 1 − κ)·T."""
    return candidate.age_s <= fresh_s * (1 + TOLERANCE)


@dataclass(frozen=True, slots=True)
class RelaxationSearch:
    """Looks for the least change of each limit that allows a plan."""

    candidates: Sequence[Candidate]
    learner_step_s: float
    slack_steps: int
    needed_groups_per_s: float
    limits: Limits
    time_limit_s: float

    def least(self) -> tuple[Relaxation, ...]:
        """Every single change that allows a plan; all of them together where no single one does, so long as there is any."""
        return tuple(self._alone()) or tuple(self._together())

    def most(self) -> tuple[Selection, float] | None:
        """The cheapest plan for the needed throughput or, where none keeps to the limits, for as many hundredths of it as can
        be had, and that throughput."""
        whole = self._select(self.limits)
        if whole is not None:
            return whole, self.needed_groups_per_s
        return next(((less.selection, less.needed_groups_per_s) for less in self._need()), None)

    def _alone(self) -> Iterator[Relaxation]:
        """One limit at a time."""
        yield from (*self._budget(), *self._quotas(), *self._cap(), *self._floor(), *self._staleness(), *self._need())

    def _together(self) -> Iterator[Relaxation]:
        """All limits but the staleness bound dropped."""
        free = Limits(failure_domain=self.limits.failure_domain)
        yield from self._relaxed("all limits together", "without budget, quotas, cap and on-demand share", free)

    def _budget(self) -> Iterator[Relaxation]:
        if self.limits.budget_usd_per_hour == math.inf:
            return
        # The least budget is the least rent: what starts cost is no part of it.
        open_ended = replace(self.limits, budget_usd_per_hour=math.inf, switching_horizon_h=math.inf)
        selection = self._select(open_ended)
        if selection is not None:
            least, now = selection.usd_per_hour, self.limits.budget_usd_per_hour
            sentence = f"a budget of {number(least)} USD/h in place of {number(now)}"
            yield from self._relaxed("the budget", sentence, replace(self.limits, budget_usd_per_hour=least))

    def _quotas(self) -> Iterator[Relaxation]:
        for place, quota in enumerate(self.limits.quotas):
            raised = partial(self._with_quota, place)
            enough = self._select(raised(UNLIMITED))
            if enough is not None:
                most = math.ceil(enough.accelerators_under(quota))
                least = self._least(raised, quota.accelerators + 1, most) or most
                sentence = f"a quota {quota.name} of {least} accelerators in place of {quota.accelerators}"
                yield from self._relaxed(f"the quota {quota.name}", sentence, raised(least))

    def _with_quota(self, place: int, accelerators: int) -> Limits:
        """The limits with another number in one quota."""
        quotas = list(self.limits.quotas)
        quotas[place] = replace(quotas[place], accelerators=accelerators)
        return replace(self.limits, quotas=tuple(quotas))

    def _cap(self) -> Iterator[Relaxation]:
        limits, domain = self.limits, self.limits.failure_domain
        if not limits.caps_domains:
            return

        def at(hundredths: int) -> Limits:
            return replace(limits, max_domain_share=hundredths / 100)

        first = math.floor(100 * limits.max_domain_share) + 1
        least = self._least(at, first, 100, self._is_sized) or self._least(at, first, 100)
        if least is not None:
            sentence = f"{least} % of the throughput in one {domain} in place of {percent(limits.max_domain_share)}"
            yield from self._relaxed(f"the share of one {domain}", sentence, at(least))

    def _floor(self) -> Iterator[Relaxation]:
        now = self.limits.min_on_demand_share

        def less(hundredths: int) -> Limits:
            return replace(self.limits, min_on_demand_share=max(0.0, now - hundredths / 100))

        least = self._least(less, 1, math.ceil(100 * now)) if now else None
        if least is not None:
            share = less(least).min_on_demand_share
            sentence = f"{percent(share)} of the need on demand in place of {percent(now)}"
            yield from self._relaxed("the on-demand share", sentence, less(least))

    def _staleness(self) -> Iterator[Relaxation]:
        oldest = max((candidate.age_s for candidate in self.candidates), default=0.0)
        most = min(MOST_SLACK_STEPS, math.ceil(oldest / self.learner_step_s))
        if most <= self.slack_steps:
            return
        least = least_integer(
            lambda steps: self._select(self.limits, slack_steps=steps) is not None, self.slack_steps + 1, most
        )
        if least is not None:
            sentence = f"S + 1 − κ = {least} in place of {self.slack_steps}: raise S by {least - self.slack_steps}, or lower κ"
            yield from self._relaxed("the staleness bound", sentence, self.limits, slack_steps=least)

    def _need(self) -> Iterator[Relaxation]:
        def enough(hundredths: int) -> bool:
            return self._select(self.limits, needed=self.needed_groups_per_s * (1 - hundredths / 100)) is not None

        least = least_integer(enough, 1, 99)
        if least is not None:
            now = self.needed_groups_per_s
            needed = now * (1 - least / 100)
            sentence = f"{number(needed)} groups/s in place of {number(now)}: the learner waits for the rest"
            yield from self._relaxed("the throughput", sentence, self.limits, needed=needed)

    def _is_sized(self, selection: Selection) -> bool:
        """Whether it is no larger than the need and whole machines make it."""
        largest = max(candidate.effective_groups_per_s for candidate, _ in selection.chosen)
        return selection.groups_per_s <= SIZED * max(self.needed_groups_per_s, largest) * (1 + TOLERANCE)

    def _least(
        self, at: Callable[[int], Limits], least: int, most: int, fits: Callable[[Selection], bool] = lambda _: True
    ) -> int | None:
        """The least whole number whose limits allow a plan that `fits`; None where `most` does not."""

        def suffices(value: int) -> bool:
            selection = self._select(at(value))
            return selection is not None and fits(selection)

        return least_integer(suffices, least, most) if least <= most else None

    def _relaxed(
        self, name: str, sentence: str, limits: Limits, slack_steps: int | None = None, needed: float | None = None
    ) -> Iterator[Relaxation]:
        selection = self._select(limits, slack_steps, needed)
        if selection is not None:
            fresh_s = (slack_steps or self.slack_steps) * self.learner_step_s
            yield Relaxation(name, sentence, selection, needed or self.needed_groups_per_s, fresh_s)

    def _select(self, limits: Limits, slack_steps: int | None = None, needed: float | None = None) -> Selection | None:
        """None also where none was found in time."""
        fresh_s = (slack_steps or self.slack_steps) * self.learner_step_s
        fresh = [candidate for candidate in self.candidates if is_fresh(candidate, fresh_s)]
        try:
            return select(fresh, needed or self.needed_groups_per_s, limits, self.time_limit_s) if fresh else None
        except WaitTimeout:
            return None
