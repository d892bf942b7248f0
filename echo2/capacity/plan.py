"""The plan of a run: its terms and their source, the predicted utilisation, what binds, and what would change it.

Invariants: a plan says where each term comes from; the same arithmetic serves estimates before a run and measurements after
it; throughputs are groups per second; a plan that cannot reach its target says so and gives the best that can be had.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from echo2.capacity.dials import Dial, Outlook, Situation, dials, outlooks
from echo2.capacity.latencies import Latency
from echo2.capacity.model import Condition, Links, Prediction, SerialRule, Workload, ceiling, required_throughput, serial_rule
from echo2.capacity.pool import PoolUnit
from echo2.capacity.provisioning import Provision, intervals_worth_trying, provision, simulate_pool
from echo2.capacity.simulation import SimulationResult
from echo2.capacity.slow_end import least_integer, predict_pool, reaches, slow_end_latency_s
from echo2.capacity.tables import counted, duration, money, number, percent, quantity, table
from echo2.capacity.terms import Terms, estimate_terms
from echo2.capacity.transfer import transfer_of

if TYPE_CHECKING:
    from echo2.config import Config

CONDITION_TEXT = {
    "generation": "generation: μ ≥ B/(αT)",
    "links": "links: κ·T ≥ D_tx",
    "freshness": "freshness: (S + 1 − κ)·T ≥ D + W",
}


MOST_BOUND = 64
"""Greatest S that is proposed."""

BOUNDS_TRIED = 4
"""S, from the closed form's on, that the twin is asked about."""


ROUNDS = 4
"""How often the workers that the target needs are counted anew, since more of them may make D longer."""


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
    in_calls: bool
    """Whether workers generate in calls."""
    dials: tuple[Dial, ...]
    outlooks: tuple[Outlook, ...]
    """The first one as planned; none where it is not known what travels on which links."""
    serial: SerialRule
    serial_prediction: Prediction | None
    """What the closed form says of the serial rule's own κ and μ; None where no pool satisfies that rule."""
    serial_simulated: SimulationResult | None
    """What the twin says of them."""
    together: tuple[int, Provision] | None
    """The least S above the configured one with which some pool reaches the target, and that pool; None where no S is needed,
    or none helps."""
    workers_chosen: bool
    """Whether the number of workers was left open, so that the plan took what the target needs."""
    worker_price_usd_per_hour: float

    @property
    def duration_s(self) -> float:
        """The whole run without its start: steps · τ, by the simulation."""
        return self.steps * self.simulated.step_time_s

    @property
    def workers_usd(self) -> float:
        """Rent of all workers over the whole run."""
        return self.duration_s / 3600 * self.terms.workers * self.worker_price_usd_per_hour

    @property
    def reaches_target(self) -> bool:
        """Whether the planned pool does, by the simulation."""
        return self.simulated.utilisation >= self.target_utilisation * (1 - 1e-6)

    def workers_for(self, groups_per_s: float) -> int:
        """Workers that complete so many groups per second, each as fast as the planned ones are on average."""
        return _workers_for(self.terms, groups_per_s)


