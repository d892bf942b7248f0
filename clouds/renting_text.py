"""What to rent, as text.

Invariants: every offer of the catalog is in the table or counted under the reason for which it is not; every figure of a chosen
offer has its source below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from clouds.renting import Renting
from echo2.capacity.activation import Activation
from echo2.capacity.offers import Candidate, Refusal
from echo2.capacity.relaxations import Relaxation
from echo2.capacity.selection import Selection
from echo2.capacity.tables import number, percent, quantity, table

COLUMNS = ("machines", "offer", "each", "USD/h each", "groups/s each", "USD per 1,000 rollouts", "preempted", "D + L")

LONGEST_SENTENCE = 150
"""Characters of an example after which it is cut."""


def render_renting(renting: Renting) -> str:
    """The plan of what to rent, without a final line break."""
    activation, run = renting.activation, renting.plan.run_name
    head = f"Machines for run {run}: {renting.offers} offers of {renting.clouds} clouds in {renting.catalog}"
    sections = [f"{head};\nwith the μ and L of each in place of those above"]
    selection = activation.selection
    if selection is None:
        sections.append(f"No plan: {activation.obstacle}")
        if activation.relaxations:
            sections.append(table(("change", "plan", "USD/h", "groups/s"), map(_relaxation_row, activation.relaxations)))
    else:
        sections.append(table(COLUMNS, _choice_rows(activation, selection)))
        sections.append(table(("figure", "value", ""), _figure_rows(renting, selection)))
        sections.append("\n".join(_sources(selection)))
    if activation.refusals:
        sections.append(table(("refused", "offers", "for example"), _refusal_rows(activation)))
    return "\n\n".join(sections)


def _choice_rows(activation: Activation, selection: Selection) -> Iterator[tuple[str, ...]]:
    for choice in activation.choices:
        candidate = choice.candidate
        yield (
            str(choice.count),
            candidate.offer.name,
            candidate.offer.hardware,
            number(candidate.usd_per_hour),
            number(candidate.effective_groups_per_s),
            number(activation.demand.usd_per_1000_rollouts(candidate.usd_per_group())),
            f"{number(candidate.preemptions_per_hour)}/h",
            quantity(candidate.age_s, "s"),
        )
    total = sum(choice.count for choice in activation.choices)
    spent, rate = f"{number(selection.usd_per_hour)} in all", f"{number(selection.groups_per_s)} in all"
    yield (str(total), "together", "", spent, rate, number(activation.usd_per_1000_rollouts), "", "")


def _figure_rows(renting: Renting, selection: Selection) -> Iterator[tuple[str, ...]]:
    activation, plan, simulated = renting.activation, renting.plan, renting.simulated
    demand, limits = activation.demand, activation.limits
    target = percent(plan.target_utilisation)
    why, short = f"for {target} utilisation, and {percent(demand.margin)} more", ""
    if not renting.need.reachable:
        why = f"{_out_of_reach(renting)}; {percent(demand.margin)} more is rented"
        short = f": {renting.need.prediction.binding.name} is short, and more machines do not help"
    yield "needed throughput", quantity(demand.needed_groups_per_s, "groups/s"), why
    if simulated is not None:
        missed = simulated.utilisation < plan.target_utilisation * (1 - 1e-6)
        outcome = f"target {target} is {f'missed{short}' if missed else 'reached'}"
        verdict = f"by simulation of these machines, preemptions included; {outcome}"
        yield "learner utilisation U", percent(simulated.utilisation), verdict
        per_step = selection.usd_per_hour * simulated.step_time_s / 3600
        yield "rent and traffic", f"{number(per_step)} USD per step", f"{number(selection.usd_per_hour)} USD/h"
        run_usd = per_step * plan.steps + selection.start_usd
        yield "whole run", f"{number(run_usd)} USD", f"{plan.steps} steps, and {number(selection.start_usd)} USD of starts"
    yield "freshness", f"D + L ≤ {quantity(demand.fresh_s, 's')}", f"{demand.slack_steps} steps of S + 1 − κ"
    proof = "cheaper ones were ruled out" if not selection.gap else f"at most {percent(selection.gap)} dearer than the cheapest"
    yield "search", "greedy" if selection.greedy else "exact", proof
    for name, usd_per_hour in activation.limit_costs:
        yield "a limit's cost", f"{number(usd_per_hour)} USD/h", name
    for place, load in sorted(selection.domain_loads.items(), key=lambda item: -item[1])[:1]:
        yield f"largest {limits.failure_domain}", percent(load / selection.groups_per_s), f"of the throughput, in {place}"
    yield from _changes(renting, selection)


def _out_of_reach(renting: Renting) -> str:
    target, best = percent(renting.plan.target_utilisation), percent(renting.need.simulated.utilisation)
    return f"{target} is out of reach of any pool with their latency; this gives the best, {best}"


def _changes(renting: Renting, selection: Selection) -> Iterator[tuple[str, ...]]:
    """What the plan does to machines that run."""
    for candidate, count in zip(selection.candidates, selection.counts, strict=True):
        kept, name = min(count, candidate.running), candidate.offer.name
        if kept:
            yield "kept", str(kept), name
        if candidate.running > kept:
            yield "let go", str(candidate.running - kept), name
    for name, count in Counter(renting.strays).items():
        yield "runs beside", str(count), f"{name}, which is no candidate and is not counted on"


def _sources(selection: Selection) -> Iterator[str]:
    """Where the figures of the chosen offers are from, each source once."""
    for figure in ("price", "μ", "preemptions", "start-up", "D", "traffic"):
        said = dict.fromkeys(candidate.provenance[figure] for candidate, _ in selection.chosen)
        yield f"{figure}: {'; '.join(said)}"


def _relaxation_row(relaxation: Relaxation) -> tuple[str, ...]:
    machines = ", ".join(_machines(candidate, count) for candidate, count in relaxation.selection.chosen)
    spent, rate = relaxation.selection.usd_per_hour, relaxation.selection.groups_per_s
    return (relaxation.sentence, machines, number(spent), number(rate))


def _machines(candidate: Candidate, count: int) -> str:
    return f"{count} × {candidate.offer.name}"


def _refusal_rows(activation: Activation) -> Iterator[tuple[str, ...]]:
    by_reason: dict[str, list[Refusal]] = {}
    for refusal in activation.refusals:
        by_reason.setdefault(refusal.reason, []).append(refusal)
    for reason, alike in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        example, sentences = alike[0], {refusal.sentence for refusal in alike}
        text = f"{example.offer.name}: {example.sentence}"
        if sentences == {activation.obstacle}:
            text = "see above"
        elif len(alike) > 1 and len(sentences) == 1:
            text = example.sentence
        yield reason, str(len(alike)), text if len(text) <= LONGEST_SENTENCE else f"{text[:LONGEST_SENTENCE]} …"
