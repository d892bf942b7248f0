"""The hub's logic, apart from HTTP: ledger, snapshots, scoring and who waits for what.

Invariants: one thread touches the ledger; a reply is given after the ledger has written what it says; workers that hold a
snapshot which was withdrawn get no leases.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from echo2.dissemination.broadcast.record import BroadcastEvent, BroadcastRecord
from echo2.dissemination.manifest import Manifest
from echo2.dissemination.pacing import Pacer
from echo2.dissemination.store import SnapshotStore
from echo2.errors import SnapshotError, UserError
from echo2.hub.broadcaster import Broadcaster
from echo2.hub.database import Database
from echo2.hub.group_book import rules_of
from echo2.hub.inspection import describe_run
from echo2.hub.ledger import LeasedGroup, Ledger, PostOutcome
from echo2.hub.roster import Roster
from echo2.hub.scoring import ScoringPool
from echo2.hub.signals import Signal
from echo2.hub.statistics import Statistics
from echo2.hub.uplink import Uplink
from echo2.protocol import Batch, GroupRollouts, Lease, LeaseAnswer, Sampling, Telemetry, TrainingGroup, WorkerWelcome
from echo2.run_directory import RunDirectory
from echo2.tasks import PromptError, checked_prompt
from echo2.tasks.catalog import make_task
from echo2.tasks.order import prompt_index
from echo2.tasks.tokenizer import check_agreement, load_tokenizer

log = logging.getLogger(__name__)
SWEEP_INTERVAL_S = 0.5
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
        self._task = make_task(config.task, config.run.seed)
        self._tokenizer = load_tokenizer(run.model)
        check_agreement(self._task, self._tokenizer)
        self.sampling = Sampling(
            temperature=config.sampling.temperature,
            max_completion_tokens=config.sampling.max_completion_tokens,
            stop_token_ids=tuple(self._tokenizer.eos_token_ids),
            seed=config.run.seed,
        )
        self._scoring = ScoringPool(
            config.task, config.run.seed, run.model, config.hub.scoring_processes, config.hub.scoring_timeout_s
        )
        self.leases_open = Signal()
        self.groups_ready = Signal()
        self.snapshot_announced = Signal()
        self.snapshot_loaded = Signal()
        self._to_score: asyncio.Queue[int] = asyncio.Queue()
        self._chores: list[asyncio.Task[None]] = []
        self._broadcaster: Broadcaster | None = None
        self.failed = False

    async def start(self) -> None:
        """Take up what an earlier hub left, and begin the chores."""
        await self.durably(self.roster.forgive_silence)
        if self.run.config.dissemination.peers:
            await self._start_broadcaster()
        for group_id in await self.durably(self.ledger.generated_groups):
            self._to_score.put_nowait(group_id)
        scorers = [self._score_groups() for _ in range(2 * self.run.config.hub.scoring_processes)]
        self._chores = [asyncio.create_task(chore) for chore in (self._sweep(), *scorers)]
        for chore in self._chores:
            chore.add_done_callback(self._end_if_failed)

    def _end_if_failed(self, chore: asyncio.Task[None]) -> None:
        """A hub that lacks a chore would stall the run in silence; one that ends is started again and takes up what is left."""
        if not chore.cancelled() and chore.exception() is not None:
            log.critical("the hub ends, since one of its chores failed", exc_info=chore.exception())
            self.failed = True
            os.kill(os.getpid(), signal.SIGTERM)

    async def _start_broadcaster(self) -> None:
        """Raises UserError if the configured port cannot be had."""
        former = await self.durably(self._db.get, BROADCAST_PORT)
        loop, dissemination = asyncio.get_running_loop(), self.run.config.dissemination

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
            raise UserError(
                f"dissemination.port = {dissemination.port} cannot be listened on ({error.strerror}): choose another one"
            ) from None
        await self.durably(self._db.set, BROADCAST_PORT, str(self._broadcaster.port))

    def release_waiters(self) -> None:
        """The hub is about to stop: answer every long-poll now."""
        for waited_for in (self.leases_open, self.groups_ready, self.snapshot_announced, self.snapshot_loaded):
            waited_for.close()

    async def stop(self) -> None:
        for chore in self._chores:
            chore.cancel()
        # One that failed has said so already, and must not keep the others from their end.
        await asyncio.gather(*self._chores, return_exceptions=True)
        if self._broadcaster is not None:
            await asyncio.to_thread(self._broadcaster.stop)
        await asyncio.to_thread(self._scoring.close)
        await self._look(self._view.close)
        await self.durably(self._db.close)
        self._view_thread.shutdown()
        self._thread.shutdown()

    async def durably(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Run a ledger or roster call in the one thread that may touch the database."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    # --- workers

    async def register(self, name: str) -> WorkerWelcome:
        worker_id, former = await self.durably(self.roster.register, name)
        for lost in former:
            await self._reopen_leases(lost)
        return WorkerWelcome(
            worker_id=worker_id,
            run_id=self.run.run_id,
            sampling=self.sampling,
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
        """Leases for a worker, at most `limit`; waits up to `wait_s` for some, or for the end of the run."""
        config = self.run.config

        async def look() -> tuple[list[LeasedGroup], bool] | None:
            if await self.durably(lambda: self.ledger.current_step) >= config.run.steps:
                return [], True
            leased = await self._lease_now(worker_id, limit)
            return (leased, False) if leased else None

        leased, ended = await self.leases_open.poll(look, wait_s) or ([], False)
        leases = []
        for group in leased:
            try:
                prompt = self._prompt_token_ids(group.group_id)
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
                )
            )
        return LeaseAnswer(leases=tuple(leases), ended=ended)

    async def post(self, worker_id: str, group: GroupRollouts) -> PostOutcome:
        outcome = await self.durably(self.ledger.post, worker_id, group)
        if outcome == "accepted" and group.rollouts:
            self._to_score.put_nowait(group.group_id)
        else:
            self.leases_open.fire()
        if group.failures:
            reasons = {str(f.member): f.reason for f in group.failures}
            await self.durably(self.roster.note, "generation failed", f"group {group.group_id} on {worker_id}", reasons)
        return outcome

    async def return_leases(self, worker_id: str, group_ids: list[int]) -> int:
        returned = await self.durably(self.ledger.return_leases, worker_id, group_ids)
        self.leases_open.fire()
        return returned

    async def leave(self, worker_id: str) -> None:
        await self.durably(self.roster.leave, worker_id)
        await self._reopen_leases(worker_id)
        self.snapshot_loaded.fire()

    def prompt_of(self, group_id: int) -> int:
        return prompt_index(group_id, self._task.size, self.run.config.run.seed)

    def _prompt_token_ids(self, group_id: int) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(checked_prompt(self._task, self.prompt_of(group_id))))

    async def _lease_now(self, worker_id: str, limit: int) -> list[LeasedGroup]:
        def lease() -> list[LeasedGroup]:
            if not self.roster.is_live(worker_id):
                raise UserError(f"worker {worker_id} is not live: register again")
            telemetry = next(w.telemetry for w in self.roster.live_workers() if w.worker_id == worker_id)
            if telemetry.version is None or not self._still_published(telemetry):
                return []
            return self.ledger.lease(worker_id, telemetry.version, limit)

        return await self.durably(lease)

    def _still_published(self, telemetry: Telemetry) -> bool:
        """A version that a resume took back, or published anew with other weights, is not the one that the worker holds."""
        versions = self.store.versions()
        if not versions or telemetry.version is None or telemetry.version > versions[-1]:
            return False
        return telemetry.version < versions[0] or self.store.manifest(telemetry.version).snapshot_id == telemetry.snapshot_id

    async def _reopen_leases(self, worker_id: str) -> None:
        await self.durably(self.ledger.reopen_leases_of, worker_id)
        self.leases_open.fire()

    # --- learner

    async def batch(self, step: int, wait_s: float) -> Batch | None:
        """The batch for `step`; None if it is not full within `wait_s`."""
        return await self.groups_ready.poll(lambda: self.durably(self._batch_now, step), wait_s)

    def _batch_now(self, step: int) -> Batch | None:
        assigned = self.ledger.batches.assign(step)
        if assigned is None:
            return None
        groups = []
        for group_id in assigned:
            prompt = self._prompt_token_ids(group_id)
            members = tuple(m for m in self.ledger.rollouts_of(group_id) if m.reward == m.reward)
            groups.append(TrainingGroup(group_id, prompt, members))
        return Batch(step, tuple(groups), self.ledger.batches.scored_means(step))

    async def commit(self, step: int, metrics: dict[str, float], oldest_checkpoint: int) -> None:
        await self.durably(self.ledger.batches.commit, step, metrics, oldest_checkpoint)
        self.leases_open.fire()
        self.groups_ready.fire()

    async def resume(self, version: int) -> int:
        """The learner starts from `version`; newer snapshots are taken back. Returns how many steps will be replayed."""
        replayed = await self.durably(self.ledger.batches.resume, version)
        for withdrawn in self.store.withdraw_after(version):
            await self.durably(self.roster.note, "snapshot withdrawn", f"version {withdrawn}", "the learner resumed before it")
        return replayed

    async def announce(self, version: int) -> Manifest:
        """A snapshot lies in the store: tell whoever waits. Raises SnapshotError if it does not."""
        manifest = self.store.manifest(version)
        await self.durably(self.ledger.announce, version)
        self.store.sweep(self.run.config.dissemination.retain_snapshots)
        if self._broadcaster is not None:
            self._broadcaster.announce(version)
        self.snapshot_announced.fire()
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

    # --- chores

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            for worker_id in await self.durably(self.roster.lose_silent, self.run.config.hub.heartbeat_timeout_s):
                await self._reopen_leases(worker_id)
                self.snapshot_loaded.fire()
            if await self.durably(self.ledger.reopen_overdue):
                self.leases_open.fire()

    async def _score_groups(self) -> None:
        while True:
            group_id = await self._to_score.get()
            members = await self.durably(self.ledger.rollouts_of, group_id)
            scores = await self._scoring.score(self.prompt_of(group_id), [m.rollout for m in members])
            reasons = {str(s.member): s.reason for s in scores if s.reward is None}
            if reasons:
                await self.durably(self.roster.note, "scoring failed", f"group {group_id}", reasons)
            await self.durably(self.ledger.record_scores, group_id, scores)
            self.groups_ready.fire()
            self.leases_open.fire()
