"""The source's side of one broadcast: deals the chunks, sees that everybody gets them, and names who hinders it.

Invariants: everything a worker lacks is on its way to it or the worker has been told to ask for it; an owner that forwards
nothing for `STALL_S` is passed over; whoever is passed over costs time, never a chunk.
"""

from __future__ import annotations

import struct
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_

from echo2.dissemination.broadcast.cipher import ChunkCipher
from echo2.dissemination.broadcast.link import Link
from echo2.dissemination.broadcast.peer import Member
from echo2.dissemination.broadcast.plan import HORIZON_S, Deal, Dealer, Origin, Receiver, fluid_bound_s
from echo2.dissemination.broadcast.progress import Progress
from echo2.dissemination.broadcast.reception import SOURCE, bits_of, chunks_of
from echo2.dissemination.broadcast.record import Arrival, BroadcastEvent, BroadcastRecord
from echo2.dissemination.broadcast.relay import laggards
from echo2.dissemination.broadcast.wire import Frame, Kind, pack_bits, pack_json, pack_numbers, unpack_bits, unpack_numbers
from echo2.dissemination.manifest import Manifest

STALL_S = 1.5
"""An owner with a backlog that returns no credit for so long is passed over."""
SILENT_S = 1.5
"""An owner of which a worker got no chunk for so long, while some are due, is one that the worker waits for no longer."""
FAREWELL_S = 0.25
"""What a worker that left had still in its sockets arrives within this time."""
SETTLE_S = 0.5
"""What owners were forwarding when a worker joined is with the others, or with the worker itself, within this time."""
GATHER_S = 0.05
"""Several workers that ask for one chunk within this time get it from one of them."""
LATENCY_S = 0.2
"""From a deal to the return of its credit, beyond the forwarding itself: there, acknowledged, noticed and back."""
QUEUED_CHUNKS = 2
"""Stripes that may wait on the connection to one owner."""
DEALS_AT_ONCE = 16
LONGEST_SERVICE_S = 3600.0
WITHHELD_CHUNKS = 2
SERVICE = struct.Struct("!d")


@dataclass(slots=True)
class Worker:
    """A connected worker as the source knows it; outlives broadcasts."""

    member: Member
    link: Link
    uplink_bytes_per_s: float | None = None
    distrusted: bool = False


@dataclass(slots=True)
class Uplink:
    """What the source's uplink was seen to carry, or the cap on it."""

    bytes_per_s: float
    known: bool
    """Whether that is a cap or was seen; else it is a first guess."""


