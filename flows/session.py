"""Everything that a training segment needs around it: run directory, hub, fleet, learner.

Invariants: what a session started is stopped when it closes, however it closes; hub and workers that die meanwhile are started
again; the learner begins from the newest checkpoint, and the hub is told so before the first batch is asked for.
"""

from __future__ import annotations

import logging
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from clouds.fleet import Fleet
from clouds.local import LocalBackend
from echo2.config import Config
from echo2.durability import naming
from echo2.errors import UserError, WaitTimeout
from echo2.hub.address import listen
from echo2.hub.client import HubClient
from echo2.hub.process import HubProcess
from echo2.learning.checkpoint import Checkpoints
from echo2.learning.checkpoint_stores import open_store
from echo2.learning.learner import Learner
from echo2.learning.learners import make_learner
from echo2.logs import say
from echo2.models.base import publish_base
from echo2.models.preparation import prepare_model, write_stand_in
from echo2.run_directory import RunDirectory, create_run
from echo2.trackers import Trackers, make_trackers
from flows.console import watching
from flows.interrupts import answer, raise_if_lost
from flows.preflight import check_startable

log = logging.getLogger(__name__)
WATCH_INTERVAL_S = 0.5
YIELD_CHECK_S = 10.0
FLEET_CHECK_S = 2.0
DROPS_TO_SPEAK_OF = 10
"""Batches' worth of groups that may be dropped in a row before the user hears of it."""
LEDGER_PATIENCE_S = 15.0
"""How long the fleet waits for a hub that restarts before it goes on without telling the ledger."""
MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "recipe.json")


class Session:
    """What is open while a segment trains."""

    def __init__(
        self,
        run: RunDirectory,
        hub: HubClient,
        fleet: Fleet,
        learner: Learner,
        checkpoints: Checkpoints,
        trackers: Trackers,
    ) -> None:
        self.run = run
        self.config = run.config
        self.hub = hub
        self.fleet = fleet
        self.learner = learner
        self.checkpoints = checkpoints
        self.trackers = trackers
        self.stop_requested = threading.Event()
        self._last_sign_of_life = time.monotonic()
        self._next_yield_check = time.monotonic() + YIELD_CHECK_S
        self._yield_seen = (-1, 0, 0)
        self._began_at_s, self._next_fleet_check = time.time(), -math.inf

    def check_supply(self) -> None:
        """While the learner waits for a batch: raises WaitTimeout if nobody is there to fill it, Stopped if asked to stop."""
        self.check_stop()
        self.fleet.raise_if_hopeless()
        if self.hub.live_workers():
            self._last_sign_of_life = time.monotonic()
        self._check_yield()
        silence_s = time.monotonic() - self._last_sign_of_life
        if silence_s > self.config.fleet.start_timeout_s:
            raise WaitTimeout(
                f"no worker has been alive for {silence_s:.0f} s, over fleet.start_timeout_s = "
                f"{self.config.fleet.start_timeout_s:g}: "
                f"look into {self.run.logs}, or start workers with: echo2 worker --hub {self.hub.url}"
            )

    def _check_yield(self) -> None:
        """Speak of a supply that never becomes a batch; raises UserError if every group of it failed."""
        if time.monotonic() < self._next_yield_check:
            return
        self._next_yield_check = time.monotonic() + YIELD_CHECK_S
        status = self.hub.status()
        groups, step = status["groups"], status["step"]
        dropped = sum(groups[state] for state in ("filtered", "expired", "failed"))
        if step != self._yield_seen[0]:
            self._yield_seen = (step, dropped, groups["failed"])
            return
        _, dropped_before, failed_before = self._yield_seen
        dropped, failed = dropped - dropped_before, groups["failed"] - failed_before
        if groups["ready"] or dropped < DROPS_TO_SPEAK_OF * self.config.batch.groups:
            return
        reason = next((e["detail"] for e in status["events"] if e["kind"].endswith("failed")), "all rewards equal")
        told = f"step {step} has no group to train after {dropped} were dropped ({failed} failed), the last one for: {reason}"
        told += f"; `echo2 completions {self.run.path}` shows what was written"
        if failed == dropped:
            raise UserError(f"{told}; look into {self.run.logs}")
        log.warning("%s", told)
        self._yield_seen = (step, dropped + dropped_before, failed + failed_before)

    def check_stop(self) -> None:
        """Raises Stopped if the user asked the segment to end, or the budget does."""
        if not self.stop_requested.is_set() and (reason := self.fleet.over_budget or self._rented_fleet_ended()):
            say(f"stopping after this step with a checkpoint: {reason}")
            self.stop_requested.set()
        if self.stop_requested.is_set():
            raise Stopped

    def _rented_fleet_ended(self) -> str:
        """Why `echo2 fleet` ended, if it did while this session went on."""
        if time.monotonic() < self._next_fleet_check:
            return ""
        self._next_fleet_check = time.monotonic() + FLEET_CHECK_S
        reason = self.hub.fleet_ending(self._began_at_s)
        return f"the fleet of rented machines has ended: {reason}" if reason else ""

    def checkpoint(self) -> None:
        """Write the learner's state, if the newest checkpoint is older, and drop those that are not to be kept."""
        self.checkpoints.save(self.learner, _groups_in(self.hub))


class Stopped(Exception):
    """The user asked the segment to stop; it ends in order after its last whole step."""


