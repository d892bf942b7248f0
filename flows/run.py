"""A whole run from the command line: one flow run per segment until all steps are done."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from echo2.config import Config
from echo2.errors import UserError
from echo2.hub.address import listen
from echo2.run_directory import find_run
from flows.console import say
from flows.outage import ended_in_spite_of, leave, require_server, say_outage_once

INTERRUPTED = 130


def run_to_end(config: Config, resume: bool) -> NoReturn:
    """Train every segment of the run, print a summary and end the process with the exit code."""
    interrupted = threading.Event()

    def on_interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_interrupt)
    # What can be refused at once is refused before Prefect takes its time to start.
    find_run(config, resume)
    listen(config.hub.host, config.hub.port).close()
    try:
        _run_segments(config, resume)
    except BaseException:
        # Libraries make other errors of an interrupt that meets them midway; whatever was open has been closed by now.
        if not interrupted.is_set():
            raise
    say("echo2: interrupted")
    leave(INTERRUPTED, at_once=True)


def _run_segments(config: Config, resume: bool) -> NoReturn:
    say(f"starting Prefect for run {config.run.name}")
    began = time.monotonic()
    import httpx

    from flows.train import train

    logging.getLogger("prefect.flow_runs").addFilter(_without_traceback)
    require_server()
    say_outage_once()
    outage = False
    while True:
        segment_began = time.time()
        try:
            summary = train(config, resume=resume)
        except httpx.TransportError as error:
            outage = True
            summary = ended_in_spite_of(
                error, config.run.directory.expanduser() / config.run.name / "summary.json", segment_began
            )
        if summary["stopped"]:
            say(f"stopped at step {summary['steps']} of {config.run.steps}; the same command with --resume goes on from there")
            leave(INTERRUPTED, at_once=outage)
        if summary["steps"] >= config.run.steps:
            say(render_summary(summary, config, time.monotonic() - began))
            leave(0, at_once=outage)
        resume = True


def _without_traceback(record: logging.LogRecord) -> bool:
    """Errors that the command line explains in one line at the end are not shown by Prefect as well."""
    import httpx

    return not (record.exc_info and isinstance(record.exc_info[1], UserError | httpx.TransportError))


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
