"""The plan of a run: its terms and their source, the predicted utilisation, what binds, and what would change it.

Invariants: a plan says where each term comes from; the same arithmetic serves estimates before a run and measurements after
it; throughputs are groups per second; a plan that cannot reach its target says so and gives the best that can be had.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from echo2.capacity.dials import Dial, dials
from echo2.capacity.model import (
    Condition,
    Links,
    Prediction,
    Provision,
    PublishInterval,
    SerialRule,
    Workload,
    best_publish_interval,
    ceiling,
    needed_groups_per_s,
    predict,
    serial_rule,
)
from echo2.errors import UserError

if TYPE_CHECKING:
    from echo2.config import Config

Source = Literal["estimate", "measured"]

SOURCE_TEXT: dict[Source, str] = {"estimate": "estimate from [capacity]", "measured": "measured in this run"}

CONDITION_TEXT = {
    "generation": "generation: μ ≥ B/(αT)",
    "links": "links: κ·T ≥ D_tx",
    "freshness": "freshness: (S + 1 − κ)·T ≥ D + L",
}


@dataclass(frozen=True, slots=True)
class Terms:
    """What the capacity model needs to know beside the configuration; `Workload` and `Links` refuse impossible numbers."""

    learner_step_s: float
    """T: seconds of learner work per step."""
    group_latency_s: float
    """L: seconds from a lease to its scored group, at the slow end of a batch."""
    groups_per_s: float
    """μ: groups per second that the whole pool completes."""
    accepted_share: float
    """α: share of generated groups that are trained."""
    transfer_s: float
    """D_tx: seconds that one snapshot occupies the links."""
    fixed_s: float
    """D_fix: the rest of the dissemination latency."""
    workers: int
    """Workers that the pool consists of."""
    source: Source

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UserError(f"workers = {self.workers} make no pool: give the number of workers that complete groups")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is expected to do, and what would make it do better."""

    run_name: str
    steps: int
    terms: Terms
    workload: Workload
    links: Links
    prediction: Prediction
    target_utilisation: float
    provision: Provision
    """The smallest pool for the target."""
    needed_workers: int
    """Workers for `provision`, each as fast as the pool's are on average."""
    best_interval: PublishInterval
    at_best_interval: Prediction
    """What the present pool does at the best κ."""
    best_interval_provision: Provision
    """The smallest pool for the target at the best κ."""
    dials: tuple[Dial, ...]
    serial: SerialRule
    at_serial: Prediction | None
    """What the closed form says of the serial rule's own κ and μ; None where no pool satisfies that rule."""
    workers_chosen: bool
    """Whether the number of workers was left open, so that the plan took what the target needs."""
    worker_price_usd_per_hour: float

    @property
    def duration_s(self) -> float:
        """The whole run: steps · τ."""
        return self.steps * self.prediction.step_time_s

    @property
    def workers_usd(self) -> float:
        """Rent of all workers over the whole run."""
        return self.duration_s / 3600 * self.terms.workers * self.worker_price_usd_per_hour


def make_plan(config: Config, terms: Terms | None = None) -> Plan:
    """The plan of `config`, from measured terms or else from the estimates in [capacity].

    Raises UserError where a term is impossible. Without workers in the configuration, the plan takes what the target needs.
    """
    workers_chosen = terms is None and config.fleet.workers == 0
    if terms is None:
        terms = estimate_terms(config)
    workload, links = workload_of(config, terms), Links(terms.transfer_s, terms.fixed_s)
    provision = needed_groups_per_s(workload, links, config.capacity.target_utilisation)
    best = best_publish_interval(workload, links, terms.groups_per_s)
    at_best = replace(workload, publish_interval=best.steps)
    serial = serial_rule(workload, links)
    at_serial = None
    if serial.groups_per_s is not None:
        at_serial = predict(replace(workload, publish_interval=serial.publish_interval), links, serial.groups_per_s)
    return Plan(
        run_name=config.run.name,
        steps=config.run.steps,
        terms=terms,
        workload=workload,
        links=links,
        prediction=predict(workload, links, terms.groups_per_s),
        target_utilisation=config.capacity.target_utilisation,
        provision=provision,
        needed_workers=max(1, ceiling(provision.groups_per_s * terms.workers / terms.groups_per_s)),
        best_interval=best,
        at_best_interval=predict(at_best, links, terms.groups_per_s),
        best_interval_provision=needed_groups_per_s(at_best, links, config.capacity.target_utilisation),
        dials=dials(workload, links, terms.groups_per_s),
        serial=serial,
        at_serial=at_serial,
        workers_chosen=workers_chosen,
        worker_price_usd_per_hour=config.fleet.price_usd_per_hour,
    )


