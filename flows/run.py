"""A whole run from the command line: one flow run per segment until all steps are done."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from echo2.capacity.tables import counted
from echo2.config import Config
from echo2.errors import DiskError, UserError
from echo2.hub.inspection import inspect_run
from echo2.logs import say
from echo2.models.sizes import warning_of_cap
from echo2.report import FIRST_STEPS, LAST_STEPS, SUMMARY, reported_steps
from echo2.run_directory import find_run
from flows.interrupts import interrupted, raise_if_lost
from flows.outage import ended_in_spite_of, leave, say_outage_once
from flows.preflight import check_startable
from flows.temporary_server import check_settings, server_for_run

INTERRUPTED = 130


def run_to_end(config: Config, resume: bool) -> NoReturn:
    """Train every segment of the run, print a summary and end the process with the exit code; 130 if `interrupted`."""
    try:
        done = _steps_done(config, resume)
        if done is not None and (warning := warning_of_cap(config)):
            say(warning)
        code, outage = (0, False) if done is None else _run_segments(config, resume, done > 0)
    except BaseException:
        # Libraries make other errors of an interrupt that meets them midway; whatever was open has been closed by now.
        if not interrupted():
            raise
        say(f"interrupted; if {_place(config)} holds the run, the same command with --resume goes on with it")
        leave(INTERRUPTED, at_once=True)
    leave(code, at_once=outage)


def _place(config: Config) -> Path:
    return config.run.directory.expanduser() / config.run.name


def _steps_done(config: Config, resume: bool) -> int | None:
    """The steps that the run has already, 0 without one; None where nothing is left to do.

    Raises UserError where it may not start or go on.
    """
    check_startable(config, resume)
    found = find_run(config, resume)
    if found is None:
        if resume:
            say(f"there is no run in {_place(config)} to resume: a new one starts")
        return 0
    if not found.ledger.exists():
        return 0
    step = inspect_run(found.path)["step"]
    # The report is written last, after the checkpoint of the last step.
    if min(step, reported_steps(found)) < config.run.steps:
        return step
    say(f"run {found.run_id} is complete: it has {step} of {config.run.steps} steps; raise run.steps to go on")
    return None


def _run_segments(config: Config, resume: bool, has_steps: bool) -> tuple[int, bool]:
    """The exit code, and whether Prefect's server was lost on the way. `has_steps` tells that the run has some already."""
    say(f"starting Prefect for run {config.run.name}")
    began = time.monotonic()
    import httpx

    check_settings()
    from flows.train import train

    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_without_traceback)
    say_outage_once()
    outage = False
    with server_for_run():
        while True:
            raise_if_lost()
            segment_began = time.time()
            try:
                summary = train(config, resume=resume)
            except httpx.TransportError as error:
                outage = True
                summary = ended_in_spite_of(error, _place(config) / SUMMARY, segment_began)
            except DiskError as error:
                raise DiskError(f"{error}; the same command with --resume then goes on with the run") from None
            if summary["stopped"]:
                steps = f"{summary['steps']} of {config.run.steps}"
                say(f"stopped at step {steps}; the same command with --resume goes on from there")
                return INTERRUPTED, outage
            if summary["steps"] >= config.run.steps:
                say(render_summary(summary, config, time.monotonic() - began, has_steps))
                return 0, outage
            resume = True


def _without_traceback(record: logging.LogRecord) -> bool:
    """Errors that the command line explains in one line at the end are not shown by Prefect as well."""
    import httpx

    explained = UserError | httpx.TransportError | KeyboardInterrupt
    crashed = record.getMessage().startswith("Crash detected!")
    return not crashed and not (record.exc_info and isinstance(record.exc_info[1], explained))


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{100 * value:.1f} %"


def _progress(summary: Mapping[str, Any]) -> str:
    """How the first steps and the last ones did: by exact match, or by reward where the task has no such metric."""
    steps = summary["steps"]
    if summary["exact_match_first"] is None and summary["reward_first"] is not None:
        label, first, last = "reward", f"{summary['reward_first']:.4g}", f"{summary['reward_last']:.4g}"
    else:
        label, first, last = "exact match", _share(summary["exact_match_first"]), _share(summary["exact_match_last"])
    return f"  {label:18}  {first} in the first {min(FIRST_STEPS, steps)} steps, {last} in the last {min(LAST_STEPS, steps)}"


def render_summary(summary: Mapping[str, Any], config: Config, elapsed_s: float, resumed: bool = False) -> str:
    """The end of a run in a few lines; `elapsed_s` is since it was started, or last `resumed`."""

    def held_out(figures: Mapping[str, float]) -> str:
        error = f" ± {100 * figures['eval/pass@1_stderr']:.1f}" if "eval/pass@1_stderr" in figures else ""
        return f"{_share(figures.get('eval/pass@1'))}{error} with version {figures['eval/version']:.0f}"

    evaluations = summary["evaluations"]
    ends = evaluations[:1] + evaluations[1:][-1:]
    elsewhere = config.learner.checkpoints
    here = "" if elsewhere else "checkpoints/, "
    training, whole = f"{summary['wall_s']:.0f} s of training", f"{elapsed_s:.0f} s"
    took = f"{training} since it began; {whole} since it was resumed" if resumed else f"{training}, {whole}"
    lines = [
        f"run {summary['run_id']} has ended after {summary['steps']} steps: {took} with start and end",
        _progress(summary),
        *([f"  held-out pass@1     {', '.join(map(held_out, ends))}"] if ends else []),
        f"  learner busy        {_share(summary['busy_share_observed'])} of the run; "
        f"in its last {summary['busy_share_window_steps']} steps {_share(summary['busy_share_observed_in_window'])} observed, "
        f"{_share(summary['busy_share_predicted'])} predicted by the capacity model from their T, L, μ, D",
        f"  staleness           at most {summary['max_staleness']} of {summary['staleness_bound']} allowed",
        f"  groups              {summary['trained_groups']} trained; "
        + ", ".join(f"{summary['groups'][state]} {state}" for state in ("filtered", "expired", "failed")),
        f"  dissemination       {counted(summary['versions_disseminated'], 'version')} "
        f"to {counted(summary['workers'], 'worker')}",
        f"  everything is in    {_place(config)} (summary.json, report/, {here}ledger.db, logs/)",
    ]
    if elsewhere:
        lines.append(f"  checkpoints are in  {elsewhere}")
    return "\n".join(lines)