def make_plan(config: Config, terms: Terms | None = None) -> Plan:
    """The plan of `config`, from measured terms or else from the estimates in [capacity].

    Raises UserError where a term is impossible. Without workers in the configuration, the plan takes what the target needs.
    """
    workers_chosen = terms is None and config.fleet.workers == 0
    if terms is None:
        terms = _terms_for_target(config) if workers_chosen else estimate_terms(config, config.fleet.workers)
    workload, links, latency, target = terms.workload(config), terms.links, terms.latency, config.capacity.target_utilisation
    unit = terms.unit(config)
    configured = provision(workload, links, target, latency=latency, publish_intervals=[workload.publish_interval], unit=unit)
    best = provision(workload, links, target, latency=latency, unit=unit)
    serial = serial_rule(workload, links)
    serial_prediction = serial_simulated = None
    if serial.groups_per_s is not None:
        at_serial, slots = replace(workload, publish_interval=serial.publish_interval), serial.groups_per_s * latency.mean_s
        serial_prediction = predict_pool(at_serial, links, slots, latency)
        serial_simulated = simulate_pool(at_serial, links, slots, latency, unit)
    now = Situation(workload, links, terms.slots, latency)
    return Plan(
        run_name=config.run.name,
        steps=config.run.steps,
        terms=terms,
        workload=workload,
        links=links,
        prediction=now.predict(),
        simulated=simulate_pool(workload, links, terms.slots, latency, unit),
        slow_end_s=slow_end_latency_s(latency, workload.groups_per_batch, terms.slots, workload.accepted_share),
        target_utilisation=target,
        best=best,
        configured=configured,
        in_calls=unit.in_calls,
        dials=dials(now, target),
        outlooks=outlooks(now, transfer_of(config, terms.links_seen), terms.workers),
        serial=serial,
        serial_prediction=serial_prediction,
        serial_simulated=serial_simulated,
        together=None if best.reachable else _least_bound(workload, links, target, latency, unit),
        workers_chosen=workers_chosen,
        worker_price_usd_per_hour=config.fleet.price_usd_per_hour,
    )


def _terms_for_target(config: Config) -> Terms:
    """Estimates for as many workers as the target needs at the configured κ."""
    terms = estimate_terms(config, 1)
    for _ in range(ROUNDS):
        pool = provision(
            terms.workload(config),
            terms.links,
            config.capacity.target_utilisation,
            latency=terms.latency,
            publish_intervals=[config.staleness.publish_interval],
            unit=terms.unit(config),
        )
        former, terms = terms, estimate_terms(config, _workers_for(terms, pool.groups_per_s))
        if terms.links == former.links:
            break
    return terms


def _workers_for(terms: Terms, groups_per_s: float) -> int:
    return max(1, ceiling(groups_per_s * terms.workers / terms.groups_per_s))


def _least_bound(
    workload: Workload, links: Links, target: float, latency: Latency, unit: PoolUnit
) -> tuple[int, Provision] | None:
    """S that lets some pool reach the target, and that pool: the closed form finds S, the twin may add to it."""

    def suffices(bound: int) -> bool:
        bounded = replace(workload, staleness_bound=bound)
        most = 2 * (bound + 1) * workload.groups_per_batch
        tried = (replace(bounded, publish_interval=κ) for κ in intervals_worth_trying(bounded, links))
        return any(reaches(choice, links, most, latency, target) for choice in tried)

    least = least_integer(suffices, workload.staleness_bound + 1, MOST_BOUND)
    for bound in range(least or 0, (least or -BOUNDS_TRIED) + BOUNDS_TRIED):
        pool = provision(replace(workload, staleness_bound=bound), links, target, latency=latency, unit=unit)
        if pool.reachable:
            return bound, pool
    return None


def render_plan(plan: Plan) -> str:
    """The plan as text, without a final line break."""
    workload = plan.workload
    head = (
        f"Plan of run {plan.run_name}: {plan.steps} steps of B = {workload.groups_per_batch} groups, "
        f"S = {workload.staleness_bound}, κ = {workload.publish_interval}"
    )
    sections = (
        table(("term", "value", "source"), _term_rows(plan)),
        table(("prediction", "value", ""), _prediction_rows(plan)),
        table(
            ("condition", "needed", "available", "slack", "step time alone"),
            map(_condition_row, plan.prediction.conditions[1:]),
        )
        + f"\n{_condition_note(plan)}",
        table(
            ("dial", "now", f"for {percent(plan.target_utilisation)} utilisation, all else equal, by the closed form"),
            [_dial_row(dial, plan) for dial in plan.dials],
        )
        + _together_note(plan),
        *(
            [table(("dissemination", "D_tx", "D", "utilisation, by the closed form"), map(_outlook_row, plan.outlooks))]
            if plan.outlooks
            else []
        ),
        table(("rule", "κ", "groups/s", "workers", "utilisation"), _rule_rows(plan)),
    )
    return "\n\n".join((head, *sections))


