"""The learner's end of the broadcast: workers connect to it, and it brings each snapshot to all of them.

Invariants: a broadcast that has begun is dealt to its end, then the newest is next, whatever was handed in between; a worker
that joins or comes back gets the roster, what is under way and what it missed of it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from echo2.dissemination.broadcast.buffers import Buffers
from echo2.dissemination.broadcast.cipher import fresh_salt
from echo2.dissemination.broadcast.dealing import Dealing
from echo2.dissemination.broadcast.link import Acknowledgements, Link
from echo2.dissemination.broadcast.loop_thread import LoopThread
from echo2.dissemination.broadcast.peer import Member
from echo2.dissemination.broadcast.reception import SOURCE
from echo2.dissemination.broadcast.record import BroadcastEvent, BroadcastRecord
from echo2.dissemination.broadcast.relay import laggards
from echo2.dissemination.broadcast.standing import Standing, Worker
from echo2.dissemination.broadcast.uplink import Uplink
from echo2.dissemination.broadcast.wire import (
    Frame,
    Kind,
    WireError,
    accept,
    connection_key,
    dial,
    parse_json,
    worker_number,
)
from echo2.dissemination.manifest import Manifest
from echo2.dissemination.pacing import Allowance, Pacer
from echo2.errors import WaitTimeout
from echo2.listening import listen_on

log = logging.getLogger(__name__)
PROBE_S = 2.0
KEPT_BROADCASTS = 3
KEPT_EVENTS = 1000
REFUSED_S, MOST_REFUSED = 60.0, 20
"""Seconds in which a stranger's address is told once, and how many addresses are."""


