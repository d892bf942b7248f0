"""One standing connection: frames out of queues into the socket, and out of the socket into reused buffers.

Invariants: a frame's body goes from the socket straight into the buffer that it is used from, and from its sender's buffer
straight into the socket; frames of control pass waiting frames of data, never one that has begun; every frame's `done` is
called once, whatever happens to the connection; that a connection is closed is told later, never to somebody who is sending; an
error that nobody expected ends its connection and no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
import socket
import struct
import termios
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from echo2.dissemination.broadcast.buffers import Buffers
from echo2.dissemination.broadcast.wire import DATA, HEADER, MAX_CONTROL_BYTES, Frame, Kind, WireError
from echo2.dissemination.pacing import Allowance

log = logging.getLogger(__name__)
UNSENT_S = 0.04
"""What the kernel may hold of a connection's bytes beyond its congestion window, in seconds of the rate it was seen to have: so
that what counts as sent has left, and a slow link does not seem fast."""
LEAST_UNSENT_BYTES = 16 * 1024
MOST_UNSENT_BYTES = 256 * 1024
WAKE_BYTES = 65536
"""A reader is woken for so many bytes, or for all that its frame lacks."""
SETTLE_S = 0.02
"""How often acknowledgements are looked for."""
FIRST_DETACH_S = 1.0
LONGEST_DETACH_S = 16.0
RELAPSE_S = 5.0
ANSWERS_WAITING = 64
"""Chunks that may wait on one connection for somebody who asked."""
HEARD_BYTES = 4 * 1024
MIN_ROUND_TRIP_AT = 148
"""Where the kernel's `tcp_info` has the shortest round trip, in microseconds."""
WRITE_BUDGET_BYTES = 1024 * 1024
READ_BUDGET_BYTES = 512 * 1024
"""What one connection may take before the others have their turn."""


@dataclass(slots=True, eq=False)
class Outgoing:
    """A frame on its way out; `done` is called once, with whether the other end's system has all of it."""

    views: list[memoryview]
    done: Callable[[bool], None] | None
    queued_s: float
    asked: bool
    left_over: bool = False

    def finish(self, sent: bool) -> None:
        done, self.done = self.done, None
        if done is not None:
            done(sent)


class Acknowledgements:
    """Looks now and then for what other ends acknowledged, on all of a thread's links at once: a timer for each would cost more
    than to send."""

    def __init__(self) -> None:
        self._waiting: set[Link] = set()

    def expect(self, link: Link) -> None:
        """Call `link.settle` until nothing is unacknowledged there; from the thread of the links."""
        if not self._waiting:
            asyncio.get_running_loop().call_later(SETTLE_S, self._look)
        self._waiting.add(link)

    def _look(self) -> None:
        waiting, self._waiting = self._waiting, set()
        for link in waiting:
            try:
                if link.settle():
                    self.expect(link)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other connections are to go on
                link.fail(error)


