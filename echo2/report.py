"""What a run leaves to look at: summary.json, a table of metrics, curves.

Invariant: every figure comes from the ledger; nothing is kept beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from echo2.capacity.calibration import Calibration, Observations, calibrate
from echo2.capacity.tables import counted, money
from echo2.capacity.terms import predict_run
from echo2.config import Config
from echo2.curves import write_broadcast, write_curves
from echo2.dissemination.broadcast.record import BroadcastRecord
from echo2.durability import naming, write_atomically
from echo2.errors import UserError
from echo2.hub.inspection import observe_run
from echo2.run_directory import RunDirectory, RunRecord

SUMMARY = "summary.json"
FIRST_STEPS = 3
LAST_STEPS = 10
COLUMNS = ("step", "reward", "exact_match", "staleness/max", "loss", "grad_norm", "kl", "learner/idle_share")
TERMS = (
    ("T", "learner_step_s", 1, "s"),
    ("L, mean", "group_latency_s", 1, "s"),
    ("D_tx", "transfer_s", 1, "s"),
    ("D_fix", "fixed_s", 1, "s"),
    ("α", "accepted_share", 100, "%"),
    ("μ", "groups_per_s", 1, "groups/s"),
)
"""Terms of the capacity model: symbol, name among the figures of a calibration, factor to the unit shown, unit."""

LONGEST_DETAIL = 200
"""Characters of an event, or of a worker's reason to leave, in a table."""

Steps = Sequence[Mapping[str, float]]


def write_report(
    run: RunDirectory, status: Mapping[str, Any], steps: Steps, stopped: bool, broadcast: BroadcastRecord | None
) -> dict[str, Any]:
    """Write summary.json and report/{metrics.jsonl, report.md, curves.png, broadcast.png}; returns the summary.

    `stopped` tells that the user ended the run early; `broadcast` is the last version's, if there was one. Raises DiskError
    where they cannot be written; summary.json comes last.
    """
    summary = summarise(run.config, status, steps, observe_run(run)) | {"stopped": stopped}
    with naming(run.report):
        write_atomically(run.report / "metrics.jsonl", "".join(json.dumps(dict(step)) + "\n" for step in steps))
        write_atomically(run.report / "report.md", render_status(status))
        if steps:
            write_curves(run.report / "curves.png", run.run_id, run.config.staleness.bound, steps)
        if broadcast is not None and broadcast.arrivals:
            write_broadcast(run.report / "broadcast.png", broadcast)
    with naming(run.path / SUMMARY):
        write_atomically(run.path / SUMMARY, json.dumps(summary, indent=2) + "\n")
    return summary


