"""The plan of a run: its terms and their source, the predicted utilisation, what binds, and what would change it.

Invariants: a plan says where each term comes from; the same arithmetic serves estimates before a run and measurements after
it; throughputs are groups per second; a plan that cannot reach its target says so and gives the best that can be had.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from echo2.capacity.dials import Dial, dials
from echo2.capacity.model import Condition, Links, Prediction, SerialRule, Workload, ceiling, serial_rule
from echo2.capacity.provisioning import Provision, provision, simulate_pool
from echo2.capacity.simulation import SimulationResult
from echo2.capacity.slow_end import predict_pool, slow_end_latency_s
from echo2.capacity.terms import Terms, estimate_terms

if TYPE_CHECKING:
    from echo2.config import Config

CONDITION_TEXT = {
    "generation": "generation: μ ≥ B/(αT)",
    "links": "links: κ·T ≥ D_tx",
    "freshness": "freshness: (S + 1 − κ)·T ≥ D + L",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is expected to do, and what would make it do better."""

    run_name: str
    steps: int
    terms: Terms
    workload: Workload
    links: Links
    prediction: Prediction
    """The closed form for the planned pool."""
    simulated: SimulationResult
    """The twin for the planned pool."""
    slow_end_s: float
    """L at the slow end of a batch on the planned pool."""
    target_utilisation: float
    best: Provision
    """The smallest pool for the target, at the κ that asks for the fewest slots."""
    configured: Provision
    """The smallest pool for the target at the configured κ."""
    dials: tuple[Dial, ...]
    serial: SerialRule
    serial_prediction: Prediction | None
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

    def workers_for(self, groups_per_s: float) -> int:
        """Workers that complete so many groups per second, each as fast as the planned ones are on average."""
        return max(1, ceiling(groups_per_s * self.terms.workers / self.terms.groups_per_s))


def make_plan(config: Config, terms: Terms | None = None) -> Plan:
    """The plan of `config`, from measured terms or else from the estimates in [capacity].

    Raises UserError where a term is impossible. Without workers in the configuration, the plan takes what the target needs.
    """
    workers_chosen = terms is None and config.fleet.workers == 0
    terms = terms or estimate_terms(config, config.fleet.workers or 1)
    workload, links, latency, target = terms.workload(config), terms.links, terms.latency, config.capacity.target_utilisation
    configured = provision(workload, links, target, latency=latency, publish_intervals=[workload.publish_interval])
    if workers_chosen:
        terms = terms.with_workers(max(1, ceiling(configured.groups_per_s / terms.groups_per_s)))
    serial = serial_rule(workload, links)
    serial_prediction = None
    if serial.groups_per_s is not None:
        at_serial = replace(workload, publish_interval=serial.publish_interval)
        serial_prediction = predict_pool(at_serial, links, max(1, ceiling(serial.groups_per_s * latency.mean_s)), latency)
    return Plan(
        run_name=config.run.name,
        steps=config.run.steps,
        terms=terms,
        workload=workload,
        links=links,
        prediction=predict_pool(workload, links, terms.slots, latency),
        simulated=simulate_pool(workload, links, terms.slots, latency),
        slow_end_s=slow_end_latency_s(latency, workload.groups_per_batch, terms.slots, workload.accepted_share),
        target_utilisation=target,
        best=provision(workload, links, target, latency=latency),
        configured=configured,
        dials=dials(workload, links, terms.slots, latency, target),
        serial=serial,
        serial_prediction=serial_prediction,
        workers_chosen=workers_chosen,
        worker_price_usd_per_hour=config.fleet.price_usd_per_hour,
    )


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
            ("dial", "now", f"for {_percent(plan.target_utilisation)} utilisation, all else equal"),
            [_dial_row(dial, plan) for dial in plan.dials],
        ),
        _table(("rule", "κ", "groups/s", "workers", "utilisation"), _rule_rows(plan)),
    )
    return "\n\n".join((head, *sections))


def _term_rows(plan: Plan) -> list[tuple[str, ...]]:
    terms, source = plan.terms, plan.terms.provenance
    each = (
        f"{terms.workers} × {_number(terms.groups_per_s / terms.workers)} groups/s per worker, {terms.slots} groups at a time"
    )
    spread = f"cv {_number(terms.latency.cv)}; a batch's slow end takes {_quantity(plan.slow_end_s, 's')} on this pool"
    return [
        ("T      learner's work per step", _quantity(terms.learner_step_s, "s"), source["T"]),
        ("L      lease to scored group, mean", _quantity(terms.latency.mean_s, "s"), f"{source['L']}: {spread}"),
        ("D_tx   snapshot occupies the links", _quantity(terms.transfer_s, "s"), source["D_tx"]),
        ("D_fix  rest of dissemination", _quantity(terms.fixed_s, "s"), source["D_fix"]),
        ("α      accepted share of groups", _percent(terms.accepted_share), source["α"]),
        ("μ      throughput of the pool", _quantity(terms.groups_per_s, "groups/s"), f"{source['μ']}: {each}"),
    ]


