"""The twin held against the stack: whole rehearsals, timed, beside what the simulation says of the same numbers.

    python -m benchmarks.stack [--quick] [--json FILE]

Each regime is a run of `echo2 train` with simulated learner and simulated workers: real hub, ledger, HTTP, snapshots, fleet and
Prefect flow, eight workers of one slot each. The twin is given the configured T, L, cv, D_tx, B, S, κ and pool, and what the
machinery takes beside them: seconds per step, lease, scoring, snapshot and restart of a worker. Those are measured once, in
a run of its own, and shown first; nothing is fitted to the run that is predicted.

Step times are means between the ends of steps after the warm-up, the same steps in run and twin. Random latencies are those
that the run's seed gives, group by group, in both: with cv = 1 a run of this length is off its own mean by some 5 %. Workers
are killed at a fixed interval in the run and at random in the twin, whose mean over seeds is the prediction. The binding term
is the closed form's, from the same numbers. All this takes seven minutes of a machine that does nothing else.

`--quick` takes a minute: two regimes, generation-bound and dissemination-bound, of few steps; noise weighs more there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from statistics import fmean, median

import psutil

from echo2.capacity.latencies import Lognormal
from echo2.capacity.model import Links, Workload, predict
from echo2.capacity.pool import Pool, WorkerKind
from echo2.capacity.simulation import SimulationResult, simulate
from echo2.rollout.simulated_engine import SimulatedEngine

WORKERS = 8
MEMBERS = 2
SNAPSHOT_BYTES = 1_000_000
RUN_SEED = 0
SEEDS = 40
RESTART_BACKOFF_S = 1.0
FLEET_WATCH_S = 0.5
"""The fleet looks after its workers this often; half of it passes until a death is seen, half until the pause is over."""
HEARTBEAT_TIMEOUT_S = 15.0
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Regime:
    """The configured numbers of one run."""

    name: str
    steps: int
    learner_step_s: float
    group_latency_s: float
    groups_per_batch: int
    staleness_bound: int
    publish_interval: int = 1
    latency_cv: float = 0.0
    transfer_s: float = 0.0
    """D_tx, made by a cap on the hub's uplink: N · F / cap; 0 sets none."""
    kill_interval_s: float = 0.0
    """One worker is killed this often; 0 leaves them alive."""

    @property
    def settings(self) -> list[str]:
        """What `echo2 train` is told."""
        values = {
            "learner.engine": "simulated",
            "learner.simulated_step_s": self.learner_step_s,
            "learner.simulated_snapshot_bytes": SNAPSHOT_BYTES,
            "worker.engine": "simulated",
            "worker.simulated_group_latency_s": self.group_latency_s,
            "worker.simulated_latency_cv": self.latency_cv,
            "worker.slots": 1,
            "fleet.workers": WORKERS,
            "fleet.restart_backoff_s": RESTART_BACKOFF_S,
            "hub.heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S,
            "batch.groups": self.groups_per_batch,
            "batch.members": MEMBERS,
            "batch.drop_zero_variance": "false",
            "staleness.bound": self.staleness_bound,
            "staleness.publish_interval": self.publish_interval,
            "dissemination.peers": "false",
            "dissemination.uplink_bytes_per_s": WORKERS * SNAPSHOT_BYTES / self.transfer_s if self.transfer_s else 0.0,
            "flow.artifact_interval_s": 600.0,
            "run.steps": self.steps,
            "run.seed": RUN_SEED,
        }
        return [f"{name}={value}" for name, value in values.items()]


class DrawnLatencies(Lognormal):
    """What the simulated workers of the run draw: the n-th lease is that of group n."""

    def sampler(self, generator: random.Random) -> Callable[[], float]:
        """As `Latency.sampler`, but the run's seed decides, and not `generator`."""
        engine, groups = SimulatedEngine(self.mean_s, self.cv), count()
        return lambda: engine.latency_s(RUN_SEED, next(groups))