def reported_steps(run: RunRecord) -> int:
    """The steps of the run when its last segment ended in order; 0 if none did."""
    try:
        return int(json.loads((run.path / SUMMARY).read_text(encoding="utf-8"))["steps"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return 0


def summarise(config: Config, status: Mapping[str, Any], steps: Steps, observations: Observations) -> dict[str, Any]:
    """The run's figures; a figure that the run did not produce is None.

    Busy shares leave out the waits in which a segment's workers start. The predicted one is of the `busy_share_window_steps`
    that the terms were measured in; the window's observed one stands beside it. `wall_s` is the learner's work and waiting in
    all steps, whichever start of the run they were made in.
    """
    calibration = calibrate(observations)
    exact, rewards = ([step[name] for step in steps if name in step] for name in ("exact_match", "reward"))
    return {
        "run_id": status["run_id"],
        "seed": config.run.seed,
        "steps": status["step"],
        "exact_match_first": _mean(exact[:FIRST_STEPS]),
        "exact_match_last": _mean(exact[-LAST_STEPS:]),
        "reward_first": _mean(rewards[:FIRST_STEPS]),
        "reward_last": _mean(rewards[-LAST_STEPS:]),
        "max_staleness": status["max_trained_staleness"],
        "staleness_bound": config.staleness.bound,
        "workers": status["workers_seen"],
        "versions_disseminated": status["versions_disseminated"],
        "busy_share_observed": observed_busy_share(steps),
        "busy_share_window_steps": len(observations.steps),
        "busy_share_observed_in_window": observations.utilisation,
        "busy_share_predicted": predict_busy_share(config, calibration),
        "measured_terms": calibration.figures(),
        "evaluations": status["evaluations"],
        "trained_groups": status["groups"]["trained"],
        "groups": status["groups"],
        "wasted_tokens": status["wasted_tokens"],
        "cost_usd": status["cost_usd"],
        "wall_s": sum(step["learner/step_s"] + step["learner/wait_s"] for step in steps),
    }


def observed_busy_share(steps: Steps) -> float | None:
    """The learner's share of work in its time, the start of the workers left out."""
    work_s = sum(step["learner/step_s"] for step in steps)
    wait_s = sum(step["learner/wait_s"] for step in steps)
    return work_s / (work_s + wait_s) if work_s else None


def predict_busy_share(config: Config, calibration: Calibration) -> float | None:
    """What the capacity model makes of the terms that the run measured; None while one of them is missing."""
    try:
        return predict_run(config, calibration.terms(config.run.name)).utilisation
    except UserError:
        return None


def step_rows(steps: Steps) -> list[dict[str, float]]:
    """Rows of a table with the usual columns."""
    return [{name: round(step[name], 4) for name in COLUMNS if name in step} for step in steps]


def render_status(status: Mapping[str, Any]) -> str:
    """The run as Markdown."""
    last = status["last_step"]
    quiet_s = status["quiet_s"]
    lines = [
        f"# Run {status['run_id']}",
        "",
        f"Step {status['step']} of {status['total_steps']}, version {status['version']}, "
        f"{status['rollouts_per_s']:.1f} rollouts/s{'' if quiet_s is None else ' while it was active'}, "
        f"{money(status['cost_usd'])} USD so far.{'' if quiet_s is None else f' Nothing has happened for {quiet_s:.0f} s.'}",
        "",
        "| groups | " + " | ".join(status["groups"]) + " |",
        "|---|" + "---|" * len(status["groups"]),
        "| count | " + " | ".join(str(count) for count in status["groups"].values()) + " |",
    ]
    lines += _worker_table(status["workers"], status["workers_omitted"])
    lines += _evaluation_table(status["evaluations"])
    lines += _mismatch_table(status["log_prob_differences"])
    lines += _terms_table(status["measured_terms"])
    if last:
        lines += ["", "| metric of the last step | value |", "|---|---|"]
        lines += [f"| {name} | {value:.5g} |" for name, value in last.items()]
    if status["events"]:
        lines += ["", "| event | subject | detail |", "|---|---|---|"]
        lines += [f"| {e['kind']} | {e['subject']} | {_cell(e['detail'])} |" for e in status["events"]]
    return "\n".join(lines) + "\n"


def _worker_table(workers: Sequence[Mapping[str, Any]], omitted: int) -> list[str]:
    """The workers that are live, and what those that left were like at last, as lines of Markdown."""

    def left(worker: Mapping[str, Any]) -> str:
        if worker["left_at_s"] is None:
            return ""
        told = f": {_cell(worker['reason'])}" if worker["reason"] else ""
        return f"{datetime.fromtimestamp(worker['left_at_s'], UTC):%Y-%m-%d %H:%M:%S} UTC{told}"

    rows = [
        f"| {w['worker_id']} | {w['state']} | {'–' if w['version'] is None else w['version']} | {w['groups']} | {w['tokens']} "
        f"| {w['groups_per_s']:.2f} | {w['silent_s']:.1f} | {left(w)} |"
        for w in workers
    ]
    heads = ("worker", "state", "version", "groups", "tokens", "groups/s", "silent s", "left, and why")
    more = ["", f"{counted(omitted, 'worker')} more left before these."] if omitted else []
    return ["", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *rows, *more]


def _evaluation_table(evaluations: Sequence[Mapping[str, float]]) -> list[str]:
    """What the run's evaluations gave, as lines of Markdown, with ± one standard error."""
    hidden = ("eval/version", "eval/oldest_version", "eval/newest_version")
    names = [name for name in (evaluations[-1] if evaluations else ()) if name not in hidden and not name.endswith("_stderr")]

    def cell(figures: Mapping[str, float], name: str) -> str:
        error = figures.get(f"{name}_stderr")
        return "–" if name not in figures else f"{figures[name]:.4g}" + ("" if error is None else f" ± {error:.2g}")

    def made_by(figures: Mapping[str, float]) -> str:
        span = sorted({figures[name] for name in hidden[1:] if name in figures})
        return " … ".join(f"{version:.0f}" for version in span) or "–"

    rows = [f"| {' | '.join([f'{e[hidden[0]]:.0f}', made_by(e), *(cell(e, name) for name in names)])} |" for e in evaluations]
    heads = ["evaluation of version", "made by versions", *(name.removeprefix("eval/") for name in names)]
    return ["", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *rows] if rows else []


def _mismatch_table(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """How far each worker's log-probabilities are from the learner's, as lines of Markdown."""

    def nats(value: float | None) -> str:
        return "–" if value is None else f"{value:.3g}"

    rows = [
        f"| {w['worker_id']} | {w['groups']} | {w['tokens']} | {nats(w['mean'])} | {nats(w['max'])} "
        f"| {nats(w['compared_mean'])} | {nats(w['others_mean'])} | {w['score']:.1f} |"
        for w in workers
    ]
    heads = ("groups", "tokens", "difference of ln p, mean", "max", "where comparable", "others there", "score")
    return ["", f"| worker | {' | '.join(heads)} |", "|---|" + "---|" * len(heads), *rows] if rows else []


def _terms_table(measured: Mapping[str, Any]) -> list[str]:
    """The measured terms of the capacity model, as lines of Markdown."""
    rows = [
        f"| {name} | {factor * measured[key]['value']:.4g} {unit} "
        f"| {factor * measured[key]['low']:.4g} … {factor * measured[key]['high']:.4g} |"
        for name, key, factor, unit in TERMS
        if key in measured
    ]
    return ["", "| term of the capacity model | measured | 95 % interval |", "|---|---|---|", *rows] if rows else []


def _cell(text: str) -> str:
    """What others wrote, so that it fits into a table."""
    return text[:LONGEST_DETAIL].replace("|", "/")


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
