"""What a worker does with frames: it keeps its chunks, forwards its stripe, asks for what it misses and answers who asks.

Invariants: a chunk is checked before it is forwarded, so that whoever handed over a wrong one is the culprit; what is handed to
the application is whole and right; an older snapshot is never handed over after a newer one; the oldest transfer under way is
finished, then the newest is next.
"""

from __future__ import annotations

import json
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from echo2.dissemination.broadcast.buffers import Buffers
from echo2.dissemination.broadcast.cipher import ChunkCipher, ChunkRefused
from echo2.dissemination.broadcast.link import ANSWERS_WAITING, Link
from echo2.dissemination.broadcast.reception import SOURCE, Reception, Rooms, chunks_of
from echo2.dissemination.broadcast.relay import Credit, Relay, laggards
from echo2.dissemination.broadcast.wire import Frame, Kind, pack_bits, pack_credit, unpack_bits, unpack_json, unpack_numbers
from echo2.dissemination.manifest import Manifest, parse_manifest, signing_key, verify

PROGRESS_S = 0.25
ALONE_S = 2.0
"""A worker whose source is away for so long asks the others for everything that it misses."""
EARLY_CHUNKS = 64
"""Chunks that may wait for their announcement, which comes another way."""
OVER_S = 30.0
"""What honest workers had still to forward of a broadcast when the source withdrew it is with the others within this time, even
if one of them stalls meanwhile."""
KEPT_WITHDRAWALS = 64
STALE_CHUNKS = 8
"""Chunks of broadcasts that are over, until their sender is named."""
KEPT_REPORTS = 16
"""Reports that wait while the source is away."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A snapshot that arrived whole; `fetch_s` from its announcement to its last byte."""

    manifest: Manifest
    payload: memoryview
    fetch_s: float


class Outlook(Enum):
    """What is known of a payload that has not arrived."""

    COMING = auto()
    """It is under way."""
    OVERTAKEN = auto()
    """What is broadcast now was made with it or after it, so that it will not come by itself."""
    OPEN = auto()
    """It was not announced, but may be."""


