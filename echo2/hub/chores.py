"""What the hub does by itself: it looks after silence and deadlines, and has groups scored.

Invariants: a hub that lacks a chore ends, and says why; a chore outlasts a disk that does not take what it has to write, and
writes it once there is room.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from echo2.errors import DiskError
from echo2.hub.ledger import Ledger, MemberScore
from echo2.hub.prompts import Prompts
from echo2.hub.roster import Roster
from echo2.hub.scoring import ScoringPool
from echo2.hub.signals import Signal
from echo2.run_directory import RunDirectory

Result = TypeVar("Result")
log = logging.getLogger(__name__)
SWEEP_INTERVAL_S = 0.5


class Household(Protocol):
    """What the chores need of the hub that they are done for."""

    run: RunDirectory
    ledger: Ledger
    roster: Roster
    leases_open: Signal
    groups_ready: Signal
    snapshot_loaded: Signal
    evaluation_ended: Signal

    async def durably(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Run a ledger or roster call in the one thread that may touch the database. Raises DiskError for a full disk."""

    async def reopen_leases(self, worker_id: str) -> None:
        """Give what a lost worker had leased to others."""


class Chores:
    """The chores of one hub, used inside its event loop."""

    def __init__(self, hub: Household, prompts: Prompts) -> None:
        config = hub.run.config
        self._hub = hub
        self._prompts = prompts
        self._scoring = ScoringPool(
            config.task, config.run.seed, hub.run.model, config.hub.scoring_processes, config.hub.scoring_timeout_s
        )
        self._to_score: asyncio.Queue[int] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self.failed = False

    def score(self, group_id: int) -> None:
        """Have a generated group scored."""
        self._to_score.put_nowait(group_id)

    async def start(self) -> None:
        """Begin, with what an earlier hub left to be scored."""
        for group_id in await self._hub.durably(self._hub.ledger.generated_groups):
            self.score(group_id)
        scorers = [self._score_groups() for _ in range(2 * self._hub.run.config.hub.scoring_processes)]
        self._tasks = [asyncio.create_task(chore) for chore in (self._sweep(), *scorers)]
        for task in self._tasks:
            task.add_done_callback(self._end_if_failed)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        # One that failed has said so already, and must not keep the others from their end.
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def close(self) -> None:
        """End the scoring processes, which takes a while."""
        self._scoring.close()

    def _end_if_failed(self, task: asyncio.Task[None]) -> None:
        """A hub that lacks a chore would stall the run in silence; one that ends is started again and takes up what is left."""
        if not task.cancelled() and task.exception() is not None:
            log.critical("the hub ends, since one of its chores failed", exc_info=task.exception())
            self.failed = True
            os.kill(os.getpid(), signal.SIGTERM)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            # The ledger says so itself.
            with contextlib.suppress(DiskError):
                await self._sweep_once()

    async def _sweep_once(self) -> None:
        hub = self._hub
        for worker_id in await hub.durably(hub.roster.lose_silent, hub.run.config.hub.heartbeat_timeout_s):
            await hub.reopen_leases(worker_id)
            hub.snapshot_loaded.fire()
        if await hub.durably(hub.ledger.reopen_overdue):
            hub.leases_open.fire()
        if await hub.durably(hub.ledger.evaluations.settle):
            hub.evaluation_ended.fire()

    async def _score_groups(self) -> None:
        hub = self._hub
        while True:
            group_id = await self._to_score.get()
            members = await hub.durably(hub.ledger.rollouts_of, group_id)
            scores = await self._scoring.score(self._prompts.index_of(group_id), [m.rollout for m in members])
            if await self._recorded(group_id, scores):
                hub.evaluation_ended.fire()
            hub.groups_ready.fire()
            hub.leases_open.fire()

    async def _recorded(self, group_id: int, scores: Sequence[MemberScore]) -> bool:
        """As `_record`, again and again while the disk does not take it."""
        while True:
            try:
                return await self._hub.durably(self._record, group_id, scores)
            except DiskError:
                await asyncio.sleep(SWEEP_INTERVAL_S)

    def _record(self, group_id: int, scores: Sequence[MemberScore]) -> bool:
        """Whether an evaluation has ended with that."""
        ledger, roster = self._hub.ledger, self._hub.roster
        ledger.record_scores(group_id, scores)
        reasons = {str(s.member): s.reason for s in scores if s.reward is None}
        if reasons:
            roster.note("scoring failed", f"group {group_id}", reasons)
        return ledger.evaluations.settle()