@contextmanager
def stoppable(session: Session) -> Iterator[None]:
    """During the block the first Ctrl-C or SIGTERM asks the segment to end in order, the second ends it at once."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        handler = former[signal.Signals(number)]
        if session.stop_requested.is_set() and callable(handler):
            handler(number, frame)
        answer()
        session.stop_requested.set()
        say("stopping after this step with a checkpoint; once more stops at once")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        raise_if_lost()
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def open_session(config: Config, resume: bool) -> Iterator[Session]:
    """Start hub, fleet and learner for `config`'s run; stops them at the end of the block.

    Raises UserError as `check_startable` does before anything is made, and where the hub or the learner cannot be had.
    """
    check_startable(config, resume)
    listener = listen(config.hub.host, config.hub.port)
    run = create_run(config, resume)
    with ExitStack() as stack:
        stack.callback(listener.close)
        stack.enter_context(run.held())
        say(f"run {run.run_id} in {run.path}")
        model_folder = _provide_model(run)
        hub_process = HubProcess(run, listener)
        stack.callback(hub_process.stop)
        hub_process.start()
        hub = HubClient(hub_process.url, run.token, patience_s=config.hub.start_timeout_s)
        stack.callback(hub.close)
        say(f"hub at {hub.url}")
        hub_process.wait_ready()
        price, python = config.fleet.price_usd_per_hour, config.fleet.python
        backend = LocalBackend(hub.url, run.token, run.logs, config.worker.threads, price, python)
        ledger_line = HubClient(hub.url, run.token, patience_s=LEDGER_PATIENCE_S)
        stack.callback(ledger_line.close)
        fleet = Fleet(backend, ledger_line, config.fleet.workers, config.fleet.restart_backoff_s, config.activation.budget_usd)
        stack.callback(fleet.stop)
        stack.enter_context(_kept_alive(hub_process, fleet))
        say(_who_works(run, hub.url))
        learner = make_learner(config, model_folder, run.logs)
        stack.callback(learner.close)
        checkpoints = _open_checkpoints(run, hub)
        stack.callback(checkpoints.close)
        _go_on(learner, checkpoints, hub)
        trackers = Trackers(make_trackers(run), hub.steps())
        stack.callback(trackers.close)
        session = Session(run, hub, fleet, learner, checkpoints, trackers)
        with watching(hub):
            yield session


def _open_checkpoints(run: RunDirectory, hub: HubClient) -> Checkpoints:
    def on_trouble(trouble: str) -> None:
        log.warning("%s", trouble)
        hub.note("checkpoints", run.config.learner.checkpoints, trouble)

    return Checkpoints(open_store(run, on_trouble), run.run_id, run.config.learner)


def _go_on(learner: Learner, checkpoints: Checkpoints, hub: HubClient) -> None:
    """Bring learner and ledger to where the newest checkpoint was written; raises UserError where they do not fit."""
    state = checkpoints.restore_newest(learner)
    groups = _groups_in(hub)
    if state is not None and groups < state.cursor:
        raise UserError(
            f"the ledger has {groups} groups, but the checkpoint of version {state.version} was written when it had "
            f"{state.cursor}: restore the ledger.db that belongs to it, or start another run"
        )
    replayed = hub.resume(learner.version)
    if learner.version or replayed:
        say(f"learner goes on from version {learner.version}; {replayed} steps are replayed")


def _groups_in(hub: HubClient) -> int:
    """How many prompts the ledger has given out so far."""
    return sum(hub.status()["groups"].values())


def _who_works(run: RunDirectory, hub_url: str) -> str:
    if run.config.fleet.workers:
        workers = run.config.fleet.workers
        return f"{workers} workers are starting" if workers > 1 else "1 worker is starting"
    address = hub_url.replace("0.0.0.0", "THIS-HOST").replace("[::]", "THIS-HOST")
    return f"waiting for workers: echo2 worker --hub {address}, with ECHO2_TOKEN as in {run.path / 'token'}"


def _provide_model(run: RunDirectory) -> Path:
    """The folder of the model; its small files go into the run's record, whence workers fetch them."""
    if run.config.learner.engine == "simulated" and run.config.model.path == "tiny":
        with naming(run.model):
            run.model.mkdir(exist_ok=True)
            write_stand_in(run.config, run.model)
        return run.model
    folder = prepare_model(run.config, say)
    with naming(run.model):
        run.model.mkdir(exist_ok=True)
        for name in MODEL_FILES:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, run.model / name)
    if run.config.learner.lora.rank and run.config.worker.engine != "simulated":
        publish_base(run, folder)
    return folder


@contextmanager
def _kept_alive(hub: HubProcess, fleet: Fleet) -> Iterator[None]:
    """Threads that start hub and workers again when they end; the fleet's waits for the hub, so that the hub has its own."""
    closing = threading.Event()

    def watch(keep: Callable[[], None]) -> None:
        while not closing.wait(WATCH_INTERVAL_S):
            try:
                keep()
            except (UserError, OSError) as error:
                log.error("hub or workers could not be kept as planned: %s", error)

    fleet.reconcile()
    keepers = [threading.Thread(target=watch, args=(keep,), daemon=True) for keep in (hub.keep_alive, fleet.reconcile)]
    for keeper in keepers:
        keeper.start()
    try:
        yield
    finally:
        closing.set()
        for keeper in keepers:
            keeper.join(5.0)
