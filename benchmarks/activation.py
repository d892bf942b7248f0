"""What choosing machines saves, and how long it takes: the exact choice beside what people rent without it.

    python -m benchmarks.activation [--catalog DIR] [--quick] [--json FILE]

Four runs, with the shapes of Qwen3-4B, 8B, 14B and 32B: 256 groups of 8 completions a step, 512 prompt and 2,048 completion
tokens on average, S = 4, κ = 1, 80 % of the groups accepted. The learner's step is the estimate for eight H100 at 40 % of
their bf16 rate with 8 operations per parameter and token; D is a delta of 5 % of the weights over 1 Gbit/s and 10 s.
Throughput and latency of a worker are roofline estimates; prices are the catalog's, traffic what clouds ask for it; spot
machines are preempted at the prior rate. No machine is rented: these are predictions, and the same for all strategies.

Every strategy gives the throughput that the provisioning rule asks for at 97 % utilisation for its own latencies, and 5 %
more; its utilisation is that of the simulation of just its machines, preemptions included, the mean of several seeds. Compared
are, in USD per hour of rent and traffic:

- exact: all offers, at most half of the throughput in one zone, the integer program solved to the end;
- exact, no cap: the same without the cap per zone;
- greedy: the offers and limits of the first, the cheapest per rollout first;
- on demand: all clouds without spot machines, same limits;
- one cloud: the cheapest cloud alone, spot and on demand, without the cap per zone;
- one cloud, on demand: the cheapest cloud alone without spot machines, without the cap per zone. The saving is against this
  one, the best that somebody with one account and no patience for preemptions can do;
- AWS, on demand: the same for the cloud that most people have;
- beside the learner: machines of the learner's kind in its own region, on demand (p5.48xlarge in us-east-1), without traffic.

Solving is timed on the catalog widened to 2,000 offers and more, by copies in regions of their own at prices changed at random
by up to 20 % (seeded; for the timing alone), without limits, with the cap of a half, and with a cap of a third, a fifth on
demand, and a quota of 64 accelerators in the cloud whose offers are cheapest.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from clouds.catalog import read_catalog
from clouds.offers import appraise
from clouds.renting import NOTHING_MEASURED, demand_of, job_of, limits_of, settle
from echo2.capacity.limits import Limits, Quota
from echo2.capacity.offers import Candidate, Offer
from echo2.capacity.plan import Plan, make_plan
from echo2.capacity.rented_pool import simulate_selection
from echo2.capacity.roofline import ModelShape, find_gpu
from echo2.capacity.selection import Selection, select, select_greedily
from echo2.config import Config, load_config
from echo2.errors import UserError

CATALOG = Path("examples/catalog/v8")

QWEN3 = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936}
MODELS: dict[str, dict[str, Any]] = {
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32, "tied": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "tied": False},
    "14b": {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40, "tied": False},
    "32b": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64, "tied": False},
}

GROUPS, MEMBERS, PROMPT_TOKENS, COMPLETION_TOKENS = 256, 8, 512, 2048
LEARNER_GPU, LEARNER_GPUS, LEARNER_EFFICIENCY, OPERATIONS_PER_WEIGHT = "H100 SXM", 8, 0.4, 8
LEARNER_MACHINE = ("aws", "us-east-1", "p5.48xlarge")
LINK_BYTES_PER_S, DELTA_SHARE, FIXED_S = 1.25e8, 0.05, 10.0

REFERENCE = "one cloud, on demand"
"""What the saving is against."""

SEEDS = (1, 2, 3, 4, 5)
LEAST_OFFERS = 2000
PRICE_CHANGE = 0.2


@dataclass(frozen=True, slots=True)
class Case:
    """One run, and what the catalog has for it."""

    model: str
    config: Config
    plan: Plan
    candidates: list[Candidate]

    @property
    def limits(self) -> Limits:
        """Those of its configuration."""
        return limits_of(self.config.activation)

    def exact(self, candidates: Sequence[Candidate], limits: Limits) -> Selection | None:
        """The cheapest machines among `candidates`."""
        return settle(self.config, self.plan, candidates, limits).selection

    def utilisation(self, selection: Selection, seeds: Sequence[int]) -> float:
        """Of the learner with these machines, by simulation."""
        plan = self.plan
        results = simulate_selection(
            selection,
            plan.workload,
            plan.links,
            plan.terms.latency,
            in_calls=plan.in_calls,
            detection_s=self.config.hub.heartbeat_timeout_s,
            seeds=seeds,
        )
        return fmean(result.utilisation for result in results)


def make_case(model: str, offers: Sequence[Offer], folder: Path) -> Case:
    """The run with this model; its config.json is written to `folder`."""
    sizes = {key: value for key, value in MODELS[model].items() if key != "tied"}
    content = QWEN3 | sizes | {"tie_word_embeddings": MODELS[model]["tied"]}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    shape = ModelShape.from_config(content)
    tokens = GROUPS * MEMBERS * (PROMPT_TOKENS + COMPLETION_TOKENS)
    operations_per_s = LEARNER_GPUS * find_gpu(LEARNER_GPU).bf16_dense_tflops * 1e12 * LEARNER_EFFICIENCY
    learner_step_s = OPERATIONS_PER_WEIGHT * shape.parameters * tokens / operations_per_s
    settings = {
        "run.name": model,
        "model.path": str(folder),
        "model.dtype": "bfloat16",
        "batch.groups": GROUPS,
        "batch.members": MEMBERS,
        "sampling.max_completion_tokens": 2 * COMPLETION_TOKENS,
        "staleness.bound": 4,
        "staleness.publish_interval": 1,
        "worker.slots": 64,
        "fleet.workers": 0,
        "capacity.learner_step_s": learner_step_s,
        "capacity.group_latency_s": 60.0,
        "capacity.group_latency_cv": 0.5,
        "capacity.worker_groups_per_s": 0.3,
        "capacity.transfer_s": shape.weights_bytes * DELTA_SHARE / LINK_BYTES_PER_S,
        "capacity.dissemination_fixed_s": FIXED_S,
        "activation.prompt_tokens": PROMPT_TOKENS,
        "activation.completion_tokens": COMPLETION_TOKENS,
        "capacity.delta_share": DELTA_SHARE,
        "activation.max_domain_share": 0.5,
    }
    config = load_config([], [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    plan = make_plan(config)
    candidates, _ = appraise(offers, job_of(config, plan, NOTHING_MEASURED), config.activation)
    return Case(model, config, plan, candidates)


def strategies(case: Case) -> dict[str, Selection | None]:
    """What each strategy rents; None where it cannot give the throughput."""
    free = replace(case.limits, max_domain_share=1.0)
    on_demand = [candidate for candidate in case.candidates if not candidate.offer.spot]
    exact = case.exact(case.candidates, case.limits)
    aws = [candidate for candidate in on_demand if candidate.offer.cloud == "aws"]
    beside = [
        replace(candidate, traffic_usd_per_hour=0.0)
        for candidate in on_demand
        if (candidate.offer.cloud, candidate.offer.region, candidate.offer.instance_type) == LEARNER_MACHINE
    ]
    return {
        "exact": exact,
        "exact, no cap": case.exact(case.candidates, free),
        "greedy": greedy(case),
        "on demand": case.exact(on_demand, case.limits),
        "one cloud": _cheapest_cloud(case, case.candidates, free),
        REFERENCE: _cheapest_cloud(case, on_demand, free),
        "AWS, on demand": case.exact(aws, free),
        "beside the learner": case.exact(beside, free),
    }


def greedy(case: Case) -> Selection | None:
    """By the greedy rule, for the throughput that the exact choice is asked for."""
    activation = settle(case.config, case.plan, case.candidates, case.limits)
    fresh = [c for c in case.candidates if c.age_s <= activation.demand.fresh_s]
    return select_greedily(fresh, activation.demand.needed_groups_per_s, case.limits)


def _cheapest_cloud(case: Case, candidates: Sequence[Candidate], limits: Limits) -> Selection | None:
    clouds = sorted({candidate.offer.cloud for candidate in candidates})
    each = [case.exact([c for c in candidates if c.offer.cloud == cloud], limits) for cloud in clouds]
    return min((found for found in each if found is not None), key=lambda found: found.usd_per_hour, default=None)


def compare(case: Case, seeds: Sequence[int]) -> dict[str, float]:
    """USD per hour of each strategy; prints the table."""
    print(f"\n{case.model}: T = {case.plan.workload.learner_step_s:.0f} s, {len(case.candidates)} offers fit")
    print(f"{'strategy':<24}{'USD/h':>9}{'saved by exact':>16}{'groups/s':>10}{'U':>8}  machines")
    found = strategies(case)
    exact = found["exact"]
    if exact is None or found[REFERENCE] is None:
        raise UserError(f"the catalog gives {case.model} no plan, or none {REFERENCE}: take one with more offers")
    for name, selection in found.items():
        if selection is None:
            print(f"{name:<24}{'none':>9}")
            continue
        saved = f"{1 - exact.usd_per_hour / selection.usd_per_hour:.1%}"
        machines = ", ".join(f"{count} × {c.offer.hardware} {_where(c.offer)}" for c, count in selection.chosen)
        rate, busy = selection.groups_per_s, case.utilisation(selection, seeds)
        print(f"{name:<24}{selection.usd_per_hour:>9.2f}{saved:>16}{rate:>10.2f}{busy:>8.1%}  {machines}")
    return {name: selection.usd_per_hour for name, selection in found.items() if selection is not None}


def _where(offer: Offer) -> str:
    return f"{offer.cloud} {offer.zone or offer.region}{' spot' if offer.spot else ''}"


def widen(candidates: Sequence[Candidate], least: int, seed: int) -> list[Candidate]:
    """The candidates and copies of them in regions of their own, at other prices, until there are so many."""
    draw, wide, copy = random.Random(seed), list(candidates), 0
    while len(wide) < least:
        copy += 1
        for candidate in candidates:
            offer = candidate.offer
            price = offer.price_usd_per_hour * draw.uniform(1 - PRICE_CHANGE, 1 + PRICE_CHANGE)
            zone = f"{offer.zone}-{copy}" if offer.zone else ""
            moved = replace(offer, price_usd_per_hour=price, region=f"{offer.region}-{copy}", zone=zone)
            wide.append(replace(candidate, offer=moved))
    return wide


def time_solving(case: Case, quick: bool) -> tuple[float, float, int]:
    """Longest search, greatest cost of the greedy rule over the exact one, and offers in the widened catalog."""
    wide = widen(case.candidates, LEAST_OFFERS, seed=len(case.model))
    needed = demand_of(case.config, case.plan, case.plan.configured.groups_per_s).needed_groups_per_s
    fresh_s = demand_of(case.config, case.plan, needed).fresh_s
    wide = [candidate for candidate in wide if candidate.age_s <= fresh_s]
    cheapest = min(wide, key=Candidate.usd_per_group).offer.cloud
    tight = Limits(max_domain_share=1 / 3, min_on_demand_share=0.2, quotas=(Quota(cheapest, 64),))
    longest_s, worst = 0.0, 1.0
    for name, limits in (("no limits", Limits()), ("half", Limits(max_domain_share=0.5)), ("tight", tight)):
        for scale in (1.0,) if quick else (1.0, 4.0):
            started_s = time.perf_counter()
            exact = select(wide, scale * needed, limits, time_limit_s=60.0)
            took_s = time.perf_counter() - started_s
            simple = select_greedily(wide, scale * needed, limits)
            longest_s = max(longest_s, took_s)
            if exact is None:
                print(f"{case.model:<5}{name:<12}{scale * needed:>10.2f}{len(wide):>8}{took_s:>9.3f} s  impossible")
                continue
            ratio = simple.cost_usd_per_hour / exact.cost_usd_per_hour if simple is not None else float("nan")
            worst = max(worst, ratio) if simple is not None else worst
            proof = "proven" if not exact.gap else f"gap {exact.gap:.2%}"
            print(f"{case.model:<5}{name:<12}{scale * needed:>10.2f}{len(wide):>8}{took_s:>9.3f} s{ratio:>9.3f}  {proof}")
    return longest_s, worst, len(wide)


def measure(catalog: Path, quick: bool) -> Mapping[str, float]:
    """All figures; prints the tables as it goes."""
    offers = read_catalog(catalog)
    print(f"{len(offers)} offers in {catalog}; saved by exact is the share of a strategy's cost")
    with tempfile.TemporaryDirectory() as folder:
        cases = [make_case(model, offers, Path(folder) / model) for model in MODELS]
    costs = {case.model: compare(case, SEEDS[:1] if quick else SEEDS) for case in cases}
    print(f"\n{'run':<5}{'limits':<12}{'groups/s':>10}{'offers':>8}{'exact':>11}{'greedy/':>9}")
    timed = [time_solving(case, quick) for case in cases]
    return {
        "offers": min(offers for _, _, offers in timed),
        "solve_s_max": max(longest_s for longest_s, _, _ in timed),
        **{f"saving_vs_on_demand_{model}": 1 - costs[model]["exact"] / costs[model][REFERENCE] for model in MODELS},
        "greedy_over_exact_max": max(
            *(worst for _, worst, _ in timed), *(cost["greedy"] / cost["exact"] for cost in costs.values() if "greedy" in cost)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.activation", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--catalog", type=Path, default=CATALOG, metavar="DIR", help=f"a SkyPilot catalog; {CATALOG} if not given"
    )
    parser.add_argument("--quick", action="store_true", help="fewer simulations and searches")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    try:
        figures = measure(arguments.catalog, arguments.quick)
    except UserError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print()
    for name, value in figures.items():
        print(f"{name:<28}{value:.4g}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"figures": figures}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