def _term_rows(plan: Plan) -> list[tuple[str, ...]]:
    terms, source = plan.terms, plan.terms.provenance
    cv = number(terms.latency.cv)
    how = f", in calls of {terms.worker_slots}" if plan.in_calls else ""
    each = f"{terms.workers} × {number(terms.groups_per_s / terms.workers)} groups/s per worker{how}"
    return [
        ("T      learner's work per step", quantity(terms.learner_step_s, "s"), source["T"]),
        (
            "L      lease to scored group",
            quantity(terms.latency.mean_s, "s"),
            f"{source['L']}; cv {cv}",
        ),
        ("D_tx   snapshot occupies the links", quantity(terms.transfer_s, "s"), source["D_tx"]),
        ("D_fix  rest of dissemination", quantity(terms.fixed_s, "s"), source["D_fix"]),
        ("α      accepted share of groups", percent(terms.accepted_share), source["α"]),
        ("μ      throughput of the pool", quantity(terms.groups_per_s, "groups/s"), f"{source['μ']}: {each}"),
    ]


def _prediction_rows(plan: Plan) -> list[tuple[str, ...]]:
    prediction, needed, best, simulated = plan.prediction, plan.configured, plan.best, plan.simulated
    target = percent(plan.target_utilisation)
    needed_for = f"for {target} utilisation"
    if not needed.reachable:
        needed_for = f"{target} is out of reach of any pool; {best_text(needed, plan.workers_for)}"
    chosen = ", since fleet.workers = 0 leaves it open" if plan.workers_chosen else ""
    rate = f"{plan.terms.workers} × {number(plan.worker_price_usd_per_hour)} USD/h, without the learner"
    with_best = f"with {number(best.groups_per_s)} groups/s, U = {percent(best.simulated.utilisation)}"
    verdict = f"target {target} is {'reached' if plan.reaches_target else 'missed'}"
    return [
        ("step time τ", quantity(simulated.step_time_s, "s"), f"closed form {quantity(prediction.step_time_s, 's')}"),
        (
            "learner utilisation U = T/τ",
            percent(simulated.utilisation),
            f"{verdict}; closed form {percent(prediction.utilisation)}",
        ),
        ("binding term", prediction.binding.name, _binding_text(plan)),
        ("staleness", f"{number(simulated.staleness_mean)} steps", _staleness_text(simulated)),
        ("waste", percent(simulated.waste_share), "of the groups generated: filtered, expired or lost"),
        ("needed throughput", quantity(needed.groups_per_s, "groups/s"), needed_for),
        ("needed workers", str(plan.workers_for(needed.groups_per_s)), f"planned with {plan.terms.workers}{chosen}"),
        ("best κ", str(best.publish_interval), with_best),
        ("whole run", duration(plan.duration_s), f"{plan.steps} steps · τ, without the start"),
        *([("workers' rent", f"{money(plan.workers_usd)} USD", rate)] if plan.worker_price_usd_per_hour else []),
    ]


def best_text(pool: Provision, workers_for: Callable[[float], int]) -> str:
    """What a pool gives where the target is out of reach, and the largest one, if that gives more."""
    own, largest = percent(pool.simulated.utilisation), pool.largest
    if largest is None:
        return f"this gives the best, {own}"
    return f"this gives {own}, {counted(workers_for(largest.groups_per_s), 'worker')} {percent(largest.utilisation)}"


def _staleness_text(simulated: SimulationResult) -> str:
    shares = ", ".join(f"{steps}: {percent(share)}" for steps, share in enumerate(simulated.staleness_shares) if share >= 0.005)
    return f"mean; at most {simulated.staleness_max}; {shares}"