class Link:
    """One proved connection in an event loop; every method and callback runs in the loop's thread."""

    def __init__(
        self,
        connection: socket.socket,
        peer: int,
        name: str,
        *,
        buffers: Buffers,
        acknowledgements: Acknowledgements,
        on_frame: Callable[[Link, Frame], bool],
        on_closed: Callable[[Link], None],
        allowance: Allowance | None = None,
        on_written: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`peer` is the other end's number, `name` what it is called; chunks are read into `buffers`, and `on_frame` says
        whether it keeps the body; `allowance` is that of an uplink with a cap: where it refuses, it has `resume` called later;
        `on_written` is called when a chunk is wholly in the socket; by `clock` it is told how long the other end lets wait."""
        self.peer, self._name = peer, name
        self._clock = clock
        self._detached_until_s = -math.inf
        self._detach_s = FIRST_DETACH_S
        self.sent_bytes = 0
        self.received_bytes = 0
        self._socket = connection
        self._buffers, self._acknowledgements = buffers, acknowledgements
        self._on_frame, self._on_closed, self._allowance = on_frame, on_closed, allowance
        self._loop = asyncio.get_running_loop()
        self._on_written = on_written
        self._unacknowledged: deque[tuple[int, Outgoing]] = deque()
        self._control: deque[Outgoing] = deque()
        self._data: deque[Outgoing] = deque()
        self._current: Outgoing | None = None
        self._current_is_data = False
        self._waiting = self._closed = False
        self._header = memoryview(bytearray(HEADER.size))
        self._incoming: tuple[Kind, int, int] | None = None
        self._target = self._rest = self._header
        self._wake_bytes = 1
        self._unsent_bytes = 0
        self._adapted_s, self._adapted_bytes, self._adapted_received_bytes = time.monotonic(), 0, 0
        self._moved_s, self._moved_bytes = clock(), 0
        self._allow_unsent(LEAST_UNSENT_BYTES)
        self._loop.add_reader(connection.fileno(), self._readable)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def detached(self) -> bool:
        """Whether chunks are not to be sent unasked for now: for a while after `detach`, and until what was left then has gone
        out."""
        oldest = self._current if self._current_is_data else next(iter(self._data), None)
        return (oldest is not None and oldest.left_over) or self._clock() < self._detached_until_s

    @property
    def queued_chunks(self) -> int:
        """Data frames not wholly in the socket."""
        return len(self._data) + self._current_is_data

    @property
    def waiting_s(self) -> float:
        """Seconds that the oldest data frame has waited to be acknowledged; 0 for none."""
        current = [self._current] if self._current_is_data and self._current else []
        frames = [*(frame for _, frame in self._unacknowledged), *current, *self._data]
        oldest_s = next((frame.queued_s for frame in frames if frame.done is not None), None)
        return self._clock() - oldest_s if oldest_s is not None else 0.0

    @property
    def stuck_s(self) -> float:
        """Seconds that the other end's system has acknowledged nothing of what is on its way to it, as of the last `adapt`."""
        return self._clock() - self._moved_s

    @property
    def round_trip_s(self) -> float:
        """The shortest round trip seen on this connection; 0 once it is closed."""
        if self._closed:
            return 0.0
        told = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, MIN_ROUND_TRIP_AT + 4)
        return float(struct.unpack_from("I", told, MIN_ROUND_TRIP_AT)[0]) / 1e6

    def send(
        self,
        kind: Kind,
        broadcast: int,
        chunk: int = 0,
        body: bytes | bytearray | memoryview = b"",
        done: Callable[[bool], None] | None = None,
        asked: bool = False,
    ) -> None:
        """Queue a frame; `body` must stay as it is until `done`. On a closed link the frame is dropped at once.

        One that was `asked` for outlives `detach`, which calls its `done` all the same; it is dropped beyond `ANSWERS_WAITING`.
        """
        header = memoryview(HEADER.pack(kind, chunk, len(body), broadcast))
        outgoing = Outgoing([header, memoryview(body)] if len(body) else [header], done, self._clock(), asked)
        if self._closed or (asked and self.queued_chunks >= ANSWERS_WAITING):
            outgoing.finish(False)
            return
        (self._data if kind in DATA else self._control).append(outgoing)
        if not self._waiting:
            self._writable()

    def detach(self) -> None:
        """This link is too slow: give up the data frames that nobody asked for, and send none unasked for a while, longer each
        time.

        A frame that has begun is counted as not sent but still goes out whole.
        """
        now_s = self._clock()
        relapsed = now_s < self._detached_until_s + RELAPSE_S
        self._detach_s = min(2 * self._detach_s, LONGEST_DETACH_S) if relapsed else FIRST_DETACH_S
        self._detached_until_s = now_s + self._detach_s
        current = [self._current] if self._current is not None and self._current_is_data else []
        late = [*(frame for _, frame in self._unacknowledged), *current, *self._data]
        self._data = deque(frame for frame in self._data if frame.asked)
        for outgoing in late:
            outgoing.left_over = True
            outgoing.finish(False)

    def adapt(self) -> bool:
        """Fit what the kernel may hold to the rate since the last call; whether much was received since then.

        To be called some ten times a second.
        """
        now_s = time.monotonic()
        sent_bytes, elapsed_s = self.sent_bytes - self._adapted_bytes, now_s - self._adapted_s
        self._adapted_s, self._adapted_bytes = now_s, self.sent_bytes
        if self.queued_chunks and sent_bytes and elapsed_s > 0 and not self._closed:
            wanted = int(sent_bytes / elapsed_s * UNSENT_S)
            self._allow_unsent(min(max(wanted, LEAST_UNSENT_BYTES), MOST_UNSENT_BYTES))
        self._look_for_movement()
        received_bytes, self._adapted_received_bytes = self.received_bytes - self._adapted_received_bytes, self.received_bytes
        return received_bytes >= HEARD_BYTES

    def _look_for_movement(self) -> None:
        under_way_bytes = 0 if self._closed else self._unacknowledged_bytes()
        if not under_way_bytes or self.sent_bytes - under_way_bytes > self._moved_bytes:
            self._moved_s, self._moved_bytes = self._clock(), self.sent_bytes - under_way_bytes

    def _unacknowledged_bytes(self) -> int:
        return int(struct.unpack("i", fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)))[0])

    def _allow_unsent(self, count: int) -> None:
        if abs(count - self._unsent_bytes) > self._unsent_bytes // 4:
            self._unsent_bytes = count
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, count)

    def resume(self) -> None:
        """Go on sending after a refusal."""
        if not self._closed and not self._waiting:
            self._writable()

    def settle(self) -> bool:
        """Tell of the frames that the other end has acknowledged; whether there are others."""
        if self._closed:
            return False
        acknowledged = self.sent_bytes - self._unacknowledged_bytes()
        while self._unacknowledged and self._unacknowledged[0][0] <= acknowledged:
            self._unacknowledged.popleft()[1].finish(True)
        return bool(self._unacknowledged)

    def fail(self, error: Exception) -> None:
        """Something went wrong on this connection that nobody expected: say so, and close it."""
        log.error("the connection with %s ends, since an error was met that nobody expected", self._name, exc_info=error)
        self.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        if self._incoming is not None and self._incoming[0] in DATA:
            self._buffers.give(self._target)
        lost = [self._current] if self._current else []
        for outgoing in (*(frame for _, frame in self._unacknowledged), *lost, *self._control, *self._data):
            outgoing.finish(False)
        self._unacknowledged.clear()
        self._control.clear()
        self._data.clear()
        self._loop.call_soon(self._on_closed, self)

    def _writable(self) -> None:
        try:
            self._send_waiting()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other connections are to go on
            self.fail(error)

    def _send_waiting(self) -> None:
        budget = WRITE_BUDGET_BYTES
        while budget > 0 and not self._closed:
            if self._current is None and not self._begin_next():
                self._wait_writable(False)
                return
            assert self._current is not None
            wanted = sum(len(view) for view in self._current.views)
            allowed = wanted if self._allowance is None or not self._current_is_data else self._allowance.take(wanted)
            if allowed == 0:
                self._wait_writable(False)
                return
            if not self._write(self._current, wanted, allowed):
                self._wait_writable(True)
                return
            budget -= allowed
        self._wait_writable(not self._closed)

    def _begin_next(self) -> bool:
        queue = self._control or self._data
        if not queue:
            return False
        self._current_is_data = queue is self._data
        self._current = queue.popleft()
        return True

    def _write(self, outgoing: Outgoing, wanted: int, allowed: int) -> bool:
        """Whether the socket took all that it was allowed to."""
        paced = self._allowance if self._current_is_data else None
        sent = 0
        try:
            sent = self._socket.send(outgoing.views[0][:allowed]) if allowed < wanted else self._socket.sendmsg(outgoing.views)
        except BlockingIOError:
            return False
        except OSError:
            self.close()
            return False
        finally:
            if paced is not None:
                paced.give_back(allowed - sent)
        self.sent_bytes += sent
        rest = sent
        while outgoing.views and rest >= len(outgoing.views[0]):
            rest -= len(outgoing.views.pop(0))
        if outgoing.views:
            outgoing.views[0] = outgoing.views[0][rest:]
            return sent == allowed
        was_data, self._current, self._current_is_data = self._current_is_data, None, False
        if outgoing.done is not None:
            self._unacknowledged.append((self.sent_bytes, outgoing))
            self._acknowledgements.expect(self)
        if was_data:
            self._on_written()
        return True

    def _wait_writable(self, wait: bool) -> None:
        if wait == self._waiting or self._closed:
            return
        self._waiting = wait
        if wait:
            self._loop.add_writer(self._socket.fileno(), self._writable)
        else:
            self._loop.remove_writer(self._socket.fileno())

    def _readable(self) -> None:
        try:
            self._receive()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other connections are to go on
            self.fail(error)

    def _receive(self) -> None:
        end_bytes = self.received_bytes + READ_BUDGET_BYTES
        while not self._closed and self.received_bytes < end_bytes:
            try:
                got = self._socket.recv_into(self._rest)
            except BlockingIOError:
                break
            except OSError:
                got = 0
            if not got:
                self.close()
                return
            self.received_bytes += got
            self._rest = self._rest[got:]
            if self._rest:
                break
            try:
                self._take()
            except WireError:
                self.close()
        self._wake_at(min(WAKE_BYTES, len(self._rest)))

    def _take(self) -> None:
        """What was being read is whole: go on to the body, or hand the frame over."""
        if self._incoming is None:
            number, chunk, length, broadcast = HEADER.unpack(self._header)
            try:
                kind = Kind(number)
            except ValueError:
                raise WireError(f"frame of unknown kind {number}") from None
            self._incoming = (kind, broadcast, chunk)
            if length > MAX_CONTROL_BYTES:
                raise WireError(f"frame of {length} bytes")
            self._target = self._buffers.take(length) if kind in DATA else memoryview(bytearray(length))
            self._rest = self._target
            if length:
                return
        kind, broadcast, chunk = self._incoming
        frame = Frame(kind, broadcast, chunk, self._target)
        self._incoming, self._target, self._rest = None, self._header, self._header
        if not self._on_frame(self, frame) and kind in DATA:
            self._buffers.give(frame.body)

    def _wake_at(self, wanted: int) -> None:
        if wanted != self._wake_bytes and not self._closed:
            self._wake_bytes = wanted
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, max(wanted, 1))
