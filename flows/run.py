"""A whole run from the command line: one flow run per segment until all steps are done."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from echo2.config import Config
from echo2.errors import UserError
from flows.console import say

INTERRUPTED = 130


def run_to_end(config: Config, resume: bool) -> int:
    """Train every segment of the run; prints a summary and returns the exit code."""
    say(f"starting Prefect for run {config.run.name}")
    began = time.monotonic()
    from flows.train import train

    logging.getLogger("prefect.flow_runs").addFilter(_without_traceback_of_user_errors)
    while True:
        summary = train(config, resume=resume)
        if summary["stopped"]:
            say(f"stopped at step {summary['steps']} of {config.run.steps}; the same command with --resume goes on from there")
            return INTERRUPTED
        if summary["steps"] >= config.run.steps:
            say(render_summary(summary, config, time.monotonic() - began))
            return 0
        resume = True


def _without_traceback_of_user_errors(record: logging.LogRecord) -> bool:
    """The command line prints such an error in one line, at the end."""
    return not (record.exc_info and isinstance(record.exc_info[1], UserError))


def render_summary(summary: Mapping[str, Any], config: Config, elapsed_s: float) -> str:
    """The end of a run in a few lines."""

    def share(value: float | None) -> str:
        return "unknown" if value is None else f"{100 * value:.1f} %"

    path = config.run.directory.expanduser() / config.run.name
    lines = [
        f"run {summary['run_id']} has ended after {summary['steps']} steps and {elapsed_s:.0f} s",
        f"  exact match         {share(summary['exact_match_first'])} in the first 3 steps, "
        f"{share(summary['exact_match_last'])} in the last 10",
        f"  learner busy        {share(summary['busy_share_observed'])} observed, "
        f"{share(summary['busy_share_predicted'])} predicted by the capacity model from this run's T, L, μ, D",
        f"  staleness           at most {summary['max_staleness']} of {summary['staleness_bound']} allowed",
        f"  groups              {summary['trained_groups']} trained; "
        + ", ".join(f"{summary['groups'][state]} {state}" for state in ("filtered", "expired", "failed")),
        f"  dissemination       {summary['versions_disseminated']} versions to {summary['workers']} workers",
        f"  everything is in    {path} (summary.json, report/, checkpoints/, ledger.db, logs/)",
    ]
    return "\n".join(lines)
