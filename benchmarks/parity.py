"""Reward curves beside TRL's GRPOTrainer: the demo's task, model and optimizer, and the same number of rollouts.

    python -m benchmarks.parity [--quick] [--json FILE] [--plot FILE] [--peer-python PROGRAM]

One side is `echo2 train configs/demo.toml`: hub, two workers, broadcast, Prefect, S = 2. The other is GRPOTrainer, which
generates with transformers and trains by turns in one process that has all cores. Both begin with the same warm-started model
and get the same prompts in the same order, 32 groups of 8 members a step, scored by the same code; temperature 1, 8 tokens at
most; AdamW with the same rates, warm-up, betas and clipping of gradients, in float32; advantages over the group's deviation,
the ratio clipped to 0.8 … 1.28, token mean, no KL term. TRL makes a step's completions in one batch, and trains them in as many
sequences at a time as are fastest here.

What differs:

- ECHO-2 trains rollouts up to two steps old, whose ratio is to the policy that sampled them, and its curve tells their rewards,
  so it lags by that much; TRL is on policy, and its ratio is 1;
- random numbers: the sides share prompts, not draws;
- ECHO-2 keeps a ledger, checkpoints, events for TensorBoard and records for Prefect; TRL keeps nothing.

Two of the demo's settings are left out: dropping groups of equal rewards, which would take more rollouts than TRL's and leave
the best groups out of the curve, and evaluation. Times of training are from the first lease, or the first call for completions,
to the end of the last step; those with start and end are of the whole command. All this takes minutes of a machine that does
nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.learner import PEER, peer_needs
from benchmarks.peer_environment import peer_python
from echo2.config import load_config
from echo2.models.preparation import prepare_model
from echo2.report import LAST_STEPS

REPOSITORY = Path(__file__).parent.parent
DEMO = REPOSITORY / "configs" / "demo.toml"
SETTINGS = ("batch.drop_zero_variance=false", "evaluation.every_steps=0")
SEEDS, STEPS = (0, 1, 2), 100
QUICK_STEPS = 30
PEER_ROWS = 256
SIDES = ("ECHO-2", "TRL")


@dataclass(frozen=True, slots=True)
class Curve:
    """One side's run with one seed: by step, means over the batch, and seconds since the first rollout; and the whole time."""

    rewards: list[float]
    exact_matches: list[float]
    ends_s: list[float]
    total_s: float

    @property
    def last_reward(self) -> float:
        return fmean(self.rewards[-LAST_STEPS:])

    @property
    def last_exact_match(self) -> float:
        return fmean(self.exact_matches[-LAST_STEPS:])

    @property
    def training_s(self) -> float:
        return self.ends_s[-1]


Curves = dict[int, dict[str, Curve]]
"""By seed and side."""


def measure(quick: bool, peer: str) -> tuple[dict[str, float], Curves]:
    """All figures and the curves; prints the table as it goes."""
    steps = QUICK_STEPS if quick else STEPS
    settings = {seed: [*SETTINGS, f"run.steps={steps}", f"run.seed={seed}"] for seed in (SEEDS[:1] if quick else SEEDS)}
    models = {seed: prepare_model(load_config([DEMO], given), print) for seed, given in settings.items()}
    print(f"{steps} steps; reward and exact match are means over the last {LAST_STEPS}\n")
    print(f"{'seed':<6}{'side':<8}{'reward':>8}{'exact match':>13}{'training s':>12}{'with start and end s':>22}", flush=True)
    curves: Curves = {}
    with tempfile.TemporaryDirectory(prefix="echo2-parity-") as folder:
        for seed, given in settings.items():
            curves[seed] = {}
            for side in SIDES:
                curve = train_echo2(Path(folder), given, seed) if side == "ECHO-2" else train_trl(peer, models[seed], given)
                curves[seed][side] = curve
                figures = f"{curve.last_reward:>8.3f}{curve.last_exact_match:>13.1%}{curve.training_s:>12.1f}"
                print(f"{seed:<6}{side:<8}{figures}{curve.total_s:>22.1f}", flush=True)
    return figures_of(curves), curves


