"""Dials: how far each number that a user can turn may go, all others as they are, with the learner always busy.

Invariants: a dial's limit is where the conditions that it acts on are just met; it keeps the learner busy only if the
conditions that it does not act on are met too, which each dial says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from echo2.capacity.model import Links, Prediction, Workload, ceiling, predict, required_throughput


@dataclass(frozen=True, slots=True)
class Dial:
    """One dial, its value and the value that just meets its conditions."""

    symbol: str
    unit: str
    value: float
    limit: float | None
    """Least S, κ or μ, greatest D or L that meets the conditions it acts on; None where no value does."""
    at_limit: Prediction | None
    """What the closed form says there; None where there is no limit."""

    @property
    def keeps_busy(self) -> bool:
        """Whether this dial alone, at its limit, lets the learner never wait."""
        return self.at_limit is not None and self.at_limit.binding.name == "learner"


def dials(workload: Workload, links: Links, groups_per_s: float) -> tuple[Dial, ...]:
    """S, κ, D, L and μ.

    At κ = 3 freshness binds, 2.8 s > 2 s; S = 5, κ = 2, D = 1.2 s or L = 0 would each do, a larger pool would not:

    >>> for dial in dials(Workload(1.0, 32, 4, 3, 0.8, 1.0), Links(2.0, 0.0), groups_per_s=96.0):
    ...     print(dial.symbol, dial.limit, dial.keeps_busy)
    S 5 True
    κ 2 True
    D 1.2 True
    L 0.0 True
    μ 32.0 False
    """
    return (
        _staleness_dial(workload, links, groups_per_s),
        _interval_dial(workload, links, groups_per_s),
        _dissemination_dial(workload, links, groups_per_s),
        _latency_dial(workload, links, groups_per_s),
        _throughput_dial(workload, links, groups_per_s),
    )


def _staleness_dial(workload: Workload, links: Links, groups_per_s: float) -> Dial:
    """D + L ≤ (S + 1 − κ)·T solved for S."""
    hidden_steps = ceiling((links.latency_s + workload.group_latency_s) / workload.learner_step_s)
    limit = hidden_steps + workload.publish_interval - 1
    at_limit = predict(replace(workload, staleness_bound=limit), links, groups_per_s)
    return Dial("S", "steps", workload.staleness_bound, limit, at_limit)


def _interval_dial(workload: Workload, links: Links, groups_per_s: float) -> Dial:
    """D_tx ≤ κT solved for κ: the least interval leaves freshness the most room."""
    limit = max(1, ceiling(links.transfer_s / workload.learner_step_s))
    if limit > workload.staleness_bound + 1:
        return Dial("κ", "steps", workload.publish_interval, None, None)
    at_limit = predict(replace(workload, publish_interval=limit), links, groups_per_s)
    return Dial("κ", "steps", workload.publish_interval, limit, at_limit)


def _dissemination_dial(workload: Workload, links: Links, groups_per_s: float) -> Dial:
    """D + L ≤ (S + 1 − κ)·T and D_tx ≤ κT solved for D, whose two parts keep their shares."""
    hidden_s = (workload.staleness_bound + 1 - workload.publish_interval) * workload.learner_step_s
    limit = hidden_s - workload.group_latency_s
    if limit < 0:
        return Dial("D", "s", links.latency_s, None, None)
    transfer_share = links.transfer_s / links.latency_s if links.latency_s else 0.0
    if transfer_share:
        limit = min(limit, workload.publish_interval * workload.learner_step_s / transfer_share)
    at_limit = predict(workload, Links(limit * transfer_share, limit * (1 - transfer_share)), groups_per_s)
    return Dial("D", "s", links.latency_s, limit, at_limit)


def _latency_dial(workload: Workload, links: Links, groups_per_s: float) -> Dial:
    """D + L ≤ (S + 1 − κ)·T solved for L."""
    hidden_s = (workload.staleness_bound + 1 - workload.publish_interval) * workload.learner_step_s
    limit = hidden_s - links.latency_s
    if limit < 0:
        return Dial("L", "s", workload.group_latency_s, None, None)
    at_limit = predict(replace(workload, group_latency_s=limit), links, groups_per_s)
    return Dial("L", "s", workload.group_latency_s, limit, at_limit)


def _throughput_dial(workload: Workload, links: Links, groups_per_s: float) -> Dial:
    """αμ ≥ B/T solved for μ."""
    limit = required_throughput(workload)
    return Dial("μ", "groups/s", groups_per_s, limit, predict(workload, links, limit))
