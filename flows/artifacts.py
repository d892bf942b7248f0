"""The run in Prefect's interface: a progress bar, a table of steps, a report.

Invariant: artifacts are made by a thread of their own; a Prefect server that is away costs the run its artifacts, says so once,
and nothing else.
"""

from __future__ import annotations

import contextvars
import logging
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import httpx
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.exceptions import PrefectException

from echo2.errors import UserError
from echo2.report import render_status, step_rows
from flows.session import Session

log = logging.getLogger(__name__)
ROWS = 20
LAST_UPDATE_S = 10.0


@contextmanager
def reporting(session: Session) -> Iterator[None]:
    """Keep the artifacts up to date during the block."""
    ending = threading.Event()
    artifacts = RunArtifacts(session)
    # The thread takes over the flow run's context, so that the artifacts belong to it.
    thread = threading.Thread(
        target=contextvars.copy_context().run, args=(artifacts.keep_fresh, ending), name="artifacts", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(LAST_UPDATE_S)


class RunArtifacts:
    """Progress, table and report of one flow run."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._key = re.sub(r"[^a-z0-9]+", "-", session.run.run_id.lower())
        self._progress: UUID | None = None
        self._complained = False

    def keep_fresh(self, ending: threading.Event) -> None:
        """Update every `flow.artifact_interval_s` and once at the end."""
        while not ending.wait(self._session.config.flow.artifact_interval_s):
            self._update()
        self._update()

    def _update(self) -> None:
        try:
            self._write(self._session.hub.status(), self._session.hub.steps())
        except (httpx.HTTPError, PrefectException, UserError, OSError, RuntimeError) as error:
            if not self._complained:
                log.warning("Prefect's artifacts cannot be updated (%s); the run goes on without them", error)
            self._complained = True

    def _write(self, status: Mapping[str, Any], steps: list[dict[str, float]]) -> None:
        share = 100.0 * status["step"] / status["total_steps"]
        if self._progress is None:
            self._progress = create_progress_artifact(share, key=f"{self._key}-progress", description="learner steps")
        else:
            update_progress_artifact(self._progress, share)
        create_table_artifact(step_rows(steps[-ROWS:]), key=f"{self._key}-steps", description=f"the last {ROWS} steps")
        create_markdown_artifact(render_status(status), key=f"{self._key}-report", description="the run so far")