def figures_of(curves: Curves) -> dict[str, float]:
    """ECHO-2 against TRL: rewards as a mean of differences over the seeds, times as a quotient of sums; prints them."""
    gaps = [sides["ECHO-2"].last_reward - sides["TRL"].last_reward for sides in curves.values()]
    ours, theirs = ([sides[side] for sides in curves.values()] for side in SIDES)
    figures = {
        "reward_gap_vs_trl": fmean(gaps),
        "wallclock_over_trl": sum(c.training_s for c in ours) / sum(c.training_s for c in theirs),
        "wallclock_with_start_and_end_over_trl": sum(c.total_s for c in ours) / sum(c.total_s for c in theirs),
    }
    print()
    for name, value in figures.items():
        print(f"{name:<40}{value:>8.3f}")
    print(f"gaps by seed: {', '.join(f'{gap:+.3f}' for gap in gaps)}")
    return figures


def train_echo2(folder: Path, settings: Sequence[str], seed: int) -> Curve:
    """A run of the whole system. Raises SystemExit if it does not end well."""
    name = f"seed{seed}"
    command = [sys.executable, "-m", "echo2", "train", str(DEMO), f"run.directory={folder}", f"run.name={name}", *settings]
    environment = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
    _, total_s = run_side("ECHO-2", command, environment | {"PREFECT_HOME": str(folder / "prefect")})
    with closing(sqlite3.connect(folder / name / "ledger.db")) as database:
        (began_s,) = database.execute("SELECT MIN(leased_at_s) FROM attempts").fetchone()
        rows = database.execute("SELECT metrics, finished_at_s FROM steps WHERE step >= 0 ORDER BY step").fetchall()
    metrics = [json.loads(text) for text, _ in rows]
    return Curve(
        [step["reward"] for step in metrics],
        [step["exact_match"] for step in metrics],
        [end_s - began_s for _, end_s in rows],
        total_s,
    )


def train_trl(peer: str, model: Path, settings: Sequence[str]) -> Curve:
    """The same with GRPOTrainer. Raises SystemExit if it does not end well."""
    command = [peer, "-m", "benchmarks.parity_peer", str(PEER_ROWS), str(DEMO), str(model), *settings]
    cores = str(len(os.sched_getaffinity(0)))
    environment = os.environ | {"OMP_NUM_THREADS": cores, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    output, total_s = run_side("TRL", command, environment)
    steps = json.loads(output.splitlines()[-1])
    rewards, exact_matches, ends_s = ([step[name] for step in steps] for name in ("reward", "exact_match", "end_s"))
    return Curve(rewards, exact_matches, ends_s, total_s)


def run_side(side: str, command: Sequence[str], environment: dict[str, str]) -> tuple[str, float]:
    """What a side prints, and how many seconds it took."""
    began_s = time.monotonic()
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"side {side} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout, time.monotonic() - began_s


def plot(file: Path, curves: Curves) -> None:
    """Both sides' rewards by step and by time, a line per seed, into an image file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), constrained_layout=True)
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for seed, sides in curves.items():
        for number, (side, curve) in enumerate(sides.items()):
            style = {"color": f"C{number}", "alpha": 0.7, "label": side if seed == min(curves) else None}
            by_step.plot(range(1, len(curve.rewards) + 1), curve.rewards, **style)
            by_time.plot(curve.ends_s, curve.rewards, **style)
    for axis, unit in ((by_step, "step"), (by_time, "s since the first rollout")):
        axis.set_xlabel(unit)
        axis.grid(alpha=0.3)
    by_step.set_ylabel("mean reward of the step's rollouts")
    by_step.legend(loc="lower right", frameon=False)
    seeds = ", ".join(map(str, curves))
    figure.suptitle(f"configs/demo.toml, {'seeds' if len(curves) > 1 else 'seed'} {seeds}")
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one seed, fewer steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves there")
    parser.add_argument("--peer-python", metavar="PROGRAM", help="an interpreter that has TRL, blake3 and tomli-w")
    chosen = parser.parse_args()
    peer = chosen.peer_python or peer_python(PEER, peer_needs())
    if peer is None:
        raise SystemExit(1)
    figures, curves = measure(chosen.quick, peer)
    if chosen.json:
        chosen.json.write_text(json.dumps({"figures": figures}, indent=2) + "\n", encoding="utf-8")
    if chosen.plot:
        plot(chosen.plot, curves)


if __name__ == "__main__":
    main()