@dataclass(frozen=True, slots=True)
class Overheads:
    """What the machinery takes beside the configured times, medians in seconds."""

    step_s: float
    """From the end of a step to the end of the next, beyond T, while batches are ready."""
    lease_s: float
    """From a lease to the next of the same worker, beyond L, while there are leases."""
    scoring_s: float
    """From a group's end until it is scored, beyond what its slot waits for a lease; the slowest of a group per worker."""
    snapshot_s: float
    """From the end of a step until workers generate with its version, over links without a cap."""
    restart_s: float
    """From the launch of a worker in a pool at work until it holds a snapshot."""


@dataclass(frozen=True, slots=True)
class Record:
    """What a run's ledger tells."""

    step_ends_s: list[float]
    staleness: list[tuple[int, int]]
    """(step, staleness) of every trained group."""
    group_times_s: list[float]
    """Times from a group's lease to its scores, in the order of the groups."""
    lease_gaps_s: list[float]
    """Times between two leases of the same worker."""
    loads_s: list[float]
    """Per worker and version, from the end of the step that made it until it was loaded."""
    restarts_s: list[float]
    """From each relaunch of a worker to its first load."""

    def step_time_s(self, first: int) -> float:
        return (self.step_ends_s[-1] - self.step_ends_s[first - 1]) / (len(self.step_ends_s) - first)

    def staleness_mean(self, first: int) -> float:
        return fmean(staleness for step, staleness in self.staleness if step >= first)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One regime, predicted and observed."""

    regime: Regime
    binding: str
    predicted_s: float
    observed_s: float
    predicted_staleness: float
    observed_staleness: float

    @property
    def error(self) -> float:
        return abs(self.predicted_s / self.observed_s - 1)


OVERHEADS = Regime("overheads", 24, learner_step_s=0.6, group_latency_s=0.1, groups_per_batch=32, staleness_bound=2)
REGIMES = (
    Regime("compute-bound", 32, learner_step_s=1.0, group_latency_s=1.0, groups_per_batch=4, staleness_bound=2),
    Regime("generation-bound", 32, learner_step_s=0.5, group_latency_s=1.0, groups_per_batch=8, staleness_bound=2),
    Regime("dissemination-bound", 48, 0.5, 0.5, groups_per_batch=4, staleness_bound=2, transfer_s=1.5),
    Regime("bursty", 72, 0.5, 1.0, groups_per_batch=6, staleness_bound=2, latency_cv=1.0),
    Regime("preempted", 64, 0.8, 1.6, groups_per_batch=8, staleness_bound=0, kill_interval_s=60.0),
)
QUICK_STEPS = {"overheads": 8, "generation-bound": 8, "dissemination-bound": 8}


def measure(quick: bool) -> dict[str, float]:
    """All figures; prints the tables as it goes. Raises RuntimeError if a run does not end well."""
    wanted = [OVERHEADS, *REGIMES]
    if quick:
        wanted = [replace(r, steps=QUICK_STEPS[r.name]) for r in wanted if r.name in QUICK_STEPS]
    with tempfile.TemporaryDirectory(prefix="echo2-stack-") as folder:
        return _measure(wanted, Path(folder))


def _measure(wanted: Sequence[Regime], folder: Path) -> dict[str, float]:
    overheads = overheads_of(rehearse(wanted[0], folder), wanted[0])
    print(f"{WORKERS} workers of one slot; beside the configured times the machinery takes, in a run of its own, per")
    print(f"  step {overheads.step_s:.3f} s, lease {overheads.lease_s:.3f} s, scoring {overheads.scoring_s:.3f} s, ", end="")
    print(f"snapshot {overheads.snapshot_s:.3f} s, restart {overheads.restart_s:.2f} s\n")
    heads = f"{'step s: twin':>14}{'stack':>9}{'error':>9}{'staleness: twin':>18}{'stack':>8}"
    print(f"{'regime':<20}{'binds':<12}{heads}", flush=True)
    compared = []
    for regime in wanted[1:]:
        comparison = compare(regime, overheads, folder)
        compared.append(comparison)
        print(
            f"{regime.name:<20}{comparison.binding:<12}{comparison.predicted_s:>14.3f}{comparison.observed_s:>9.3f}"
            f"{comparison.error:>9.1%}{comparison.predicted_staleness:>18.2f}{comparison.observed_staleness:>8.2f}",
            flush=True,
        )
    worst = max(comparison.error for comparison in compared)
    print(f"\nthe twin's step time is within {worst:.1%} of the stack's")
    figures = {"stack_vs_twin_max_error": worst}
    return figures | {f"stack_vs_twin_{c.regime.name.replace('-', '_')}_error": c.error for c in compared}


def compare(regime: Regime, overheads: Overheads, folder: Path) -> Comparison:
    """Simulate the regime and rehearse it."""
    workload, links, pool = twin_of(regime, overheads)
    simulated = simulations(regime, workload, links, pool)
    record = rehearse(regime, folder)
    first = simulated[0].warm_up_steps
    return Comparison(
        regime,
        predict(workload, links, pool.groups_per_s(workload.group_latency_s)).binding.name,
        fmean(result.step_time_s for result in simulated),
        record.step_time_s(first),
        fmean(result.staleness_mean for result in simulated),
        record.staleness_mean(first),
    )


def twin_of(regime: Regime, overheads: Overheads) -> tuple[Workload, Links, Pool]:
    """The configured numbers, each with its overhead."""
    workload = Workload(
        learner_step_s=regime.learner_step_s + overheads.step_s,
        groups_per_batch=regime.groups_per_batch,
        staleness_bound=regime.staleness_bound,
        publish_interval=regime.publish_interval,
        group_latency_s=regime.group_latency_s + overheads.lease_s,
        accepted_share=1.0,
    )
    kind = WorkerKind(
        count=WORKERS,
        start_up_s=overheads.restart_s,
        preemptions_per_hour=3600 / regime.kill_interval_s / WORKERS if regime.kill_interval_s else 0.0,
        down_s=RESTART_BACKOFF_S + FLEET_WATCH_S,
        detection_s=HEARTBEAT_TIMEOUT_S,
    )
    # The twin's slots are free when their groups are scored; what scoring takes beyond that delays a version like its snapshot.
    return workload, Links(regime.transfer_s, overheads.snapshot_s + overheads.scoring_s), Pool((kind,))


def simulations(regime: Regime, workload: Workload, links: Links, pool: Pool) -> list[SimulationResult]:
    """The twin of the whole run, with its end; once, or with so many seeds where preemptions are random."""
    latency = DrawnLatencies(workload.group_latency_s, regime.latency_cv)
    seeds = SEEDS if regime.kill_interval_s else 1
    return [
        simulate(workload, links, pool, regime.steps, seed, latency=latency, carry="newest", total_steps=regime.steps)
        for seed in range(seeds)
    ]


def overheads_of(record: Record, regime: Regime) -> Overheads:
    """What a run whose learner never waits says; a worker that it lost on the way tells the time of a restart."""
    first = regime.steps // 4
    steps_s = [end - start for start, end in pairwise(record.step_ends_s[first:])]
    slowest_s = [max(record.group_times_s[i : i + WORKERS]) for i in range(0, len(record.group_times_s), WORKERS)]
    gap_s = median(record.lease_gaps_s)
    return Overheads(
        step_s=median(steps_s) - regime.learner_step_s,
        lease_s=gap_s - regime.group_latency_s,
        scoring_s=median(slowest_s) - gap_s,
        snapshot_s=median(record.loads_s),
        restart_s=median(record.restarts_s),
    )


def rehearse(regime: Regime, folder: Path) -> Record:
    """Run the whole stack in `folder` and read its ledger. Raises RuntimeError if it does not end well."""
    run, log = folder / "runs" / regime.name, folder / f"{regime.name}.log"
    command = [sys.executable, "-m", "echo2", "train", f"run.directory={run.parent}", f"run.name={run.name}", *regime.settings]
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=environment | {"PREFECT_HOME": str(folder / "prefect")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        with _reaper(process.pid, run / "ledger.db", regime):
            code = process.wait(TIMEOUT_S)
    finally:
        process.kill()
    if code:
        raise RuntimeError(f"the run {regime.name} ended with exit code {code}:\n{log.read_text(encoding='utf-8')}")
    return read_ledger(run / "ledger.db")


def read_ledger(ledger: Path) -> Record:
    """Times and staleness of a run."""
    with closing(sqlite3.connect(ledger)) as database:

        def rows(query: str) -> list[tuple]:
            return database.execute(query).fetchall()

        ends_s = [end_s for (end_s,) in rows("SELECT finished_at_s FROM steps WHERE step >= 0 ORDER BY step")]
        group_times_s = rows("SELECT scored_at_s - leased_at_s FROM groups WHERE state = 'trained' ORDER BY group_id")
        leases = rows("SELECT worker_id, leased_at_s FROM attempts ORDER BY worker_id, leased_at_s")
        loads = rows("SELECT version, loaded_at_s FROM disseminations WHERE version > 0")
        staleness = rows("SELECT step, step - oldest_version FROM groups WHERE state = 'trained'")
        restarts = rows(
            "SELECT MIN(loaded_at_s) - launched_at_s FROM paid_intervals JOIN disseminations"
            " ON worker_id LIKE name || '-______' AND loaded_at_s BETWEEN launched_at_s AND terminated_at_s"
            " WHERE launched_at_s > (SELECT MIN(terminated_at_s) FROM paid_intervals) GROUP BY paid_intervals.rowid"
        )
    gaps_s = [after[1] - before[1] for before, after in pairwise(leases) if before[0] == after[0]]
    return Record(
        step_ends_s=ends_s,
        staleness=staleness,
        group_times_s=[time_s for (time_s,) in group_times_s],
        lease_gaps_s=gaps_s,
        loads_s=[loaded_s - ends_s[version - 1] for version, loaded_s in loads if version <= len(ends_s)],
        restarts_s=[restart_s for (restart_s,) in restarts],
    )


@contextlib.contextmanager
def _reaper(train_pid: int, ledger: Path, regime: Regime) -> Iterator[None]:
    """Kills workers in turn, the first one an interval after the first step; in the run for overheads just one, at once."""
    ending = threading.Event()
    interval_s = regime.kill_interval_s
    thread = threading.Thread(target=_kill_workers, args=(train_pid, ledger, regime, ending), daemon=True)
    if interval_s or regime.name == OVERHEADS.name:
        thread.start()
    try:
        yield
    finally:
        ending.set()
        if thread.ident is not None:
            thread.join()


def _kill_workers(train_pid: int, ledger: Path, regime: Regime, ending: threading.Event) -> None:
    while not _steps_done(ledger):
        if ending.wait(0.2):
            return
    victim = 0
    while not ending.wait(regime.kill_interval_s):
        _kill(train_pid, f"worker-{victim % WORKERS}")
        victim += 1
        if not regime.kill_interval_s:
            return


def _steps_done(ledger: Path) -> int:
    if not ledger.exists():
        return 0
    with closing(sqlite3.connect(ledger)) as database:
        try:
            return database.execute("SELECT COUNT(*) FROM steps WHERE step >= 0").fetchone()[0]
        except sqlite3.OperationalError:
            return 0


def _kill(train_pid: int, name: str) -> None:
    # The run may end at this very moment.
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(train_pid).children():
            if name in process.cmdline():
                process.send_signal(signal.SIGKILL)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stack", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two regimes, fewer steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    chosen = parser.parse_args(arguments)
    began_s = time.monotonic()
    figures = measure(chosen.quick)
    print(f"took {time.monotonic() - began_s:.0f} s")
    if chosen.json:
        chosen.json.write_text(json.dumps({"figures": figures}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