class Dealing:
    """One broadcast under way; lives in the thread of the links."""

    def __init__(
        self,
        number: int,
        manifest: Manifest,
        payload: memoryview,
        token: str,
        salt: bytes,
        workers: Mapping[int, Worker],
        uplink: Uplink,
        on_event: Callable[[BroadcastEvent], None],
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        """`workers` are those connected, by number; it changes as they come and go, with `joined` and `left`."""
        self.number, self.manifest = number, manifest
        self._payload = payload
        self._cipher = ChunkCipher(manifest, token, salt)
        self._announcement = pack_json({"manifest": manifest.model_dump(mode="json"), "salt": salt.hex()})
        self._workers, self._uplink = workers, uplink
        self._on_event, self._call_later = on_event, call_later
        self._dealer = Dealer(
            manifest.chunk_count, manifest.chunk_bytes, len(workers), uplink.bytes_per_s, LATENCY_S, HORIZON_S + LATENCY_S
        )
        self._progress: dict[int, Progress] = {}
        self._dealt_s: list[float] = []
        self._owned: dict[int, int] = {}
        self._credited = 0
        self._ahead = 0
        self._all = (1 << manifest.chunk_count) - 1
        self._stalled: set[int] = set()
        self._asked: dict[int, set[int]] = {}
        self._pumping = False
        self._started_unix_s, self._started_s = time.time(), time.monotonic()
        self._arrivals: dict[int, Arrival] = {}
        for worker in workers.values():
            self._join(worker, known=True)

    @property
    def all_dealt(self) -> bool:
        return self._dealer.dealt == self.manifest.chunk_count

    @property
    def finished(self) -> bool:
        """Whether everybody who is connected has everything, and somebody has."""
        return bool(self._arrivals) and self._workers.keys() <= self._arrivals.keys()

    @property
    def waiting_for(self) -> list[str]:
        """Names of the workers that have not got everything."""
        return sorted(worker.member.name for number, worker in self._workers.items() if number not in self._arrivals)

    def joined(self, worker: Worker) -> None:
        """Tell a worker of this broadcast; what was dealt before is for it to ask for.

        It may have some of it, from another source or before a break, so it is sent nothing before it has told.
        """
        self._join(worker, known=False)

    def _join(self, worker: Worker, known: bool) -> None:
        number = worker.member.number
        self._progress[number] = Progress(known=known)
        self._dealer.receivers = len(self._workers)
        worker.link.send(Kind.ANNOUNCE, self.number, body=self._announcement)
        dealt = (1 << self._dealer.dealt) - 1
        under_way = dealt & ~self._credited & reduce(or_, self._owned.values(), 0)
        self._miss(number, dealt & ~under_way)
        self._call_later(SETTLE_S, lambda: self._miss(number, under_way))
        if worker.member.reachable and not worker.distrusted and len(self._workers) > 1:
            rate = worker.uplink_bytes_per_s
            self._dealer.add_owner(number, self._forwarded_bytes / rate if rate else None)

    def left(self, worker: Worker) -> None:
        """Deal with what a worker owned that is gone; the others ask for what they did not get of it."""
        number = worker.member.number
        self._keep_uplink(worker)
        self._dealer.remove_owner(number)
        self._dealer.receivers = max(1, len(self._workers))
        self._progress.pop(number, None)
        owned = self._owned.pop(number, 0)
        self._call_later(FAREWELL_S, lambda: self._miss_everybody(owned))
        self.pump()

    def pump(self) -> None:
        """Deal as much as is good now."""
        if self._pumping:
            return
        self._pumping = True
        try:
            for _ in range(DEALS_AT_ONCE):
                self._pass_what_is_had()
                deal = self._next_deal()
                if deal is None:
                    return
                self._carry_out(deal)
        finally:
            self._pumping = False
        self._call_later(0.0, self.pump)

    def credit(self, worker: Worker, frame: Frame) -> None:
        """An owner forwarded a chunk."""
        number, chunk = worker.member.number, frame.chunk
        progress = self._progress.get(number)
        if progress is None:
            return
        (service_s,) = SERVICE.unpack(frame.body[: SERVICE.size])
        skipped = unpack_numbers(frame.body[SERVICE.size :])
        known_s = service_s if 0.0 < service_s < LONGEST_SERVICE_S else None
        if self._dealer.credit(number, chunk, known_s):
            progress.quiet_since_s = time.monotonic()
        elif number in self._stalled:
            self._stalled.remove(number)
            self._dealer.add_owner(number, known_s)
        self._credited |= self._owned.get(number, 0) & 1 << chunk
        for left_out in skipped:
            self._miss(left_out, 1 << chunk)
        self.pump()

    def progress(self, worker: Worker, frame: Frame) -> None:
        """A worker tells what it has."""
        progress = self._progress.get(worker.member.number)
        if progress is None:
            return
        fresh = unpack_bits(frame.body) & self._all & ~progress.have
        self._learn(progress, fresh)
        progress.reported_s = time.monotonic()
        for owner, bits in self._owned.items():
            if fresh & bits:
                progress.heard_s[owner] = time.monotonic()

    def _learn(self, progress: Progress, bits: int) -> None:
        """A worker has these; what it has before it was dealt need not be sent to it."""
        first = not progress.known
        progress.known = True
        progress.have |= bits
        self._ahead |= bits >> self._dealer.dealt << self._dealer.dealt
        if first or self._ahead >> self._dealer.dealt:
            self.pump()

    def done(self, worker: Worker, frame: Frame) -> None:
        """A worker has everything."""
        number = worker.member.number
        done_s = time.monotonic() - self._started_s
        arrivals_s = array("f", bytes(frame.body))
        if number not in self._progress:
            return
        self._learn(self._progress[number], self._all)
        arrival = Arrival(worker.member.name, done_s, self.manifest.total_bytes / done_s, tuple(arrivals_s))
        self._arrivals.setdefault(number, arrival)
        self._keep_uplink(worker)

    def asked(self, worker: Worker, frame: Frame) -> None:
        """A worker asks the source; several that ask for the same soon after each other get it from one of them."""
        for chunk in chunks_of(unpack_bits(frame.body) & self._all):
            if chunk not in self._asked:
                self._asked[chunk] = set()
                self._call_later(GATHER_S, lambda chunk=chunk: self._repair(chunk))  # type: ignore[misc]
            self._asked[chunk].add(worker.member.number)

    def distrust(self, number: int) -> None:
        """Deal nothing more to this worker."""
        self._stalled.discard(number)
        self._dealer.remove_owner(number)

    def unlinked(self, reporter: int, other: int) -> None:
        """The connection between two workers broke, and with it what was in it."""
        self._miss(reporter, self._owned.get(other, 0))

    def tick(self) -> None:
        """Look after what is late; to be called some ten times a second."""
        now_s = time.monotonic()
        self._dealer.source_bytes_per_s = self._uplink.bytes_per_s
        for link in laggards([worker.link for worker in self._workers.values()]):
            link.detach()
        for owner in self._dealer.owners:
            self._check_stall(owner, now_s)
        patience_s = max(SILENT_S, 4 * self._dealer.longest_threshold_s)
        for number in self._progress.keys() - self._arrivals.keys():
            self._check_silence(number, self._progress[number].reported_s - patience_s)
        self.pump()

    def record(self, sent_bytes: int) -> BroadcastRecord:
        """What happened so far."""
        uplinks = [worker.uplink_bytes_per_s or 0.0 for worker in self._workers.values()]
        receivers = [Receiver(uplink_bytes_per_s, float("inf")) for uplink_bytes_per_s in uplinks]
        source = Origin(self._uplink.bytes_per_s)
        return BroadcastRecord(
            version=self.manifest.version,
            total_bytes=self.manifest.total_bytes,
            started_unix_s=self._started_unix_s,
            bound_s=fluid_bound_s(self.manifest.total_bytes, source, receivers) if receivers and self._uplink.known else 0.0,
            arrivals=tuple(sorted(self._arrivals.values(), key=lambda arrival: arrival.done_s)),
            sent_bytes=sent_bytes,
            source_uplink_bytes_per_s=self._uplink.bytes_per_s if self._uplink.known else 0.0,
            worker_uplink_bytes_per_s=sum(uplinks) / len(uplinks) if uplinks else 0.0,
        )

    @property
    def _forwarded_bytes(self) -> int:
        return max(1, len(self._workers) - 1) * self.manifest.chunk_bytes

    @property
    def _present(self) -> list[int]:
        """Workers that are connected and were told of this broadcast."""
        return [number for number in self._workers if number in self._progress]

    def _next_deal(self) -> Deal | None:
        known = [number for number in self._present if self._progress[number].known]
        links = {number: self._workers[number].link for number in known if not self._workers[number].link.detached}
        ready = [number for number in self._dealer.owners if number in links and links[number].queued_chunks < QUEUED_CHUNKS]
        idle = all(link.queued_chunks == 0 for link in links.values())
        return self._dealer.deal(idle, ready) if known else None

    def _pass_what_is_had(self) -> None:
        """Deal no chunks that some worker had before: the others ask for them."""
        passed = 0
        while not self.all_dealt and self._ahead >> self._dealer.dealt & 1:
            passed |= 1 << self._dealer.pass_one()
            self._dealt_s.append(time.monotonic())
        if passed:
            self._miss_everybody(passed)

    def _carry_out(self, deal: Deal) -> None:
        sealed = self._cipher.seal(deal.chunk, self._payload)
        self._dealt_s.append(time.monotonic())
        if deal.owner is not None:
            self._give(deal.owner, deal.chunk, sealed)
            return
        for number in self._present:
            self._send(number, Kind.CHUNK, deal.chunk, sealed)

    def _give(self, owner: int, chunk: int, sealed: bytes) -> None:
        if len(self._dealer.backlog(owner)) == 1:
            self._progress[owner].quiet_since_s = time.monotonic()
        self._owned[owner] = self._owned.get(owner, 0) | 1 << chunk
        self._send(owner, Kind.STRIPE, chunk, sealed)

    def _send(self, number: int, kind: Kind, chunk: int, sealed: bytes) -> None:
        link = self._workers[number].link
        if kind is Kind.CHUNK and (link.detached or not self._progress[number].known):
            self._miss(number, 1 << chunk)
            return

        def done(sent: bool) -> None:
            if not sent:
                self._miss(number, 1 << chunk)

        link.send(kind, self.number, chunk, sealed, done)

    def _miss(self, number: int, bits: int, passed_over: int = SOURCE) -> None:
        """Tell a worker that nobody will send it these unasked; it does not ask the worker that is passed over."""
        worker, progress = self._workers.get(number), self._progress.get(number)
        if worker is None or progress is None or not bits:
            return
        bits &= ~progress.have
        progress.told |= bits
        worker.link.send(Kind.MISSED, self.number, passed_over, pack_bits(bits))

    def _miss_everybody(self, bits: int, passed_over: int = SOURCE) -> None:
        for number in list(self._workers):
            if number != passed_over:
                self._miss(number, bits, passed_over)

    def _repair(self, chunk: int) -> None:
        askers = {number for number in self._asked.pop(chunk) if number in self._workers}
        if not askers:
            return
        sealed = self._cipher.seal(chunk, self._payload)
        owner = self._dealer.deal_again(chunk, askers) if len(askers) > 2 else None
        if owner is None:
            for number in askers:
                self._workers[number].link.send(Kind.CHUNK, self.number, chunk, sealed)
            return
        others = pack_numbers(askers - {owner})
        self._workers[owner].link.send(Kind.FORWARD, self.number, chunk, others)
        self._give(owner, chunk, sealed)

    def _check_stall(self, owner: int, now_s: float) -> None:
        backlog = self._dealer.backlog(owner)
        patience_s = max(STALL_S, 3 * self._dealer.threshold_s(owner))
        if not backlog or now_s - self._progress[owner].quiet_since_s <= patience_s:
            return
        self._dealer.remove_owner(owner)
        self._stalled.add(owner)
        self._event("stalled", owner, "source", f"forwarded nothing for {patience_s:.1f} s")
        self._miss_everybody(bits_of(backlog), owner)

    def _check_silence(self, number: int, before_s: float) -> None:
        """Tell a worker what it said to have not got that was dealt before this time; if it hears all others, the owner that
        says to have sent it is to blame, and nobody waits for anything that it was to forward."""
        progress = self._progress[number]
        due = (1 << bisect_right(self._dealt_s, before_s)) - 1
        due &= ~progress.have & ~progress.told
        silent = {
            owner: bits & due
            for owner, bits in self._owned.items()
            if owner != number and bits & due and progress.heard_s.get(owner, 0.0) < before_s
        }
        for owner, bits in silent.items():
            self._miss(number, bits, owner)
            claimed = (bits & self._credited).bit_count()
            if claimed >= WITHHELD_CHUNKS and 2 * len(silent) < len(self._owned):
                self._dealer.remove_owner(owner)
                self._miss_everybody(self._owned[owner], owner)
                detail = f"{claimed} chunks that it says to have forwarded did not come"
                self._event("withheld", owner, self._workers[number].member.name, detail)

    def _event(self, kind: str, culprit: int, reporter: str, detail: str) -> None:
        worker = self._workers.get(culprit)
        name = worker.member.name if worker else str(culprit)
        self._on_event(BroadcastEvent(kind, name, reporter, self.manifest.version, detail))

    def _keep_uplink(self, worker: Worker) -> None:
        service_s = self._dealer.service_s.get(worker.member.number)
        if service_s:
            worker.uplink_bytes_per_s = self._forwarded_bytes / service_s
