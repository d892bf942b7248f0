"""What a worker has to tell the hub, in order, until the hub has acknowledged it.

Invariants: generation never waits for the network; a group stays here until the hub has it or refuses it, and lies on the disk
while the hub is away; the order of a load and the groups generated after it is kept.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from echo2.errors import UserError
from echo2.hub.client import HubClient, HubUnavailable
from echo2.protocol import MOST_GROUPS, GroupRollouts, Telemetry
from echo2.rollout.background import Background
from echo2.rollout.spool import Spool

log = logging.getLogger(__name__)
LONGEST_PAUSE_S = 2.0
"""Between two tries; its length is random, so that workers do not fall upon a hub that is back all at once."""
UNWANTED = ("late", "stale")
"""What the hub answers where it has no use for a group any more."""
MOST_TOKENS = 1 << 16
"""Groups that wait are handed in together up to so many tokens, some MB; a larger one goes alone."""


@dataclass(frozen=True, slots=True)
class _Post:
    """A group to hand in."""

    worker_id: str
    group: GroupRollouts


_Message = _Post | Path | Callable[[], object]
"""A group, here or on the disk, or something else to say."""


class Outbox(Background):
    """Sends groups, returns and load reports one after the other."""

    def __init__(self, client: HubClient, spool: Spool, name: str) -> None:
        """What `spool` holds from an earlier worker is sent first."""
        super().__init__("outbox")
        self._client = client
        self._spool = spool
        self._random = random.Random(name)
        self._changed = threading.Condition()
        self._messages: deque[_Message] = deque(spool.left())
        self._unwanted: deque[tuple[int, int]] = deque()
        self._closing = False
        self._disk_failed = False

    def put(self, worker_id: str, group: GroupRollouts) -> None:
        self._put(_Post(worker_id, group))

    def put_return(self, worker_id: str, group_ids: list[int]) -> None:
        self._put(lambda: self._client.return_leases(worker_id, group_ids))

    def put_loaded(self, worker_id: str, telemetry: Telemetry) -> None:
        self._put(lambda: self._client.loaded(worker_id, telemetry))

    def put_note(self, kind: str, subject: str, detail: str) -> None:
        self._put(lambda: self._client.note(kind, subject, detail))

    def take_unwanted(self) -> list[tuple[int, int]]:
        """Group and attempt of what the hub has no use for any more, since the last call."""
        return [self._unwanted.popleft() for _ in range(len(self._unwanted))]

    def close(self, timeout_s: float) -> None:
        """Send what is left, for at most `timeout_s`, and end; groups that could not be sent stay on the disk.

        What is left and has no room there is lost, and that is logged.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self.join(timeout_s)
        self.stop()
        with self._changed:
            self._changed.notify_all()
        self.join(self._client.patience_s)
        self._save()
        if self._messages:
            log.error("hub %s could not be told everything: %s", self._client.url, self._fates())

    def _fates(self) -> str:
        """What becomes of the messages that are left."""
        kept = sum(isinstance(message, Path) for message in self._messages)
        groups = sum(isinstance(message, _Post) for message in self._messages)
        fates = (
            (kept, f"groups wait in {self._spool.folder} for the next worker of this name"),
            (groups, "groups are lost"),
            (len(self._messages) - kept - groups, "reports are lost"),
        )
        return ", ".join(f"{count} {fate}" for count, fate in fates if count)

    def _put(self, message: _Message) -> None:
        with self._changed:
            self._messages.append(message)
            self._changed.notify_all()

    def _loop(self) -> None:
        while not self.stopping.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._messages or self._closing or self.stopping.is_set())
                if not self._messages:
                    return
                waiting = list(self._messages)
            sent = self._sent(waiting)
            if sent:
                for _ in range(sent):
                    self._messages.popleft()
            else:
                self._save()
                self.stopping.wait(self._random.uniform(0.1, LONGEST_PAUSE_S))

    def _sent(self, waiting: list[_Message]) -> int:
        """Send the first of what waits, and where that is a group those behind it too; how many were sent."""
        first = waiting[0]
        try:
            if isinstance(first, Path):
                kept = self._spool.read(first)
                if kept is not None:
                    self._hand_in(kept[0], [kept[1]])
            elif isinstance(first, _Post):
                return self._hand_in_together(first.worker_id, _together(waiting))
            else:
                first()
        except HubUnavailable as error:
            self._client.warn(error)
            return 0
        except UserError as error:
            log.error("%s", error)
        if isinstance(first, Path):
            self._spool.forget(first)
        return 1

    def _hand_in_together(self, worker_id: str, groups: list[GroupRollouts]) -> int:
        """How many of the groups are settled: all, or the first where the hub refuses them together."""
        if len(groups) > 1:
            try:
                self._hand_in(worker_id, groups)
                return len(groups)
            except HubUnavailable:
                raise
            except UserError as error:
                log.info("%d groups go one at a time: %s", len(groups), error)
        self._hand_in(worker_id, groups[:1])
        return 1

    def _hand_in(self, worker_id: str, groups: list[GroupRollouts]) -> None:
        for group, verdict in zip(groups, self._client.post(worker_id, groups), strict=True):
            if isinstance(verdict, UserError):
                log.error("%s", verdict)
            elif verdict in UNWANTED:
                self._unwanted.append((group.group_id, group.attempt))

    def _save(self) -> None:
        """Have all groups that wait on the disk instead of in memory; where it has no room they stay here."""
        try:
            for place, message in enumerate(list(self._messages)):
                if isinstance(message, _Post):
                    self._messages[place] = self._spool.keep(message.worker_id, message.group)
        except OSError as error:
            if not self._disk_failed:
                log.error("groups cannot be kept in %s (%s): they stay in memory", self._spool.folder, error)
            self._disk_failed = True


def _together(waiting: list[_Message]) -> list[GroupRollouts]:
    """The first group of those that wait, and those behind it that can be handed in with it."""
    groups: list[GroupRollouts] = []
    tokens, worker_id = 0, None
    for message in waiting[:MOST_GROUPS]:
        if not isinstance(message, _Post) or message.worker_id != (worker_id or message.worker_id):
            break
        tokens += sum(len(rollout.token_ids) for rollout in message.group.rollouts)
        if groups and tokens > MOST_TOKENS:
            break
        worker_id = message.worker_id
        groups.append(message.group)
    return groups