def predict_run(config: Config, terms: Terms) -> Prediction:
    """The closed form for `config`'s B, S and κ with these terms; raises UserError where a term is impossible."""
    return predict(workload_of(config, terms), Links(terms.transfer_s, terms.fixed_s), terms.groups_per_s)


def workload_of(config: Config, terms: Terms) -> Workload:
    """B, S and κ from the configuration, T, L and α from the terms."""
    return Workload(
        learner_step_s=terms.learner_step_s,
        groups_per_batch=config.batch.groups,
        staleness_bound=config.staleness.bound,
        publish_interval=config.staleness.publish_interval,
        group_latency_s=terms.group_latency_s,
        accepted_share=terms.accepted_share,
    )


def estimate_terms(config: Config) -> Terms:
    """What [capacity] and [fleet] let expect; without workers in [fleet], as many as the target needs."""
    given = config.capacity

    def with_workers(workers: int) -> Terms:
        return Terms(
            learner_step_s=given.learner_step_s,
            group_latency_s=given.group_latency_s,
            groups_per_s=workers * given.worker_groups_per_s,
            accepted_share=given.accepted_share,
            transfer_s=given.transfer_s,
            fixed_s=given.dissemination_fixed_s,
            workers=workers,
            source="estimate",
        )

    if config.fleet.workers:
        return with_workers(config.fleet.workers)
    one = with_workers(1)
    needed = needed_groups_per_s(workload_of(config, one), Links(one.transfer_s, one.fixed_s), given.target_utilisation)
    return with_workers(max(1, ceiling(needed.groups_per_s / given.worker_groups_per_s)))


def render_plan(plan: Plan) -> str:
    """The plan as text, without a final line break."""
    workload = plan.workload
    head = (
        f"Plan of run {plan.run_name}: {plan.steps} steps of B = {workload.groups_per_batch} groups, "
        f"S = {workload.staleness_bound}, κ = {workload.publish_interval}"
    )
    sections = (
        _table(("term", "value", "source"), _term_rows(plan)),
        _table(("prediction", "value", ""), _prediction_rows(plan)),
        _table(
            ("condition", "needed", "available", "slack", "step time alone"),
            map(_condition_row, plan.prediction.conditions[1:]),
        ),
        _table(
            ("dial", "now", "to keep the learner busy, all else equal"),
            [_dial_row(dial, plan.prediction) for dial in plan.dials],
        ),
        _table(("rule", "κ", "groups/s", "workers", "utilisation"), _rule_rows(plan)),
    )
    return "\n\n".join((head, *sections))


def _term_rows(plan: Plan) -> list[tuple[str, ...]]:
    terms, source = plan.terms, SOURCE_TEXT[plan.terms.source]
    each = f"{terms.workers} × {_number(terms.groups_per_s / terms.workers)} groups/s per worker"
    return [
        ("T      learner's work per step", _quantity(terms.learner_step_s, "s"), source),
        ("L      lease to scored group, slow end", _quantity(terms.group_latency_s, "s"), source),
        ("D_tx   snapshot occupies the links", _quantity(terms.transfer_s, "s"), source),
        ("D_fix  rest of dissemination", _quantity(terms.fixed_s, "s"), source),
        ("α      accepted share of groups", _percent(terms.accepted_share), source),
        ("μ      throughput of the pool", _quantity(terms.groups_per_s, "groups/s"), f"{source}: {each}"),
    ]