class Exchange:
    """The receptions of one worker; lives in the thread of its links."""

    def __init__(
        self,
        run_id: str,
        token: str,
        links: Mapping[int, Link],
        buffers: Buffers,
        on_delivery: Callable[[Delivery], None],
        on_distrust: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        """`links` are the other workers' by number; `on_distrust` is called with who handed over a wrong chunk; `clock` is that
        by which others are late."""
        self._run_id, self._token = run_id, token
        self._links = links
        self._buffers = buffers
        self._on_delivery, self._on_distrust, self._clock = on_delivery, on_distrust, clock
        self._receptions: dict[int, Reception] = {}
        self._rooms = Rooms()
        self._early: list[tuple[Link, Frame]] = []
        self._targets: dict[tuple[int, int], tuple[int, ...]] = {}
        self._over: dict[int, float] = {}
        self._stale: dict[int, int] = {}
        self._progress_s = self._source_lost_s = 0.0
        self._handed_over = -1
        self._reports: deque[tuple[int, bytes]] = deque(maxlen=KEPT_REPORTS)
        self._latest: tuple[int, Manifest] | None = None
        self.relay = Relay(links, self._credit, buffers.give, clock)
        self.source: Link | None = None
        """The connection to the source while there is one."""
        self.others: set[int] = set()
        """Numbers of all other workers that take part."""
        self.names: dict[int, str] = {SOURCE: "source"}
        """Of everybody who takes part, or did."""
        self.received_bytes = 0
        """What arrived and was new."""
        self.duplicate_bytes = 0
        """What arrived and was here already."""

    def outlook(self, manifest: Manifest) -> Outlook:
        """Whether this payload is to be waited for; may be called from any thread."""
        if any(reception.manifest.payload_digest == manifest.payload_digest for reception in list(self._receptions.values())):
            return Outlook.COMING
        latest = self._latest
        overtaken = latest is not None and latest[1].created_unix_s >= manifest.created_unix_s
        return Outlook.OVERTAKEN if overtaken else Outlook.OPEN

    def source_frame(self, link: Link, frame: Frame) -> bool:
        """Take a frame from the source; whether its body is kept. Raises SnapshotError for another run's manifest."""
        match frame.kind:
            case Kind.ANNOUNCE:
                self._announce(frame)
            case Kind.CHUNK | Kind.STRIPE:
                return self._chunk(link, frame)
            case Kind.FORWARD:
                self._targets[frame.broadcast, frame.chunk] = unpack_numbers(frame.body)
            case Kind.MISSED:
                self._missed(frame)
            case Kind.LACK:
                self._lack(link, frame)
            case Kind.WITHDRAWN:
                self._withdrawn(frame.broadcast)
        return False

    def peer_frame(self, link: Link, frame: Frame) -> bool:
        """Take a frame from another worker; whether its body is kept."""
        match frame.kind:
            case Kind.CHUNK:
                return self._chunk(link, frame)
            case Kind.ASK:
                self._answer(link, frame)
            case Kind.LACK:
                self._lack(link, frame)
        return False

    def tick(self) -> None:
        """Look after what is late; to be called some ten times a second."""
        now_s = self._clock()
        links = [*self._links.values(), *([self.source] if self.source else [])]
        heard = [link.peer for link in links if link.adapt()]
        for link in laggards(self._links.values()):
            link.detach()
        tell = now_s - self._progress_s >= PROGRESS_S
        if tell:
            self._progress_s = now_s
        for broadcast, reception in self._receptions.items():
            if reception.complete:
                continue
            for number in heard:
                reception.catch_up.heard(number, now_s)
            for number in reception.catch_up.overdue(now_s):
                self._report("stalled", number, broadcast, "sent nothing of what it was asked for")
            if self.source is None and now_s - self._source_lost_s > ALONE_S:
                reception.catch_up.want(reception.all & ~reception.have)
            self._ask(broadcast, reception)
            if tell:
                self._tell_progress(broadcast, reception)

    def source_found(self, link: Link) -> None:
        """There is a connection to the source: it is told what could not be said meanwhile."""
        self.source = link
        while self._reports:
            broadcast, body = self._reports.popleft()
            link.send(Kind.REPORT, broadcast, body=body)

    def link_lost(self, link: Link) -> None:
        """A connection is gone: what it was asked for is asked from others."""
        if link is self.source:
            self.source = None
        for broadcast, reception in self._receptions.items():
            reception.catch_up.gone(link.peer)
            if not reception.complete:
                self._ask(broadcast, reception)
        if link.peer == SOURCE:
            self._source_lost_s = self._clock()
        else:
            self._report("unlinked", link.peer, max(self._receptions, default=0), "the connection broke")

    def _announce(self, frame: Frame) -> None:
        fields = unpack_json(frame.body)
        manifest = parse_manifest(json.dumps(fields["manifest"]))
        verify(manifest, signing_key(self._token), self._run_id)
        if frame.broadcast not in self._receptions:
            self._begin(frame.broadcast, manifest, ChunkCipher(manifest, self._token, bytes.fromhex(fields["salt"])))
        if self._latest is None or frame.broadcast > self._latest[0]:
            self._latest = frame.broadcast, manifest
        reception = self._receptions.get(frame.broadcast)
        if reception is not None and reception.complete:
            self._hand_over(frame.broadcast, reception)
        elif reception is not None:
            self._tell_progress(frame.broadcast, reception)
        early, self._early = self._early, []
        for link, waiting in early:
            if not link.closed and not self._chunk(link, waiting):
                self._buffers.give(waiting.body)

    def _begin(self, broadcast: int, manifest: Manifest, cipher: ChunkCipher) -> None:
        """With what is here already, where a source that came back broadcasts a payload again."""
        for former, reception in self._receptions.items():
            if reception.manifest.chunk_digests == manifest.chunk_digests:
                self._receptions[broadcast] = reception.under(manifest, cipher)
                del self._receptions[former]
                break
        else:
            self._receptions[broadcast] = Reception(manifest, cipher, self._rooms.take(manifest.total_bytes))
        self._forget()

    def _forget(self) -> None:
        """Keep the newest two that are complete, and of the others the oldest and the newest."""
        unfinished = sorted(number for number, reception in self._receptions.items() if not reception.complete)
        complete = sorted(number for number, reception in self._receptions.items() if reception.complete)
        overtaken = [number for number in unfinished if complete and number < complete[-1]]
        for number in {*unfinished[1:-1], *complete[:-2], *overtaken}:
            self._drop(number)
        self._targets = {key: targets for key, targets in self._targets.items() if key[0] in self._receptions}

    def _withdrawn(self, broadcast: int) -> None:
        self._drop(broadcast)
        self._over.setdefault(broadcast, self._clock())
        if len(self._over) > KEPT_WITHDRAWALS:
            del self._over[min(self._over)]

    def _drop(self, broadcast: int) -> None:
        reception = self._receptions.pop(broadcast, None)
        if reception is not None:
            self._rooms.give(reception.payload)

    def _chunk(self, link: Link, frame: Frame) -> bool:
        reception = self._receptions.get(frame.broadcast)
        if reception is None:
            return self._without_reception(link, frame)
        if frame.chunk >= reception.manifest.chunk_count:
            self._distrust(link, frame, "there is no such chunk")
            return False
        try:
            fresh = reception.accept(frame.chunk, frame.body)
        except ChunkRefused as refusal:
            self._distrust(link, frame, str(refusal))
            return False
        if fresh:
            self.received_bytes += len(frame.body)
            reception.catch_up.got(frame.chunk, self._clock())
        if not fresh:
            self.duplicate_bytes += len(frame.body)
        elif reception.complete:
            self._hand_over(frame.broadcast, reception)
        elif reception.catch_up.wanted:
            self._ask(frame.broadcast, reception)
        if frame.kind is not Kind.STRIPE:
            return False
        targets = self._targets.pop((frame.broadcast, frame.chunk), self.others)
        self.relay.forward(frame.broadcast, frame.chunk, frame.body, targets)
        return True

    def _without_reception(self, link: Link, frame: Frame) -> bool:
        """A chunk that came before its announcement waits for it; whether it does."""
        if frame.broadcast > max(self._receptions, default=0) and len(self._early) < EARLY_CHUNKS:
            self._early.append((link, frame))
            return True
        if frame.kind is Kind.STRIPE:
            link.send(Kind.LACK, frame.broadcast, body=pack_bits(1 << frame.chunk))
        if self._clock() - self._over.get(frame.broadcast, math.inf) <= OVER_S:
            return False
        self._stale[link.peer] = self._stale.get(link.peer, 0) + 1
        if self._stale[link.peer] == STALE_CHUNKS:
            self._report("replayed", link.peer, frame.broadcast, "sends chunks of a broadcast that is over")
        return False

    def _distrust(self, link: Link, frame: Frame, reason: str) -> None:
        self._report("corrupt", link.peer, frame.broadcast, f"chunk {frame.chunk}: {reason}")
        self._on_distrust(link.peer)
        link.close()

    def _hand_over(self, broadcast: int, reception: Reception) -> None:
        if broadcast > self._handed_over:
            self._handed_over = broadcast
            self._on_delivery(
                Delivery(reception.manifest, reception.payload.toreadonly(), time.monotonic() - reception.begun_s)
            )
        self._tell_done(broadcast, reception)
        self._forget()

    def _tell_done(self, broadcast: int, reception: Reception) -> None:
        if self.source is not None:
            self.source.send(Kind.DONE, broadcast, body=array("f", reception.arrivals_s).tobytes())

    def _tell_progress(self, broadcast: int, reception: Reception) -> None:
        if self.source is not None:
            self.source.send(Kind.PROGRESS, broadcast, body=pack_bits(reception.have))

    def _credit(self, credit: Credit) -> None:
        if self.source is not None:
            body = pack_credit(credit.service_s, credit.skipped)
            self.source.send(Kind.CREDIT, credit.broadcast, credit.chunk, body)

    def _report(self, kind: str, culprit: int, broadcast: int, detail: str) -> None:
        name = self.names.get(culprit, str(culprit))
        body = json.dumps({"kind": kind, "culprit": culprit, "name": name, "detail": detail}).encode()
        if self.source is not None:
            self.source.send(Kind.REPORT, broadcast, body=body)
        elif kind != "unlinked":
            self._reports.append((broadcast, body))

    def _missed(self, frame: Frame) -> None:
        reception = self._receptions.get(frame.broadcast)
        if reception is not None and not reception.complete:
            if frame.chunk != SOURCE:
                reception.catch_up.pass_over(frame.chunk, self._clock())
            reception.catch_up.want(unpack_bits(frame.body) & reception.all & ~reception.have)
            self._ask(frame.broadcast, reception)

    def _lack(self, link: Link, frame: Frame) -> None:
        reception = self._receptions.get(frame.broadcast)
        if reception is not None and not reception.complete:
            reception.catch_up.lacks(link.peer, list(chunks_of(unpack_bits(frame.body) & reception.all)))
            self._ask(frame.broadcast, reception)

    def _ask(self, broadcast: int, reception: Reception) -> None:
        if not reception.catch_up.wanted:
            return
        asks = reception.catch_up.asks(list(self._links), self.source is not None, self._clock())
        for number, chunks in asks.items():
            link = self.source if number == SOURCE else self._links.get(number)
            if link is not None:
                link.send(Kind.ASK, broadcast, body=pack_bits(sum(1 << chunk for chunk in chunks)))

    def _answer(self, link: Link, frame: Frame) -> None:
        reception = self._receptions.get(frame.broadcast)
        asked = unpack_bits(frame.body)
        here = asked & reception.have if reception is not None else 0
        lacking = asked & ~here
        for chunk in chunks_of(here):
            if reception is None or link.queued_chunks >= ANSWERS_WAITING:
                lacking |= 1 << chunk
            else:
                link.send(Kind.CHUNK, frame.broadcast, chunk, reception.seal(chunk), asked=True)
        if lacking:
            link.send(Kind.LACK, frame.broadcast, body=pack_bits(lacking))
