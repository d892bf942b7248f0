"""A worker's end of the broadcast: connections to the source and to the other workers, in a thread of their own.

Invariants: nobody takes part who has not proved to hold this run's token; between two workers there is one connection; a
connection that breaks is dialled again, with growing pauses; a worker that nobody can connect to receives over connections that
it dialled itself.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from echo2.dissemination.broadcast.buffers import Buffers
from echo2.dissemination.broadcast.exchange import Delivery, Exchange, Outlook
from echo2.dissemination.broadcast.link import Acknowledgements, Link
from echo2.dissemination.broadcast.loop_thread import LoopThread
from echo2.dissemination.broadcast.reception import SOURCE
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
from echo2.errors import SnapshotError, WaitTimeout
from echo2.listening import listen_on

log = logging.getLogger(__name__)
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
DISTRUST_S = 60.0
KEPT_DELIVERIES = 2


@dataclass(frozen=True, slots=True)
class Member:
    """A worker that takes part, as the source tells the others."""

    number: int
    name: str
    host: str
    port: int
    reachable: bool


class Peer(LoopThread):
    """One worker in the broadcast: receives every snapshot, serves its stripe and whoever asks.

    `take`, `wait` and `stop` may be called from any thread.
    """

    def __init__(
        self,
        run_id: str,
        token: str,
        name: str,
        source: tuple[str, int],
        *,
        host: str = "0.0.0.0",
        port: int = 0,
        advertised_host: str = "",
        serving: bool = True,
    ) -> None:
        """`host` and `port` are listened on unless not `serving`; the source tells the others `advertised_host`, or the
        address that it sees. Raises OSError if the port cannot be had."""
        super().__init__("broadcast-peer")
        self._key = connection_key(token, run_id)
        self._name = name
        self._source_address = source
        self._advertised_host = advertised_host
        self._listener = listen_on(host, port) if serving else None
        self._links: dict[int, Link] = {}
        self._members: dict[int, Member] = {}
        self._number = worker_number(name)
        self._listed = False
        self._source_lost = asyncio.Event()
        self._dialling: set[int] = set()
        self._distrusted: dict[int, float] = {}
        self._buffers, self._acknowledgements = Buffers(), Acknowledgements()
        self._exchange = Exchange(
            run_id, token, self._links, self._buffers, self._deliver, self._distrust, self._attention.now_s
        )
        self._changed = threading.Condition()
        self._deliveries: deque[Delivery] = deque(maxlen=KEPT_DELIVERIES)
        self._taken = True
        self.last_error: str | None = None
        """Why the source could not be reached or used at the last try."""

    @property
    def connected(self) -> bool:
        """Whether the source is there and has told what it is about."""
        return self._listed

    @property
    def peers(self) -> int:
        """Other workers that this one is connected to."""
        return len(self._links)

    @property
    def forwarded_bytes(self) -> int:
        return self._exchange.relay.forwarded_bytes

    @property
    def received_bytes(self) -> int:
        """What arrived and was new."""
        return self._exchange.received_bytes

    @property
    def duplicate_bytes(self) -> int:
        """What arrived and was here already."""
        return self._exchange.duplicate_bytes

    def take(self) -> Delivery | None:
        """The newest snapshot that arrived since the last call, if any. Raises the error that ended the thread."""
        with self._changed:
            self.raise_if_failed()
            taken, self._taken = self._taken, True
            return None if taken else self._deliveries[-1]

    def wait(self, timeout_s: float) -> Delivery:
        """`take`, but waits for a snapshot. Raises WaitTimeout after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._error is not None, timeout_s)
        delivery = self.take()
        if delivery is None:
            reason = f": {self.last_error}" if self.last_error else ""
            raise WaitTimeout(f"no snapshot arrived at worker {self._name} within {timeout_s:g} s{reason}")
        return delivery

    def delivered(self, manifest: Manifest) -> Delivery | None:
        """This payload, if it is among the newest that arrived."""
        with self._changed:
            return next((one for one in self._deliveries if one.manifest.payload_digest == manifest.payload_digest), None)

    def outlook(self, manifest: Manifest) -> Outlook:
        """Whether this payload, which was not delivered, is to be waited for."""
        return self._exchange.outlook(manifest)

    def failed(self, error: BaseException) -> None:
        super().failed(error)
        with self._changed:
            self._changed.notify_all()

    def opened(self) -> None:
        if self._listener is not None:
            self._listener.setblocking(False)
            self.spawn(self._listen(self._listener))
        self.spawn(self._stay_connected())

    def tick(self) -> None:
        self._exchange.tick()

    def closing(self) -> None:
        source = self._exchange.source
        for link in [*self._links.values(), *([source] if source else [])]:
            link.close()
        if self._listener is not None:
            self._listener.close()

    async def _stay_connected(self) -> None:
        """Keep a connection to the source as long as there is a source."""
        failures = 0
        while True:
            port = self._listener.getsockname()[1] if self._listener else 0
            hello = {"name": self._name, "host": self._advertised_host, "port": port}
            try:
                connection, _ = await dial(*self._source_address, self._key, hello)
            except (WireError, OSError) as error:
                failures += 1
                self.last_error = f"broadcast source {self._source_address[0]}:{self._source_address[1]}: {error or 'time-out'}"
                await _pause(failures)
                continue
            failures, self.last_error = 0, None
            self._source_lost.clear()
            self._exchange.source_found(self._link(connection, SOURCE, self._from_source, self._lost_source))
            await self._source_lost.wait()
            await _pause(1)

    def _lost_source(self, link: Link) -> None:
        self._listed = False
        self._exchange.link_lost(link)
        self._source_lost.set()

    def _from_source(self, link: Link, frame: Frame) -> bool:
        if frame.kind is Kind.ROSTER:
            roster = parse_json(frame.body)
            self._number, self._listed = roster["you"], True
            self._members = {fields["number"]: Member(**fields) for fields in roster["members"]}
            self._exchange.others = set(self._members) - {self._number}
            self._exchange.names |= {number: member.name for number, member in self._members.items()}
            self._dial_members()
            return False
        try:
            return self._exchange.source_frame(link, frame)
        except SnapshotError as error:
            self.last_error = str(error)
            log.error("%s", error)
            return False

    def _dial_members(self) -> None:
        """Of two that can be reached the greater number dials; one that cannot be reached dials everybody who can."""
        mine = self._members.get(self._number)
        for number, member in self._members.items():
            mine_to_dial = mine is not None and member.reachable and (not mine.reachable or number < mine.number)
            if mine_to_dial and number not in self._links and number not in self._dialling:
                self._dialling.add(number)
                self.spawn(self._dial(number), f"worker {member.name}")

    async def _dial(self, number: int) -> None:
        failures = 0
        try:
            while (member := self._members.get(number)) is not None and member.reachable and number not in self._links:
                if not self._distrusts(number):
                    try:
                        connection, answer = await dial(member.host, member.port, self._key, {"number": self._number})
                    except (WireError, OSError) as error:
                        log.info("worker %s cannot be reached: %s", member.name, error or "time-out")
                    else:
                        if answer.get("number") == number:
                            self._join(connection, number)
                            return
                        connection.close()
                failures += 1
                await _pause(failures)
        finally:
            self._dialling.discard(number)

    async def _listen(self, listener: socket.socket) -> None:
        while True:
            connection, address = await self._loop.sock_accept(listener)
            self.spawn(self._accept(connection), str(address[0]))

    async def _accept(self, connection: socket.socket) -> None:
        try:
            hello = await accept(connection, self._key, self._greeting)
        except (WireError, OSError) as error:
            log.warning("a connection was refused: %s", error or "time-out")
            connection.close()
            return
        except BaseException:
            connection.close()
            raise
        number = hello.get("number")
        if not isinstance(number, int) or number in (SOURCE, self._number) or self._distrusts(number):
            connection.close()
        else:
            self._join(connection, number)

    def _greeting(self, hello: dict[str, Any]) -> dict[str, Any]:
        """What somebody gets to hear who connects: nothing where it is not wanted, so that it tries less and less often."""
        return {} if self._distrusts(hello.get("number")) else {"number": self._number}

    def _join(self, connection: socket.socket, number: int) -> None:
        former = self._links.get(number)
        if former is not None:
            former.close()
            self._lost_peer(former)
        self._links[number] = self._link(connection, number, self._exchange.peer_frame, self._lost_peer)

    def _link(
        self,
        connection: socket.socket,
        number: int,
        on_frame: Callable[[Link, Frame], bool],
        on_closed: Callable[[Link], None],
    ) -> Link:
        return Link(
            connection,
            number,
            self._exchange.names.get(number, f"worker {number}"),
            buffers=self._buffers,
            acknowledgements=self._acknowledgements,
            on_frame=on_frame,
            on_closed=on_closed,
            clock=self._attention.now_s,
        )

    def _lost_peer(self, link: Link) -> None:
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
            self._exchange.link_lost(link)
            self._loop.call_later(FIRST_PAUSE_S, self._dial_members)

    def _distrusts(self, number: object) -> bool:
        return isinstance(number, int) and self._distrusted.get(number, 0.0) > time.monotonic()

    def _distrust(self, number: int) -> None:
        self._distrusted[number] = time.monotonic() + DISTRUST_S

    def _deliver(self, delivery: Delivery) -> None:
        with self._changed:
            self._deliveries.append(delivery)
            self._taken = False
            self._changed.notify_all()


async def _pause(failures: int) -> None:
    longest_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures, 16))
    await asyncio.sleep(longest_s * random.uniform(0.5, 1.0))