def _prediction_rows(plan: Plan) -> list[tuple[str, ...]]:
    prediction, provision, best = plan.prediction, plan.provision, plan.best_interval
    target = _percent(plan.target_utilisation)
    needed_for = f"for {target} utilisation"
    if not provision.reachable:
        needed_for = f"{target} is out of reach of any pool; this gives the best, {_percent(provision.utilisation)}"
    chosen = ", since fleet.workers = 0 leaves it open" if plan.workers_chosen else ""
    links = f"; links need κ ≥ {best.links_need_steps}, above S + 1 = {plan.workload.staleness_bound + 1}"
    rate = f"{plan.terms.workers} × {_number(plan.worker_price_usd_per_hour)} USD/h, without the learner"
    best_text = f"U = {_percent(plan.at_best_interval.utilisation)} there" + ("" if best.feasible else links)
    return [
        ("step time τ", _quantity(prediction.step_time_s, "s"), ""),
        ("learner utilisation U = T/τ", _percent(prediction.utilisation), f"target {target}"),
        ("binding term", prediction.binding.name, _binding_text(prediction)),
        ("needed throughput", _quantity(provision.groups_per_s, "groups/s"), needed_for),
        ("needed workers", str(plan.needed_workers), f"planned with {plan.terms.workers}{chosen}"),
        ("best κ", str(best.steps), best_text),
        ("whole run", _duration(plan.duration_s), f"{plan.steps} steps · τ"),
        ("workers' rent", f"{plan.workers_usd:.2f} USD", rate),
    ]


def _binding_text(prediction: Prediction) -> str:
    binding = prediction.binding
    if binding.name == "learner":
        return "it never waits"
    wait_s = prediction.step_time_s * (1 - prediction.utilisation)
    return f"short by {_quantity(-binding.slack, binding.unit)}; the learner waits {_quantity(wait_s, 's')} per step"


def _condition_row(condition: Condition) -> tuple[str, ...]:
    return (
        CONDITION_TEXT[condition.name],
        _quantity(condition.needed, condition.unit),
        _quantity(condition.available, condition.unit),
        _quantity(condition.slack, condition.unit),
        _quantity(condition.step_time_s, "s"),
    )


def _dial_row(dial: Dial, now: Prediction) -> tuple[str, ...]:
    value = _quantity(dial.value, dial.unit)
    if dial.limit is None or dial.at_limit is None:
        return (dial.symbol, value, "no value is enough")
    limit = _quantity(dial.limit, dial.unit)
    if not dial.keeps_busy:
        rest = dial.at_limit
        return (dial.symbol, value, f"not alone: at {limit} {rest.binding.name} binds, U = {_percent(rest.utilisation)}")
    bound = "at most" if dial.symbol in ("D", "L") else "at least"
    return (dial.symbol, value, f"{bound} {limit}" + ("" if now.binding.name == "learner" else ": lifts the binding term"))


def _rule_rows(plan: Plan) -> list[tuple[str, ...]]:
    def row(rule: str, interval: int, groups_per_s: float, utilisation: float) -> tuple[str, ...]:
        workers = ceiling(groups_per_s * plan.terms.workers / plan.terms.groups_per_s)
        return (rule, str(interval), _number(groups_per_s), str(workers), _percent(utilisation))

    def overlap(rule: str, interval: int, provision: Provision) -> tuple[str, ...]:
        return row(rule, interval, provision.groups_per_s, provision.utilisation)

    rows = [overlap("overlap, κ as configured", plan.workload.publish_interval, plan.provision)]
    if plan.best_interval.steps != plan.workload.publish_interval:
        rows.append(overlap("overlap, best κ", plan.best_interval.steps, plan.best_interval_provision))
    serial, name = plan.serial, "serial, κB/(αμ) + D ≤ κT"
    if serial.groups_per_s is None or plan.at_serial is None:
        return [*rows, (name, str(serial.publish_interval), "none", "none", f"cannot be met: {serial.obstacle}")]
    return [*rows, row(name, serial.publish_interval, serial.groups_per_s, plan.at_serial.utilisation)]


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{round(value, 9) + 0.0:.4g}"


def _quantity(value: float, unit: str) -> str:
    return f"{_number(value)} {'step' if unit == 'steps' and value == 1 else unit}"


def _percent(share: float) -> str:
    return f"{_number(100 * share)} %"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return _quantity(seconds, "s")
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s} s"
    hours, rest_minutes = divmod(minutes, 60)
    return f"{hours} h {rest_minutes} min"
