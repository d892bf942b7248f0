"""Keeping the fleet of rented machines of a run, and clearing up what a dead run left.

Invariants: one process at a time keeps a run's fleet; it may be killed and started again at any time; it ends, and all machines
with it, once the run is over or its learner is gone for `worker.orphan_timeout_s`, when workers would end by themselves. That a
run is over its directory says, whether a hub answers or not.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from clouds.cloud import Cloud, CloudTrouble
from clouds.market import RunMarket
from clouds.processes import ProcessCloud
from clouds.rented_fleet import FleetLedger, RentedFleet
from clouds.skypilot import SkyCloud
from echo2.errors import InUse, UserError
from echo2.holding import held
from echo2.hub.client import HubClient, HubUnavailable
from echo2.hub.database import Database
from echo2.hub.inspection import is_complete
from echo2.hub.roster import Roster
from echo2.run_directory import RunDirectory, open_run, read_run

log = logging.getLogger(__name__)
STATE_FILE, RUN_FILE = "fleet.json", "run.json"
RUN_IS_OVER = "the run is over"
HUB_PATIENCE_S, LOOK_PATIENCE_S = 15.0, 3.0
"""How long an absent hub is waited for by a fleet that goes on, and by one that ends or only looks who is there."""
OCCASION_INTERVAL_S = 2.0
CLOSING_INTERVAL_S = 1.0
STOPS_AT_A_TIME = 8


def keep_fleet(path: Path, hub_url: str, stop: threading.Event | None = None) -> None:
    """Keep the fleet of the run in `path` until the run is over, its learner is gone, or `stop` is set.

    With `stop` the machines stay, for whoever keeps the fleet next. Raises UserError where there is no such run, its ledger is
    damaged, another process keeps its fleet, or the fleet had to end before the run did.
    """
    run, stop = open_run(path), stop or threading.Event()
    is_complete(run)
    hub = HubClient(hub_url, run.token)
    with _kept_alone(run), contextlib.closing(hub), _opened(run, hub_url, hub) as kept:
        while not (kept.is_over or stop.is_set() or _is_left(run, hub)):
            try:
                if not kept.closing and _is_over(run):
                    log.info("the run in %s is over, as it has all of its steps: its machines are ended", run.path)
                    kept.close(RUN_IS_OVER)
                _wait_at_most(hub, LOOK_PATIENCE_S if kept.closing else HUB_PATIENCE_S)
                kept.tick()
            except HubUnavailable as error:
                if kept.closing and _is_free(run):
                    break
                log.warning("%s", error)
            except UserError as error:
                log.error("the fleet stays as it is for now: %s", error)
            _await_occasion(run, kept, hub, stop)
        reason = kept.closing
        if not (kept.is_over or stop.is_set()):
            with _ledger_of(run) as ledger:
                kept.turn_to(ledger)
                _end_machines(kept)
    if reason and reason != RUN_IS_OVER:
        raise UserError(f"the fleet of {path} has ended: {reason}")


@dataclass(frozen=True, slots=True)
class Cleared:
    """What was done about a dead run."""

    stopped: tuple[str, ...] = ()
    """Machines that were there and were told to end."""
    closed: tuple[str, ...] = ()
    """Machines that had ended, and whose paid intervals were closed."""
    trouble: str = ""
    """Why something may be left; empty where nothing is."""


def clear_up(directory: Path) -> dict[str, Cleared]:
    """End the machines of every run in `directory` that nobody keeps and whose learner is gone; returns what was done, by run.

    A run that nothing had to be done about is not in it. Raises UserError where `directory` is no folder that runs are in.
    """
    _check_is_of_runs(directory)
    cleared = {}
    for file in sorted(directory.glob(f"*/{STATE_FILE}")):
        try:
            done = clear_up_run(open_run(file.parent))
        except InUse as busy:
            log.info("%s", busy)
            continue
        except UserError as error:
            log.error("%s was not cleared up: %s", file.parent, error)
            done = Cleared(trouble=str(error))
        if done != Cleared():
            cleared[file.parent.name] = done
    return cleared


def _check_is_of_runs(directory: Path) -> None:
    """Raises UserError for what holds no runs by mistake; a folder that may get some is only warned of."""
    if not directory.is_dir():
        what = "is not a folder" if directory.exists() else "does not exist"
        raise UserError(f"{directory} {what}: name the folder that holds the directories of runs, as run.directory does")
    if (directory / RUN_FILE).exists():
        raise UserError(f"{directory} is the directory of one run: name the folder that it is in, {directory.resolve().parent}")
    if not any(directory.glob(f"*/{RUN_FILE}")):
        log.warning("%s holds no runs: nothing is cleared up", directory)


def clear_up_run(run: RunDirectory) -> Cleared:
    """End the machines of the run. Raises InUse where its learner or fleet is there, UserError where it cannot be done."""
    if not (run.path / STATE_FILE).exists():
        return Cleared()
    with _kept_alone(run), _ledger_of(run) as ledger, _opened(run, "http://gone.invalid", ledger) as kept:
        paid = ledger.paid_for()
        stopped = _end_machines(kept)
        closed = paid - ledger.paid_for() - stopped
    return Cleared(tuple(sorted(stopped)), tuple(sorted(closed)))


def _kept_alone(run: RunDirectory) -> contextlib.AbstractContextManager[None]:
    """Raises InUse if another process keeps this fleet."""
    return held(run.fleet_lock, f"the fleet of {run.path} is kept by another process: wait for it or stop it")


@contextlib.contextmanager
def _opened(run: RunDirectory, hub_url: str, ledger: FleetLedger) -> Iterator[RentedFleet]:
    settings = run.config.activation
    with ThreadPoolExecutor(settings.pace.most_launches + STOPS_AT_A_TIME, thread_name_prefix="cloud") as executor:
        cloud, market = open_cloud(run, hub_url), RunMarket(run)
        yield RentedFleet(run.run_id, run.path / STATE_FILE, cloud, ledger, market, settings, executor)


def open_cloud(run: RunDirectory, hub_url: str) -> Cloud:
    """The cloud that `activation.cloud` names. Raises UserError where it cannot be used."""
    settings, worker = run.config.activation, run.config.worker
    if settings.cloud == "processes":
        return ProcessCloud(hub_url, run.token, run.path / "machines", run.logs, worker.threads)
    ports = (worker.peer_port,) if worker.peer_port else ()
    waits_s = settings.pace.queue_timeout_s
    return SkyCloud(Path(settings.worker_task), hub_url, run.token, settings.gpus_per_worker, ports, waits_s, worker.engine)


def _await_occasion(run: RunDirectory, kept: RentedFleet, hub: HubClient, stop: threading.Event) -> None:
    """Until there is something to see: a worker that came, went or fell silent, the end of the run or of the period."""
    if kept.closing:
        stop.wait(CLOSING_INTERVAL_S)
        return
    _wait_at_most(hub, LOOK_PATIENCE_S)
    seen, deadline = _who_is_there(hub), time.monotonic() + run.config.activation.pace.period_s
    while not stop.wait(min(OCCASION_INTERVAL_S, max(0.0, deadline - time.monotonic()))):
        if time.monotonic() >= deadline or _who_is_there(hub) != seen or _is_left(run, hub):
            return
        with contextlib.suppress(UserError):
            # Of a ledger that cannot be read the next look at the fleet tells.
            if _is_over(run):
                return


def _wait_at_most(hub: HubClient, patience_s: float) -> None:
    """For a hub that is away, and for one that takes a request and does not answer it."""
    hub.patience_s = hub.request_timeout_s = patience_s


def _who_is_there(hub: HubClient) -> set[tuple[str, bool, bool]] | None:
    try:
        return {(member.name, member.live, member.ready) for member in hub.crew()}
    except UserError:
        return None


def _is_over(run: RunDirectory) -> bool:
    """Whether the run has all its steps, by its configuration of now: whoever resumes it may raise them."""
    return is_complete(read_run(run.path))


def _is_left(run: RunDirectory, hub: HubClient) -> bool:
    """Whether the learner is gone, and its hub for so long that workers end by themselves."""
    return hub.silence_s > run.config.worker.orphan_timeout_s and _is_free(run)


def _is_free(run: RunDirectory) -> bool:
    """Whether no learner holds the run."""
    try:
        with run.held():
            return True
    except InUse:
        return False


@contextlib.contextmanager
def _ledger_of(run: RunDirectory) -> Iterator[Roster]:
    """Of a run that no learner holds, and that has no hub therefore. Raises InUse if a learner does."""
    with run.held(), contextlib.closing(Database(run.ledger, run.run_id)) as database:
        yield Roster(database)


def _end_machines(kept: RentedFleet) -> set[str]:
    """End all machines of a run whose learner is gone; returns the names of those that were there."""
    # There is no hub any more that they could hand in to.
    kept.close("the run's learner is gone", without_hub=True)
    names: set[str] = set()
    while not kept.is_over:
        try:
            names |= {action.name for action in kept.tick()}
        except CloudTrouble as error:
            log.warning("the cloud is asked again: %s", error)
        time.sleep(CLOSING_INTERVAL_S)
    return names
