"""Scoring of completions in processes of their own.

Invariants: a completion whose scoring raises, hangs, or gives what is not a finite number has no reward (it is not 0); one bad
completion does not cost its group the others; a scoring process that hangs, at its start too, is killed and replaced.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import threading
from collections.abc import Sequence
from concurrent.futures import TimeoutError as ScoringTimeout
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from pebble import ProcessExpired, ProcessPool

from echo2.config_tasks import TaskSection
from echo2.hub.ledger import MemberScore
from echo2.lifeline import end_with_parent
from echo2.protocol import Rollout
from echo2.tasks import ScoringError, Task, checked_score
from echo2.tasks.catalog import make_task
from echo2.tasks.tokenizer import TextTokenizer, load_tokenizer

log = logging.getLogger(__name__)
POOL_ATTEMPTS = 5
STALL_TIMEOUTS, STALL_GRACE_S = 2.0, 5.0
"""A pool that has not answered after so many scoring time-outs and these seconds is taken for dead."""

_task: Task
_tokenizer: TextTokenizer


def _start(task: TaskSection, seed: int, model_folder: Path, parent_pid: int) -> None:
    global _task, _tokenizer
    end_with_parent(parent_pid, lambda: os._exit(1))
    _task = make_task(task, seed)
    _tokenizer = load_tokenizer(model_folder)


def _score(index: int, members: Sequence[tuple[int, list[int], bool]]) -> list[MemberScore]:
    """Score members given as (member, token ids, finished by a stop token)."""
    scores = []
    for member, token_ids, finished in members:
        text = _tokenizer.completion(token_ids)
        try:
            score = checked_score(_task, index, text, finished)
            scores.append(MemberScore(member, score.reward, score.metrics))
        except ScoringError as error:
            scores.append(MemberScore(member, None, reason=str(error)))
    return scores


class ScoringPool:
    """Scores groups; `timeout_s` bounds a group at first and, if that runs out, each of its members by itself."""

    def __init__(self, task: TaskSection, seed: int, model_folder: Path, processes: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._processes = processes
        self._start_arguments = (task, seed, model_folder, os.getpid())
        self._pool = self._make_pool()

    async def score(self, index: int, rollouts: Sequence[Rollout]) -> list[MemberScore]:
        """The scores of one group's members; `index` is the prompt's."""
        members = [(r.member, r.token_ids.tolist(), r.finish_reason == "stop") for r in rollouts]
        try:
            return await self._run(index, members)
        except (ScoringTimeout, ProcessExpired):
            return [await self._score_alone(index, member) for member in members]

    async def _score_alone(self, index: int, member: tuple[int, list[int], bool]) -> MemberScore:
        try:
            return (await self._run(index, [member]))[0]
        except ScoringTimeout:
            return MemberScore(member[0], None, reason=f"scoring took longer than {self._timeout_s:g} s")
        except ProcessExpired as error:
            return MemberScore(member[0], None, reason=f"the scoring process died with exit code {error.exitcode}")

    async def _run(self, index: int, members: Sequence[tuple[int, list[int], bool]]) -> list[MemberScore]:
        for attempt in range(POOL_ATTEMPTS):
            pool = self._pool
            try:
                future = asyncio.wrap_future(pool.schedule(_score, args=(index, members), timeout=self._timeout_s))
                done, _ = await asyncio.wait([future], timeout=STALL_TIMEOUTS * self._timeout_s + STALL_GRACE_S)
                if not done:
                    raise BrokenProcessPool("no answer in time")
                return future.result()
            except (ProcessExpired, ScoringTimeout):
                raise
            except (BrokenProcessPool, RuntimeError) as error:
                # A process that dies between two completions breaks the whole pool, or leaves it waiting for ever.
                log.warning("the scoring processes are gone (%r) and are started again, attempt %d", error, attempt + 1)
                if self._pool is pool:
                    self._pool = self._make_pool()
                    # In a thread, since it takes seconds; without it, what the pool still has running would run on.
                    threading.Thread(target=_end, args=(pool,), name="end of scoring processes", daemon=True).start()
        raise RuntimeError(f"the scoring processes ended {POOL_ATTEMPTS} times in a row without scoring prompt {index}")

    def _make_pool(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self._processes,
            context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=self._start_arguments,
        )

    def close(self) -> None:
        """End the processes; scores under way are given up, the ledger still holds their groups."""
        _end(self._pool)


def _end(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()
