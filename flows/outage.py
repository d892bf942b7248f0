"""When Prefect's server is away: the training goes on, the record of it in Prefect does not.

Invariants: the outage is said once, not with every event that could not be sent; a segment that ended in order counts as ended
even if Prefect could not be told; a server that was never there is an error at the start.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from echo2.errors import UserError
from echo2.logs import drop_unwritten

log = logging.getLogger(__name__)
CHATTY_LOGGERS = ("prefect.events.clients", "prefect._internal.concurrency", "prefect.client")


class _FirstOnly(logging.Filter):
    """Lets one record through, shortened to a line, and drops the rest."""

    def __init__(self) -> None:
        super().__init__()
        self._said = False

    def filter(self, record: logging.LogRecord) -> bool:
        if self._said:
            return False
        self._said = True
        record.msg, record.args, record.exc_info = (
            "Prefect's server cannot be reached; training goes on without its record",
            (),
            None,
        )
        return True


def say_outage_once() -> None:
    """Prefect reports every event that it cannot send; one line is enough."""
    once = _FirstOnly()
    for name in CHATTY_LOGGERS:
        logging.getLogger(name).addFilter(once)


def ended_in_spite_of(error: Exception, summary_file: Path, began_unix_s: float) -> dict[str, Any]:
    """The summary of a segment that ended in order, although Prefect could not be told; raises UserError if it did not."""
    with contextlib.suppress(OSError):
        if summary_file.stat().st_mtime >= began_unix_s:
            log.warning("Prefect's server is away (%s): the end of this flow run is not recorded there", error)
            return json.loads(summary_file.read_text(encoding="utf-8"))
    raise UserError(f"Prefect's server does not answer ({error}): start it, or unset PREFECT_API_URL") from error


def leave(code: int, at_once: bool) -> NoReturn:
    """End the process; `at_once` does not wait for Prefect, which would try for minutes to send its events to a server away."""
    drop_unwritten()
    if at_once:
        os._exit(code)
    sys.exit(code)