def _binding_text(plan: Plan) -> str:
    prediction, simulated, κ = plan.prediction, plan.simulated, plan.workload.publish_interval
    skipped = ""
    if prediction.carried_interval != κ:
        skipped = f"; the links carry one snapshot in {prediction.carried_interval} steps, so workers skip some of κ = {κ}"
    binding = prediction.binding
    if binding.name == "learner":
        return f"it never waits{skipped}"
    wait_s = simulated.step_time_s * (1 - simulated.utilisation)
    short = f"short by {quantity(-binding.slack, binding.unit)}"
    return f"{short}; the learner waits {quantity(wait_s, 's')} per step{skipped}"


def _condition_row(condition: Condition) -> tuple[str, ...]:
    return (
        CONDITION_TEXT[condition.name],
        quantity(condition.needed, condition.unit),
        quantity(condition.available, condition.unit),
        quantity(condition.slack, condition.unit),
        quantity(condition.step_time_s, "s"),
    )


def _condition_note(plan: Plan) -> str:
    """What W comes to, and why generation may need more than B/(αT)."""
    _, generation, _, freshness = plan.prediction.conditions
    wait, idle = quantity(freshness.needed - plan.links.latency_s, "s"), quantity(plan.slow_end_s, "s")
    note = f"W = {wait}: until a batch is whole, at the pace of T; an idle pool takes {idle} for one"
    least = required_throughput(plan.workload)
    if generation.needed > 1.01 * least:
        note += (
            f"\nB/(αT) = {quantity(least, 'groups/s')}: the rest makes up for groups that outlive their version at this pace"
        )
    return note


def _together_note(plan: Plan) -> str:
    """The least S with which some pool reaches the target, where no single dial does."""
    if plan.together is None:
        return ""
    bound, pool = plan.together
    return (
        f"\ntogether: with S = {bound}, κ = {pool.publish_interval} and "
        f"{counted(plan.workers_for(pool.groups_per_s), 'worker')} U = {percent(pool.simulated.utilisation)}"
    )


def _dial_row(dial: Dial, plan: Plan) -> tuple[str, ...]:
    value = quantity(dial.value, dial.unit)
    if dial.limit is None or dial.at_limit is None:
        return (dial.symbol, value, f"does not help: {plan.prediction.binding.name} binds")
    limit = quantity(dial.limit, dial.unit)
    if dial.symbol == "μ":
        # What the simulation asks for, where it was asked.
        enough = plan.configured.groups_per_s if plan.configured.reachable else dial.limit
        limit = f"{quantity(enough, dial.unit)}, {counted(plan.workers_for(enough), 'worker')}"
    if not dial.reaches_target:
        rest = dial.at_limit
        return (dial.symbol, value, f"not alone: at {limit} U = {percent(rest.utilisation)}, {rest.binding.name} binds")
    return (dial.symbol, value, f"at {'most' if dial.at_most else 'least'} {limit}")


def _outlook_row(outlook: Outlook) -> tuple[str, ...]:
    links = outlook.links
    return outlook.name, quantity(links.transfer_s, "s"), quantity(links.latency_s, "s"), percent(outlook.utilisation)


def _rule_rows(plan: Plan) -> list[tuple[str, ...]]:
    def row(rule: str, interval: int, groups_per_s: float, utilisation: float) -> tuple[str, ...]:
        return (rule, str(interval), number(groups_per_s), str(plan.workers_for(groups_per_s)), percent(utilisation))

    def overlap(rule: str, pool: Provision) -> tuple[str, ...]:
        return row(rule, pool.publish_interval, pool.groups_per_s, pool.simulated.utilisation)

    rows = [overlap("overlap, κ as configured", plan.configured)]
    if plan.best.publish_interval != plan.workload.publish_interval:
        rows.append(overlap("overlap, best κ", plan.best))
    serial, name = plan.serial, "serial, κB/(αμ) + D ≤ κT"
    if serial.groups_per_s is None or plan.serial_simulated is None:
        return [*rows, (name, str(serial.publish_interval), "none", "none", f"cannot be met: {serial.obstacle}")]
    return [*rows, row(name, serial.publish_interval, serial.groups_per_s, plan.serial_simulated.utilisation)]