def _prediction_rows(plan: Plan) -> list[tuple[str, ...]]:
    prediction, needed, best, simulated = plan.prediction, plan.configured, plan.best, plan.simulated
    target = _percent(plan.target_utilisation)
    needed_for = f"for {target} utilisation"
    if not needed.reachable:
        needed_for = f"{target} is out of reach of any pool; this gives the best, {_percent(needed.prediction.utilisation)}"
    chosen = ", since fleet.workers = 0 leaves it open" if plan.workers_chosen else ""
    rate = f"{plan.terms.workers} × {_number(plan.worker_price_usd_per_hour)} USD/h, without the learner"
    best_text = f"with {_number(best.groups_per_s)} groups/s, U = {_percent(best.prediction.utilisation)}"
    return [
        ("step time τ", _quantity(prediction.step_time_s, "s"), f"{_quantity(simulated.step_time_s, 's')} in simulation"),
        (
            "learner utilisation U = T/τ",
            _percent(prediction.utilisation),
            f"target {target}; {_percent(simulated.utilisation)} in simulation",
        ),
        ("binding term", prediction.binding.name, _binding_text(plan)),
        ("staleness", f"{_number(simulated.staleness_mean)} steps", _staleness_text(simulated)),
        ("waste", _percent(simulated.waste_share), "of the groups generated: filtered, expired or lost"),
        ("needed throughput", _quantity(needed.groups_per_s, "groups/s"), needed_for),
        ("needed workers", str(plan.workers_for(needed.groups_per_s)), f"planned with {plan.terms.workers}{chosen}"),
        ("best κ", str(best.publish_interval), best_text),
        ("whole run", _duration(plan.duration_s), f"{plan.steps} steps · τ"),
        ("workers' rent", f"{plan.workers_usd:.2f} USD", rate),
    ]


def _staleness_text(simulated: SimulationResult) -> str:
    shares = ", ".join(
        f"{steps}: {_percent(share)}" for steps, share in enumerate(simulated.staleness_shares) if share >= 0.005
    )
    return f"mean; at most {simulated.staleness_max}; {shares}"


def _binding_text(plan: Plan) -> str:
    prediction, κ = plan.prediction, plan.workload.publish_interval
    skipped = ""
    if prediction.carried_interval != κ:
        skipped = f"; the links carry one snapshot in {prediction.carried_interval} steps, so workers skip some of κ = {κ}"
    binding = prediction.binding
    if binding.name == "learner":
        return f"it never waits{skipped}"
    wait_s = prediction.step_time_s * (1 - prediction.utilisation)
    short = f"short by {_quantity(-binding.slack, binding.unit)}"
    return f"{short}; the learner waits {_quantity(wait_s, 's')} per step{skipped}"


def _condition_row(condition: Condition) -> tuple[str, ...]:
    return (
        CONDITION_TEXT[condition.name],
        _quantity(condition.needed, condition.unit),
        _quantity(condition.available, condition.unit),
        _quantity(condition.slack, condition.unit),
        _quantity(condition.step_time_s, "s"),
    )


def _dial_row(dial: Dial, plan: Plan) -> tuple[str, ...]:
    value = _quantity(dial.value, dial.unit)
    if dial.limit is None or dial.at_limit is None:
        return (dial.symbol, value, f"does not help: {plan.prediction.binding.name} binds")
    limit = _quantity(dial.limit, dial.unit)
    if dial.symbol == "μ":
        limit += f", {plan.workers_for(dial.limit)} workers"
    if not dial.reaches_target:
        rest = dial.at_limit
        return (dial.symbol, value, f"not alone: at {limit} U = {_percent(rest.utilisation)}, {rest.binding.name} binds")
    return (dial.symbol, value, f"at {'most' if dial.at_most else 'least'} {limit}")


def _rule_rows(plan: Plan) -> list[tuple[str, ...]]:
    def row(rule: str, interval: int, groups_per_s: float, utilisation: float) -> tuple[str, ...]:
        return (rule, str(interval), _number(groups_per_s), str(plan.workers_for(groups_per_s)), _percent(utilisation))

    def overlap(rule: str, pool: Provision) -> tuple[str, ...]:
        return row(rule, pool.publish_interval, pool.groups_per_s, pool.prediction.utilisation)

    rows = [overlap("overlap, κ as configured", plan.configured)]
    if plan.best.publish_interval != plan.workload.publish_interval:
        rows.append(overlap("overlap, best κ", plan.best))
    serial, name = plan.serial, "serial, κB/(αμ) + D ≤ κT"
    if serial.groups_per_s is None or plan.serial_prediction is None:
        return [*rows, (name, str(serial.publish_interval), "none", "none", f"cannot be met: {serial.obstacle}")]
    return [*rows, row(name, serial.publish_interval, serial.groups_per_s, plan.serial_prediction.utilisation)]


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
