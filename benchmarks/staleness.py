"""What a policy earns after a fixed number of steps that were trained on rollouts of exactly S versions ago.

    python -m benchmarks.staleness [--quick] [--json FILE] [--plot FILE] [--objectives NAME …] [--learning-rate RATE]

The demo's warm-started model, task and sampling, with half its batch, a sixth of its learning rate and more steps instead.
What S costs depends on how far the policy moves in S steps: six at this rate are a KL of 0.001, where the demo, which has a
minute to learn in, moves by 0.1; `--learning-rate 1e-4 --steps 150` and `--learning-rate 3e-4 --steps 60` show what more
haste costs. Learner, engine and scoring are a run's, in one process without hub (`benchmarks/staleness_loop.py`): step t
trains what version max(0, t − S) sampled, so all runs take equally many steps and differ in the age of their rollouts alone.
The final reward is the mean over held-out prompts of what the last version earns, sampled at temperature 1 as in training:
greedily all runs come too near the best possible to differ. All runs begin with the same weights, and the seeds draw prompts
and completions; within a seed all last versions are evaluated on the same prompts with the same random numbers.

The limit is synchronous training, S = 0, at the same number of steps: `gap` is its final reward less that of S. The peer is the
same loop without correction. Objectives:

- `default`: as a configuration without `[objective]` has it, the clipped ratio against the policy that sampled;
- `uncorrected`: no ratio at all, which `decoupled_ppo` gives with weights held at 1 (within one millionth);
- on request `wide`: as `default` with the ratio's bounds at 0.5 and 2, and truncated importance weights without clip:
  `decoupled_ppo` up to 2, `cispo` up to 5.

`spread` is the standard deviation over the seeds (unbiased) at one S. Three seeds say little about it, so `seed_spread` is the
root mean square of the spreads of all S. A gap between two means of n seeds is within noise where it is less than twice its
standard error, which is `seed_spread` · √(2/n).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

from echo2.config import Config, load_config
from echo2.models.preparation import prepare_model

DEMO = Path(__file__).parent.parent / "configs" / "demo.toml"
DEFAULT, UNCORRECTED = "default", "uncorrected"
OBJECTIVES: dict[str, tuple[str, ...]] = {
    DEFAULT: (),
    UNCORRECTED: (
        "objective.loss_type=decoupled_ppo",
        "objective.importance_sampling_mode=token_truncate",
        "objective.importance_sampling_clip_min=1.0",
        "objective.importance_sampling_clip_max=1.000001",
    ),
    "wide": ("objective.clip_ratio_low=0.5", "objective.clip_ratio_high=1.0"),
    "decoupled_ppo": ("objective.loss_type=decoupled_ppo", "objective.importance_sampling_mode=token_truncate"),
    "cispo": ("objective.loss_type=cispo", "objective.clip_ratio_high=4.0"),
}
LAST_STEPS = 10
"""Steps at the end over which what is watched beside the reward is averaged."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    staleness: int
    objective: str
    seed: int
    steps: int
    learning_rate: float

    def config(self) -> Config:
        return load_config(
            [DEMO],
            [
                f"run.seed={self.seed}",
                f"run.steps={self.steps}",
                f"learner.learning_rate={self.learning_rate}",
                "batch.groups=16",
                f"staleness.bound={self.staleness}",
                f"dissemination.retain_snapshots={self.staleness + 1}",
                "evaluation.prompts=512",
                "evaluation.samples=4",
                "evaluation.temperature=1.0",
                "learner.device=cpu",
                "worker.device=cpu",
                *OBJECTIVES[self.objective],
            ],
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to."""

    case: Case
    final_reward: float
    rewards: tuple[float, ...]
    """Of each step's rollouts: what the version that sampled them earned on prompts to train."""
    kl: float
    """KL(μ ‖ π) between the policy that sampled and the trained one, over the last steps."""
    clipped: float
    """Share of tokens that the clip took away, over the last steps."""


@dataclass(frozen=True, slots=True)
class Summary:
    """All seeds of an objective at one S."""

    rewards: tuple[float, ...]
    """Final rewards, by seed."""
    kl: float
    clipped: float

    @property
    def reward(self) -> float:
        return fmean(self.rewards)

    @property
    def spread(self) -> float:
        return stdev(self.rewards)


Summaries = dict[str, dict[int, Summary]]


def run_case(case: Case, model_folder: Path) -> Outcome:
    """Train and evaluate; runs in a process of its own."""
    from benchmarks.staleness_loop import StalenessLoop

    loop = StalenessLoop(case.config(), model_folder)
    steps = [loop.step()[1] for _ in range(case.steps)]
    last = steps[-LAST_STEPS:]
    return Outcome(
        case,
        final_reward=loop.evaluate()["eval/reward"],
        rewards=tuple(metrics["reward"] for metrics in steps),
        kl=fmean(metrics["kl"] for metrics in last),
        clipped=fmean(metrics["clip_ratio/region_mean"] for metrics in last),
    )


def run_all(cases: Sequence[Case], processes: int) -> list[Outcome]:
    """All runs, so many at a time, each on one thread."""
    model_folder = prepare_model(cases[0].config(), print)
    context = multiprocessing.get_context("spawn")
    outcomes = []
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for outcome in pool.map(run_case, cases, [model_folder] * len(cases)):
            case = outcome.case
            print(f"seed {case.seed}, S = {case.staleness}, {case.objective}: {outcome.final_reward:.4f}", file=sys.stderr)
            outcomes.append(outcome)
    return outcomes


def summarise(outcomes: Sequence[Outcome]) -> Summaries:
    """By objective and S, in the order of the outcomes."""
    summaries: Summaries = {}
    for case in (outcome.case for outcome in outcomes):
        runs = [o for o in outcomes if (o.case.objective, o.case.staleness) == (case.objective, case.staleness)]
        summaries.setdefault(case.objective, {})[case.staleness] = Summary(
            tuple(o.final_reward for o in runs), fmean(o.kl for o in runs), fmean(o.clipped for o in runs)
        )
    return summaries


def pooled_spread(by_staleness: dict[int, Summary]) -> float:
    """Root mean square of the spreads."""
    return math.sqrt(fmean(summary.spread**2 for summary in by_staleness.values()))


def show(outcomes: Sequence[Outcome], summaries: Summaries) -> None:
    """Print the tables."""
    seeds, steps = len({outcome.case.seed for outcome in outcomes}), outcomes[0].case.steps
    first = fmean(outcome.rewards[0] for outcome in outcomes)
    print(f"reward after {steps} steps, {seeds} seeds; version 0 earned {first:.3f}")
    for objective, by_staleness in summaries.items():
        noise = 2 * pooled_spread(by_staleness) * math.sqrt(2 / seeds)
        print(f"\n{objective + ', S':<20}{'reward':>9}{'spread':>9}{'gap':>9}{'KL':>9}{'clipped':>10}  gap against {noise:.4f}")
        for staleness, summary in by_staleness.items():
            gap = by_staleness[0].reward - summary.reward
            verdict = "" if staleness == 0 else "within noise" if gap < noise else "beyond noise"
            numbers = f"{summary.reward:>9.4f}{summary.spread:>9.4f}{gap:>9.4f}{summary.kl:>9.4f}{summary.clipped:>10.2%}"
            print(f"{staleness:<20}{numbers}  {verdict}")


def figures_of(summaries: Summaries) -> dict[str, float]:
    """Means over seeds as `final_reward_s…` and their `seed_spread`; those of other objectives have its name in front."""
    figures: dict[str, float] = {}
    for objective, by_staleness in summaries.items():
        prefix = "" if objective == DEFAULT else f"{objective}_"
        figures |= {f"{prefix}final_reward_s{staleness}": summary.reward for staleness, summary in by_staleness.items()}
        figures[f"{prefix}seed_spread"] = pooled_spread(by_staleness)
    return figures


def plot(file: Path, outcomes: Sequence[Outcome], summaries: Summaries) -> None:
    """Draw the final reward over S, and the reward of each step's rollouts with the default objective, into a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 8), constrained_layout=True)
    above, below = figure.subplots(2, 1)
    for objective, by_staleness in summaries.items():
        (line,) = above.plot([*by_staleness], [s.reward for s in by_staleness.values()], label=objective)
        points = [(staleness, reward) for staleness, summary in by_staleness.items() for reward in summary.rewards]
        above.plot(*zip(*points, strict=True), "o", markersize=3, color=line.get_color())
    above.set_xlabel("staleness S (steps)")
    above.set_ylabel("final reward")
    for staleness in next(iter(summaries.values())):
        runs = [o.rewards for o in outcomes if (o.case.objective, o.case.staleness) == (outcomes[0].case.objective, staleness)]
        below.plot([fmean(step) for step in zip(*runs, strict=True)], label=f"S = {staleness}")
    below.set_xlabel("learner step")
    below.set_ylabel(f"reward of the rollouts, {outcomes[0].case.objective}")
    for axis in (above, below):
        axis.grid(alpha=0.3)
        axis.legend(loc="best", frameon=False)
    figure.suptitle(f"reward after {outcomes[0].case.steps} steps on rollouts of S versions ago")
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staleness", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="S = 0 and 6, two seeds, 12 steps; too few to say much")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there, as PNG")
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=[DEFAULT, UNCORRECTED], help="what to compare")
    parser.add_argument("--learning-rate", type=float, default=5e-5, metavar="RATE", help="of AdamW (5e-5)")
    parser.add_argument("--steps", type=int, metavar="N", help="of each run (300; with --quick 12)")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="runs at a time, one thread each (2)")
    chosen = parser.parse_args()
    staleness, seeds = ((0, 6), range(2)) if chosen.quick else ((0, 1, 2, 4, 6, 8, 12), range(3))
    steps = chosen.steps or (12 if chosen.quick else 300)
    cases = [
        Case(S, objective, seed, steps, chosen.learning_rate)
        for seed, S, objective in product(seeds, staleness, chosen.objectives)
    ]
    outcomes = run_all(cases, chosen.processes)
    summaries = summarise(outcomes)
    show(outcomes, summaries)
    if chosen.json:
        chosen.json.write_text(json.dumps({"figures": figures_of(summaries)}, indent=2) + "\n", encoding="utf-8")
    if chosen.plot:
        plot(chosen.plot, outcomes, summaries)


if __name__ == "__main__":
    main()
