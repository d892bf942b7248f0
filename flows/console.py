"""What the terminal shows while a run goes on: a live view in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from echo2.errors import UserError
from echo2.logs import say

if TYPE_CHECKING:
    from rich.table import Table

    from echo2.hub.client import HubClient

LIVE_INTERVAL_S = 0.5
LINE_INTERVAL_S = 5.0
LONGEST_SILENCE_S = 30.0


@contextmanager
def watching(hub: HubClient) -> Iterator[None]:
    """Show how the run stands during the block."""
    ending = threading.Event()
    show = _show_live if sys.stdout.isatty() else _show_lines
    thread = threading.Thread(target=show, args=(hub, ending), name="console", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(5.0)


def _show_lines(hub: HubClient, ending: threading.Event) -> None:
    shown, silent_s = -1, 0.0
    while not ending.wait(LINE_INTERVAL_S):
        status = _status(hub)
        silent_s += LINE_INTERVAL_S
        if status is not None and (status["step"] != shown or silent_s >= LONGEST_SILENCE_S):
            shown, silent_s = status["step"], 0.0
            say(status_line(status))


def _show_live(hub: HubClient, ending: threading.Event) -> None:
    from rich.live import Live

    began = time.monotonic()
    with Live(refresh_per_second=4, transient=True) as live:
        while not ending.wait(LIVE_INTERVAL_S):
            status = _status(hub)
            if status is not None:
                live.update(status_table(status, time.monotonic() - began))


def _status(hub: HubClient) -> dict[str, Any] | None:
    try:
        return hub.status()
    except UserError:
        return None  # the hub restarts; the keeper has said so


def status_line(status: Mapping[str, Any]) -> str:
    """The run in one line."""
    return "  ".join(f"{name} {value}" for name, value in _fields(status).items())


def status_table(status: Mapping[str, Any], elapsed_s: float) -> Table:
    """The run as a small table."""
    from rich.table import Table

    table = Table(title=f"{status['run_id']}  {elapsed_s:.0f} s", show_header=False, min_width=46)
    for name, value in _fields(status).items():
        table.add_row(name, value)
    groups = status["groups"]
    table.add_row("groups", "  ".join(f"{count} {state}" for state, count in groups.items() if count))
    for worker in (worker for worker in status["workers"] if worker["state"] == "live"):
        version = "loading" if worker["version"] is None else f"version {worker['version']}"
        table.add_row(worker["worker_id"], f"{version}  {worker['groups']} groups  {worker['groups_per_s']:.1f} groups/s")
    return table


def _fields(status: Mapping[str, Any]) -> dict[str, str]:
    last = status["last_step"]
    fields = {"step": f"{status['step']}/{status['total_steps']}", "version": str(status["version"])}
    for name, label, form in (
        ("reward", "reward", ".3f"),
        ("exact_match", "exact match", ".3f"),
        ("staleness/mean", "staleness", ".2f"),
    ):
        if name in last:
            fields[label] = format(last[name], form)
    if "learner/idle_share" in last:
        fields["learner busy"] = f"{100 * (1 - last['learner/idle_share']):.0f} %"
    fields["workers"] = str(status["workers_live"])
    fields["rollouts/s"] = f"{status['rollouts_per_s']:.0f}"
    return fields
