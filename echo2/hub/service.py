"""The hub's logic, apart from HTTP: ledger, snapshots, scoring and who waits for what.

Invariants: one thread touches the ledger; a reply is given after the ledger has written what it says; workers that hold a
snapshot which was withdrawn get no leases; while the disk does not take what the ledger is to write, the hub refuses what it
cannot keep, and a learner that waits for it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from echo2.dissemination.broadcast.record import BroadcastEvent, BroadcastRecord
from echo2.dissemination.manifest import Manifest
from echo2.dissemination.pacing import Pacer
from echo2.dissemination.store import SnapshotStore
from echo2.errors import DiskError, SnapshotError, UserError
from echo2.hub.broadcaster import Broadcaster
from echo2.hub.chores import Chores
from echo2.hub.database import Database
from echo2.hub.group_book import rules_of
from echo2.hub.inspection import describe_run
from echo2.hub.ledger import LeasedGroup, Ledger, PostOutcome
from echo2.hub.mismatch import recent_mismatches
from echo2.hub.prompts import Prompts
from echo2.hub.roster import DISMISSED, TOLD_TO_END, Roster
from echo2.hub.signals import Signal
from echo2.hub.statistics import Statistics
from echo2.hub.uplink import Uplink
from echo2.listening import cannot_listen
from echo2.protocol import (
    Batch,
    GroupRollouts,
    Lease,
    LeaseAnswer,
    LogProbDifference,
    Telemetry,
    TrainingGroup,
    WorkerWelcome,
)
from echo2.run_directory import RunDirectory
from echo2.tasks import PromptError

BROADCAST_PORT = "broadcast_port"
Result = TypeVar("Result")


class Hub:
    """Serves one run; made and used inside one event loop."""

    def __init__(self, run: RunDirectory) -> None:
        config = run.config
        self.run = run
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._db = Database(run.ledger, run.run_id)
        self.ledger = Ledger(self._db, rules_of(config))
        self.roster = Roster(self._db)
        # A connection and a thread of their own, so that looking at the run does not hold up the ledger.
        self._view = Database(run.ledger, run.run_id)
        self._view_thread = ThreadPoolExecutor(1, thread_name_prefix="view")
        self.store = SnapshotStore(run.snapshots, run.run_id, run.token)
        cap = config.dissemination.uplink_bytes_per_s
        self._pacer = Pacer(cap) if cap else None
        self.uplink = Uplink(self._pacer)
        self._prompts = Prompts(run)
        self.leases_open = Signal()
        self.groups_ready = Signal()
        self.snapshot_announced = Signal()
        self.snapshot_loaded = Signal()
        self.evaluation_ended = Signal()
        self._broadcaster: Broadcaster | None = None
        self.chores = Chores(self, self._prompts)

    async def start(self) -> None:
        """Take up what an earlier hub left, and begin the chores."""
        await self.durably(self.roster.forgive_silence)
        if self.run.config.dissemination.peers:
            await self._start_broadcaster()
        await self.chores.start()

    async def _start_broadcaster(self) -> None:
        """Raises UserError if the configured port cannot be had, or the newest snapshot is damaged."""
        former = await self.durably(self._db.get, BROADCAST_PORT)
        loop = asyncio.get_running_loop()

        def on_event(event: BroadcastEvent) -> None:
            if event.ordinary:
                return
            told = f"{event.detail}, says {event.reporter}"
            asyncio.run_coroutine_threadsafe(
                self.durably(self.roster.note, f"broadcast: {event.kind}", event.culprit, told), loop
            )

        try:
            self._broadcaster = Broadcaster(
                self.run.config, self.run.run_id, self.run.token, self.store, self._pacer, int(former or 0), on_event
            )
        except OSError as error:
            host, port = self.run.config.hub.host, self.run.config.dissemination.port
            raise cannot_listen(error, "hub.host", host, "dissemination.port", port) from None
        await self.durably(self._remember_port, self._broadcaster.port)

    def _remember_port(self, port: int) -> None:
        with self._db.transaction():
            self._db.set(BROADCAST_PORT, str(port))

    def release_waiters(self) -> None:
        """The hub is about to stop: answer every long-poll now."""
        waits = (self.leases_open, self.groups_ready, self.snapshot_announced, self.snapshot_loaded, self.evaluation_ended)
        for waited_for in waits:
            waited_for.close()

    async def stop(self) -> None:
        await self.chores.stop()
        if self._broadcaster is not None:
            await asyncio.to_thread(self._broadcaster.stop)
        await asyncio.to_thread(self.chores.close)
        await self._look(self._view.close)
        await self.durably(self._db.close)
        self._view_thread.shutdown()
        self._thread.shutdown()

    async def durably(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Run a ledger or roster call in the one thread that may touch the database. Raises DiskError for a full disk."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)
        except DiskError:
            self.groups_ready.fire()
            self.evaluation_ended.fire()
            raise

    # --- workers

    async def register(self, name: str, process: str) -> WorkerWelcome:
        worker_id, former = await self.durably(self.roster.register, name, process)
        for lost in former:
            await self.reopen_leases(lost)
        return WorkerWelcome(
            worker_id=worker_id,
            run_id=self.run.run_id,
            sampling=self._prompts.sampling,
            config=self.run.config.model_dump(mode="json"),
            broadcast_port=self._broadcaster.port if self._broadcaster else None,
        )

    async def loaded(self, worker_id: str, telemetry: Telemetry) -> None:
        """The worker generates with another version from now on."""
        await self.durably(self.roster.heartbeat, worker_id, telemetry)
        if telemetry.version is None or telemetry.snapshot_id is None:
            raise UserError(f"worker {worker_id} reports a load without version or snapshot_id")
        with contextlib.suppress(SnapshotError):
            announced_at = self.store.manifest(telemetry.version).created_unix_s
            await self.durably(
                self.roster.record_load, worker_id, telemetry.version, telemetry.snapshot_id, announced_at, telemetry.fetch_s
            )
        self.snapshot_loaded.fire()
        self.leases_open.fire()

    async def lease(self, worker_id: str, limit: int, wait_s: float) -> LeaseAnswer:
        """Leases for a worker, at most `limit`; waits up to `wait_s` for some, or until it may leave."""
        config = self.run.config

        look = partial(self.durably, self._lease_now, worker_id, limit)
        leased, ended = await self.leases_open.poll(look, wait_s) or ([], False)
        leases = []
        for group in leased:
            try:
                prompt = self._prompts.token_ids_of(group.group_id)
            except PromptError as error:
                await self.durably(self.ledger.fail, group.group_id, str(error))
                await self.durably(self.roster.note, "prompt failed", f"group {group.group_id}", str(error))
                continue
            leases.append(
                Lease(
                    group_id=group.group_id,
                    attempt=group.attempt,
                    members=group.members,
                    prompt_token_ids=prompt,
                    timeout_s=config.hub.lease_timeout_s,
                    temperature=self._prompts.temperature_of(group.group_id),
                    prefixes=group.prefixes,
                )
            )
        return LeaseAnswer(leases=tuple(leases), ended=ended)

    async def post(self, worker_id: str, group: GroupRollouts) -> PostOutcome:
        outcome = await self.durably(self.ledger.post, worker_id, group)
        # At once, since a group that is handed in again is no more than a duplicate.
        if outcome == "accepted":
            self.chores.score(group.group_id)
        else:
            self.leases_open.fire()
        await self.durably(self.roster.heard_after_loss, worker_id)
        if group.failures:
            reasons = {str(f.member): f.reason for f in group.failures}
            await self.durably(self.roster.note, "generation failed", f"group {group.group_id} on {worker_id}", reasons)
        return outcome

    async def return_leases(self, worker_id: str, group_ids: list[int]) -> int:
        returned = await self.durably(self.ledger.return_leases, worker_id, group_ids)
        self.leases_open.fire()
        return returned

    async def drain(self, machine: str) -> None:
        """The machine's workers get no more leases, and may leave once they have handed in what they hold."""
        await self.durably(self.roster.drain, machine)
        self.leases_open.fire()

    async def leave(self, worker_id: str, reason: str) -> None:
        def enter() -> None:
            self.roster.leave(worker_id, reason or (DISMISSED if self._may_leave(worker_id) else TOLD_TO_END))

        await self.durably(enter)
        await self.reopen_leases(worker_id)
        self.snapshot_loaded.fire()

    def _lease_now(self, worker_id: str, limit: int) -> tuple[list[LeasedGroup], bool] | None:
        """Leases, and whether the worker may leave; None while there is neither."""
        if self._may_leave(worker_id):
            return [], True
        if not self.roster.is_live(worker_id):
            raise UserError(f"worker {worker_id} is not live: register again")
        telemetry = next(w.telemetry for w in self.roster.live_workers() if w.worker_id == worker_id)
        if telemetry.version is None or not self._still_published(telemetry):
            return None
        leased = self.ledger.lease(worker_id, telemetry.version, limit)
        return (leased, False) if leased else None

    def _may_leave(self, worker_id: str) -> bool:
        """Whether there will be no more leases for the worker."""
        return self.ledger.current_step >= self.run.config.run.steps or self.roster.is_draining(worker_id)

    def _still_published(self, telemetry: Telemetry) -> bool:
        """A version that a resume took back, or published anew with other weights, is not the one that the worker holds."""
        versions = self.store.versions()
        if not versions or telemetry.version is None or telemetry.version > versions[-1]:
            return False
        return telemetry.version < versions[0] or self.store.manifest(telemetry.version).snapshot_id == telemetry.snapshot_id

    async def reopen_leases(self, worker_id: str) -> None:
        await self.durably(self.ledger.reopen_leases_of, worker_id)
        self.leases_open.fire()

    # --- learner

    async def batch(self, step: int, wait_s: float) -> Batch | None:
        """The batch for `step`; None if it is not full within `wait_s`."""
        return await self.groups_ready.poll(lambda: self.durably(self._batch_now, step), wait_s)

    def _batch_now(self, step: int) -> Batch | None:
        assigned = self.ledger.batches.assign(step)
        if assigned is None:
            self._require_disk()
            return None
        groups = []
        for group_id in assigned:
            prompt = self._prompts.token_ids_of(group_id)
            members = tuple(m for m in self.ledger.rollouts_of(group_id) if m.reward == m.reward)
            groups.append(TrainingGroup(group_id, prompt, members))
        return Batch(step, tuple(groups), self.ledger.batches.scored_means(step))

    async def commit(
        self, step: int, metrics: dict[str, float], oldest_checkpoint: int, differences: list[LogProbDifference]
    ) -> list[str]:
        """Step `step` is done; returns what is to be told of workers whose log-probabilities stand out for the first time."""
        await self.durably(self.ledger.batches.commit, step, metrics, oldest_checkpoint, differences)
        self.leases_open.fire()
        self.groups_ready.fire()
        suspects = [found for found in await self._look(recent_mismatches, self._view) if found.stands_out]
        return [
            str(found)
            for found in suspects
            if await self.durably(self.roster.note_once, "worker stands out", found.worker_id, str(found))
        ]

    async def evaluation(self, version: int, wait_s: float) -> dict[str, float] | None:
        """The figures of the evaluation of `version`; None if it does not end within `wait_s`."""

        def take() -> dict[str, float] | None:
            figures = self.ledger.evaluations.take(version)
            if figures is None:
                self._require_disk()
            return figures

        return await self.evaluation_ended.poll(lambda: self.durably(take), wait_s)

    def _require_disk(self) -> None:
        """Raises DiskError while what the learner waits for cannot be written."""
        if self._db.failure is not None:
            raise DiskError(str(self._db.failure))

    async def resume(self, version: int) -> int:
        """The learner starts from `version`; newer snapshots are taken back. Returns how many steps will be replayed."""
        replayed = await self.durably(self.ledger.batches.resume, version)
        for withdrawn in self.store.withdraw_after(version):
            await self.durably(self.roster.note, "snapshot withdrawn", f"version {withdrawn}", "the learner resumed before it")
        return replayed

    async def announce(self, version: int) -> Manifest:
        """A snapshot lies in the store: tell whoever waits. Raises SnapshotError if it does not."""
        manifest = self.store.manifest(version)
        overtaken = await self.durably(self.ledger.announce, version)
        if overtaken is not None:
            told = f"it was not done when that of version {version} was due: raise evaluation.every_steps, or lower .prompts"
            await self.durably(self.roster.note, "evaluation cut short", f"version {overtaken}", told)
        self.store.sweep(self.run.config.dissemination.retain_snapshots)
        if self._broadcaster is not None:
            self._broadcaster.announce(version)
        self.snapshot_announced.fire()
        self.leases_open.fire()
        return manifest

    async def snapshot_route(self, held_id: str | None, wait_s: float) -> tuple[Manifest, ...]:
        """What to fetch, in order, to go from the snapshot called `held_id` to the newest; empty after `wait_s` without one."""

        async def look() -> tuple[Manifest, ...] | None:
            return self.store.route(held_id) or None

        return await self.snapshot_announced.poll(look, wait_s) or ()

    async def receivers(self, version: int, wait_s: float) -> tuple[list[str], list[str]]:
        """Who generates with `version` or newer, and who does not yet; waits until the second list is empty."""

        async def look() -> tuple[list[str], list[str]]:
            live = [w.worker_id for w in await self.durably(self.roster.live_workers)]
            loaded = await self.durably(self.roster.receivers, version)
            return sorted(loaded), sorted(set(live) - loaded)

        async def complete() -> tuple[list[str], list[str]] | None:
            loaded, waiting = await look()
            return (loaded, waiting) if not waiting else None

        return await self.snapshot_loaded.poll(complete, wait_s) or await look()

    def broadcast_record(self, version: int) -> BroadcastRecord | None:
        """What the broadcast of `version` was like so far; None where there was none, or long ago."""
        return self._broadcaster.record(version) if self._broadcaster else None

    # --- overview

    async def status(self) -> dict[str, Any]:
        """What the run is doing; for `/v1/status`."""
        return await self._look(describe_run, self.run, self._view)

    async def steps(self) -> list[dict[str, float]]:
        """The metrics of every committed step."""
        return await self._look(Statistics(self._view).step_metrics)

    async def _look(self, call: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._view_thread, call, *arguments)
