"""What the catalog offers to a run that goes on, with what the run has measured so far.

Invariants: as `echo2 plan --from-run` sees it; figures stand for `activation.pace.change_interval_s`, or until the catalog is
another; where a term was not measured yet, those of [capacity] count, and it is said once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

from clouds.renting import Measured, appraise_catalog, limits_of, settle
from echo2.capacity.activation import Demand
from echo2.capacity.calibration import calibrate
from echo2.capacity.limits import Limits
from echo2.capacity.offers import Candidate
from echo2.capacity.plan import Plan, make_plan
from echo2.config import override
from echo2.errors import UserError
from echo2.hub.inspection import observe_run, rentals_of, snapshot_bytes_of
from echo2.run_directory import RunRecord

log = logging.getLogger(__name__)


class RunMarket:
    """For one run. Raises UserError where its configuration names no catalog."""

    def __init__(self, run: RunRecord) -> None:
        self._run = run
        self._catalog = Path(run.config.activation.catalog).expanduser()
        if not run.config.activation.catalog:
            raise UserError("activation.catalog is empty: name the SkyPilot catalog that machines are to be rented from")
        self._found: tuple[list[Candidate], Demand, Limits] | None = None
        self._looked_at_s, self._changed_at_s = -math.inf, 0.0
        self._warned = False

    def look(self, now_s: float) -> tuple[Sequence[Candidate], Demand, Limits]:
        """Candidates, need and limits. Raises UserError where catalog or model cannot be read, or no offer can be used."""
        changed_at_s = max((file.stat().st_mtime for file in self._catalog.glob("*/vms.csv")), default=0.0)
        stale = now_s - self._looked_at_s >= self._run.config.activation.pace.change_interval_s
        if self._found is None or stale or changed_at_s != self._changed_at_s:
            self._found = self._look()
            self._looked_at_s, self._changed_at_s = now_s, changed_at_s
        return self._found

    def _look(self) -> tuple[list[Candidate], Demand, Limits]:
        config, run = self._run.config, self._run
        plan, limits = self._plan(), limits_of(config.activation)
        measured = Measured(str(run.path), rentals_of(run), snapshot_bytes_of(run))
        _, candidates, refused = appraise_catalog(config, plan, measured)
        return candidates, settle(config, plan, candidates, limits, refused).demand, limits

    def _plan(self) -> Plan:
        """With the terms that the run measured, once it has measured them all."""
        try:
            terms = calibrate(observe_run(self._run)).terms(str(self._run.path))
        except UserError as missing:
            if not self._warned:
                log.warning("the plan rests on [capacity] until the run has measured its terms: %s", missing)
                self._warned = True
            return make_plan(self._run.config)
        return make_plan(override(self._run.config, [f"fleet.workers={terms.workers}"]), terms)