class Broadcast:
    """A snapshot on its way; may be used from any thread."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._ended = threading.Event()
        self._record: BroadcastRecord | None = None
        self._waiting_for: list[str] = []

    @property
    def record(self) -> BroadcastRecord | None:
        """What happened so far; None before it began."""
        return self._record

    @property
    def ended(self) -> bool:
        """Whether every connected worker has it, or a newer one took its place."""
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> BroadcastRecord | None:
        """The record, once every connected worker has the snapshot; None if a newer one took its place before it began.

        Raises WaitTimeout, naming who was waited for.
        """
        if not self._ended.wait(timeout_s):
            names = ", ".join(self._waiting_for) or "workers to connect"
            raise WaitTimeout(f"version {self.manifest.version} was not everywhere within {timeout_s:g} s: waiting for {names}")
        return self._record

    def update(self, record: BroadcastRecord | None, waiting_for: list[str], ended: bool) -> None:
        self._record, self._waiting_for = record, waiting_for
        if ended:
            self._ended.set()


class Source(LoopThread):
    """Serves snapshots to the run's workers; `broadcast`, `workers`, `events`, `remove` and `stop` are for any thread."""

    def __init__(
        self,
        run_id: str,
        token: str,
        *,
        host: str = "0.0.0.0",
        port: int = 0,
        pacer: Pacer | None = None,
        on_event: Callable[[BroadcastEvent], None] = lambda event: None,
    ) -> None:
        """Listens from now on; `pacer` caps what is sent. `on_event` is called in the source's thread.
        Raises OSError if the port cannot be had."""
        super().__init__("broadcast-source")
        self._token = token
        self._key = connection_key(token, run_id)
        self._listener = listen_on(host, port)
        self._allowance = Allowance(pacer, self._loop.call_later, self._resume) if pacer else None
        self._uplink = Uplink(pacer.bytes_per_s if pacer else None)
        self._workers: dict[int, Worker] = {}
        self._names: dict[int, str] = {}
        self._standings: dict[int, Standing] = {}
        self._buffers, self._acknowledgements = Buffers(), Acknowledgements()
        self._dealings: dict[int, tuple[Dealing, Broadcast, int]] = {}
        self._next: tuple[Broadcast, memoryview] | None = None
        self._last_number = 0
        self._lost_bytes = 0
        self._on_event = on_event
        self._refused_s: dict[str, float] = {}
        self.events: deque[BroadcastEvent] = deque(maxlen=KEPT_EVENTS)
        """What was done to broadcasts, and by whom; the newest last."""

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def workers(self) -> tuple[Member, ...]:
        """Who is connected."""
        return tuple(worker.member for worker in list(self._workers.values()))

    def broadcast(self, manifest: Manifest, payload: bytes | bytearray | memoryview) -> Broadcast:
        """Bring a signed snapshot to every worker, present and to come; `payload` must stay as it is (a mapped file will do).

        While one broadcast is being dealt the next one waits; a newer one takes the place of one that waits.
        """
        broadcast = Broadcast(manifest)
        self._loop.call_soon_threadsafe(self._queue, broadcast, memoryview(payload))
        return broadcast

    def remove(self, name: str) -> None:
        """Close the connection to a worker."""
        self._loop.call_soon_threadsafe(self._remove, name)

    def opened(self) -> None:
        self._listener.setblocking(False)
        self.spawn(self._listen())

    def closing(self) -> None:
        for worker in list(self._workers.values()):
            worker.link.close()
        self._listener.close()

    def _queue(self, broadcast: Broadcast, payload: memoryview) -> None:
        if self._next is not None:
            self._next[0].update(None, [], ended=True)
        self._next = broadcast, payload
        self._begin_next()

    def _begin_next(self) -> None:
        if not self._workers and self._next is not None:
            for number in [number for number, (dealing, _, _) in self._dealings.items() if not dealing.all_dealt]:
                self._withdraw(number)
        if self._next is None or any(not dealing.all_dealt for dealing, _, _ in self._dealings.values()):
            return
        (broadcast, payload), self._next = self._next, None
        self._last_number = max(self._last_number + 1, time.time_ns())
        dealing = Dealing(
            self._last_number,
            broadcast.manifest,
            payload,
            self._token,
            fresh_salt(),
            self._workers,
            self._uplink,
            self._tell,
            self._loop.call_later,
            self._attention.now_s,
        )
        self._dealings[dealing.number] = dealing, broadcast, self._sent_bytes()
        for number in sorted(self._dealings)[:-KEPT_BROADCASTS]:
            self._withdraw(number)
        dealing.pump()
        self._update(*self._dealings[dealing.number])

    def _withdraw(self, number: int) -> None:
        dealing, broadcast, sent_before = self._dealings.pop(number)
        broadcast.update(dealing.record(self._sent_bytes() - sent_before), [], ended=True)
        dealing.withdrawn()

    def tick(self) -> None:
        busy = any(worker.link.queued_chunks for worker in self._workers.values())
        self._uplink.observe(self._sent_bytes(), busy)
        self._detach_laggards()
        for dealing, broadcast, sent_before in list(self._dealings.values()):
            if not broadcast.ended:
                dealing.tick()
                self._update(dealing, broadcast, sent_before)
        self._begin_next()

    def _detach_laggards(self) -> None:
        links = [worker.link for worker in self._workers.values()]
        for link in links:
            link.adapt()
        late = laggards(links)
        # If nobody takes anything, it is this end that is cut off.
        if len(late) < len(links):
            for link in late:
                link.detach()

    def _update(self, dealing: Dealing, broadcast: Broadcast, sent_before: int) -> None:
        broadcast.update(dealing.record(self._sent_bytes() - sent_before), dealing.waiting_for, dealing.finished)

    def _sent_bytes(self) -> int:
        return self._lost_bytes + sum(worker.link.sent_bytes for worker in self._workers.values())

    def _tell(self, event: BroadcastEvent) -> None:
        level = logging.INFO if event.ordinary else logging.WARNING
        log.log(level, "broadcast: %s (%s): %s, says %s", event.culprit, event.kind, event.detail, event.reporter)
        self.events.append(event)
        self._on_event(event)

    async def _listen(self) -> None:
        while True:
            connection, address = await self._loop.sock_accept(self._listener)
            self.spawn(self._accept(connection, address), str(address[0]))

    def _refuse(self, address: str, reason: str) -> None:
        """Tell of a stranger, once for a while: whoever can connect could fill the record else."""
        now_s = time.monotonic()
        self._refused_s = {known: told_s for known, told_s in self._refused_s.items() if now_s - told_s < REFUSED_S}
        if address not in self._refused_s and len(self._refused_s) < MOST_REFUSED:
            self._refused_s[address] = now_s
            self._tell(BroadcastEvent("refused", address, "source", None, reason))

    async def _accept(self, connection: socket.socket, address: tuple[Any, ...]) -> None:
        try:
            hello = await accept(connection, self._key, lambda hello: {})
            name, port = str(hello["name"]), int(hello["port"])
            number, host = self._number_of(name), str(hello.get("host") or address[0])
            reachable = port > 0 and await self._probe(number, host, port)
        except (WireError, OSError, KeyError, TypeError, ValueError) as error:
            connection.close()
            self._refuse(str(address[0]), str(error) or "time-out")
            return
        except BaseException:
            connection.close()
            raise
        self._join(Member(number, name, host, port, reachable), connection)

    def _number_of(self, name: str) -> int:
        number = worker_number(name)
        while self._names.setdefault(number, name) != name:
            number += 1
        return number

    async def _probe(self, number: int, host: str, port: int) -> bool:
        """Whether a worker can be reached from outside."""
        try:
            async with asyncio.timeout(PROBE_S):
                connection, answer = await dial(host, port, self._key, {"number": SOURCE})
        except (WireError, OSError):
            return False
        connection.close()
        return bool(answer.get("number") == number)

    def _join(self, member: Member, connection: socket.socket) -> None:
        former = self._workers.get(member.number)
        if former is not None:
            former.link.close()
            self._lost(former.link)
        link = Link(
            connection,
            member.number,
            f"worker {member.name}",
            buffers=self._buffers,
            acknowledgements=self._acknowledgements,
            on_frame=self._frame,
            on_closed=self._lost,
            allowance=self._allowance,
            on_written=self._pump,
            clock=self._attention.now_s,
        )
        worker = Worker(member, link, self._standings.setdefault(member.number, Standing(self._attention.now_s)))
        worker.standing.reconnected()
        if former is not None:
            worker.uplink_bytes_per_s, worker.distrusted = former.uplink_bytes_per_s, former.distrusted
        self._workers[member.number] = worker
        try:
            self._welcome(worker)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other workers are to go on
            link.fail(error)

    def _welcome(self, worker: Worker) -> None:
        self._send_roster()
        for dealing, broadcast, _ in self._latest():
            if not dealing.finished or broadcast is self._latest()[-1][1]:
                dealing.joined(worker)
                dealing.pump()

    def _latest(self) -> list[tuple[Dealing, Broadcast, int]]:
        return [self._dealings[number] for number in sorted(self._dealings)]

    def _resume(self) -> None:
        """The cap allows the links to send again."""
        links = [worker.link for worker in self._workers.values()]
        random.shuffle(links)
        for link in links:
            link.resume()

    def _pump(self) -> None:
        for dealing, broadcast, _ in list(self._dealings.values()):
            if not broadcast.ended and not dealing.all_dealt:
                dealing.pump()

    def _send_roster(self) -> None:
        members = [asdict(worker.member) for worker in self._workers.values()]
        for number, worker in list(self._workers.items()):
            worker.link.send(Kind.ROSTER, 0, body=json.dumps({"you": number, "members": members}).encode())

    def _lost(self, link: Link) -> None:
        worker = self._workers.get(link.peer)
        if worker is None or worker.link is not link:
            return
        del self._workers[link.peer]
        self._lost_bytes += link.sent_bytes
        self._tell(BroadcastEvent("left", worker.member.name, "source", None, "the connection is closed"))
        self._send_roster()
        for dealing, _, _ in list(self._dealings.values()):
            dealing.left(worker)

    def _remove(self, name: str) -> None:
        for worker in list(self._workers.values()):
            if worker.member.name == name:
                worker.link.close()

    def _frame(self, link: Link, frame: Frame) -> bool:
        worker = self._workers.get(link.peer)
        if worker is None or worker.link is not link:
            return False
        try:
            self._take(worker, frame)
        except (ArithmeticError, KeyError, TypeError, ValueError, struct.error) as error:
            self._tell(BroadcastEvent("malformed", worker.member.name, "source", None, f"{frame.kind.name}: {error}"))
            link.close()
        return False

    def _take(self, worker: Worker, frame: Frame) -> None:
        if frame.kind is Kind.REPORT:
            self._reported(worker, frame)
        elif frame.broadcast in self._dealings:
            dealing, broadcast, sent_before = self._dealings[frame.broadcast]
            self._dealing_frame(dealing, worker, frame)
            if frame.kind is Kind.DONE and not broadcast.ended:
                self._update(dealing, broadcast, sent_before)
        elif frame.kind is Kind.ASK:
            worker.link.send(Kind.WITHDRAWN, frame.broadcast)

    def _dealing_frame(self, dealing: Dealing, worker: Worker, frame: Frame) -> None:
        match frame.kind:
            case Kind.CREDIT:
                dealing.credit(worker, frame)
            case Kind.PROGRESS:
                dealing.progress(worker, frame)
            case Kind.DONE:
                dealing.done(worker, frame)
            case Kind.LACK:
                dealing.declined(worker, frame)
            case Kind.ASK:
                dealing.asked(worker, frame)

    def _reported(self, reporter: Worker, frame: Frame) -> None:
        """A worker accuses another one: at the worst an honest one serves no more, which costs time."""
        fields = parse_json(frame.body)
        kind, number = str(fields["kind"]), int(fields["culprit"])
        culprit = self._workers.get(number)
        dealing = self._dealings.get(frame.broadcast)
        version = dealing[0].manifest.version if dealing else None
        name = culprit.member.name if culprit else str(fields["name"])
        if kind == "corrupt" and culprit is not None:
            culprit.distrusted = True
            for other, _, _ in self._dealings.values():
                other.distrust(number)
        elif kind == "unlinked" and dealing is not None:
            dealing[0].unlinked(reporter.member.number, number)
        if kind != "unlinked" or culprit is not None:
            self._tell(BroadcastEvent(kind, name, reporter.member.name, version, str(fields["detail"])))
