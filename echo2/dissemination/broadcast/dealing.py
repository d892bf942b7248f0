"""The source's side of one broadcast: deals the chunks, sees that everybody gets them, and names who hinders it.

Invariants: everything a worker lacks is on its way to it or the worker has been told to ask for it; an owner that forwards
nothing for `STALL_S` is passed over, and one that does not receive at once; whoever is passed over costs time, never a chunk.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_

from echo2.dissemination.broadcast.cipher import ChunkCipher
from echo2.dissemination.broadcast.gathering import Gathering
from echo2.dissemination.broadcast.plan import HORIZON_S, Deal, Dealer, Origin, Receiver, fluid_bound_s
from echo2.dissemination.broadcast.progress import Progress
from echo2.dissemination.broadcast.reception import SOURCE, bits_of, chunks_of
from echo2.dissemination.broadcast.record import Arrival, BroadcastEvent, BroadcastRecord
from echo2.dissemination.broadcast.standing import Worker
from echo2.dissemination.broadcast.uplink import Uplink
from echo2.dissemination.broadcast.wire import Frame, Kind, pack_bits, pack_json, pack_numbers, unpack_bits, unpack_credit
from echo2.dissemination.manifest import Manifest

STALL_S = 1.5
"""An owner that returns no credit for the stripes that it got for so long is passed over."""
SILENT_S = 1.5
"""An owner of which a worker got no chunk for so long, while some are due, is one that the worker waits for no longer."""
FAREWELL_S = 0.25
"""What a worker that left had still in its sockets arrives within this time."""
SETTLE_S = 0.5
"""What owners were forwarding when a worker joined is with the others, or with the worker itself, within this time."""
LATENCY_S = 0.2
"""From a deal to the return of its credit, beyond the forwarding itself: there, acknowledged, noticed and back."""
QUEUED_CHUNKS = 2
"""Stripes that may wait on the connection to one owner."""
DEALS_AT_ONCE = 16
WITHHELD_CHUNKS = 2


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
        clock: Callable[[], float],
    ) -> None:
        """`workers` are those connected, by number; it changes as they come and go, with `joined` and `left`; by `clock` it is
        judged who is late."""
        self.number, self.manifest = number, manifest
        self._payload = payload
        self._cipher = ChunkCipher(manifest, token, salt)
        self._announcement = pack_json({"manifest": manifest.model_dump(mode="json"), "salt": salt.hex()})
        self._workers, self._uplink = workers, uplink
        self._on_event, self._call_later, self._clock = on_event, call_later, clock
        self._dealer = Dealer(
            manifest.chunk_count, manifest.chunk_bytes, len(workers), uplink.bytes_per_s, LATENCY_S, HORIZON_S + LATENCY_S
        )
        self._progress: dict[int, Progress] = {}
        self._dealt_s: list[float] = []
        self._owned: dict[int, int] = {}
        self._credited = self._ahead = 0
        self._all = (1 << manifest.chunk_count) - 1
        self._stalled: set[int] = set()
        self._gathering = Gathering(call_later, self._repair)
        self._pumping = False
        self._started_unix_s, self._started_s = time.time(), time.monotonic()
        self._arrivals: dict[int, Arrival] = {}
        for worker in workers.values():
            self.joined(worker, known=True)

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

    def joined(self, worker: Worker, known: bool = False) -> None:
        """Tell a worker of this broadcast; what was dealt before is for it to ask for.

        It may have some of it, from another source or before a break, so it is sent nothing before it has told, unless it is
        `known` to have nothing.
        """
        number = worker.member.number
        on_probation = worker.standing.on_probation
        self._progress[number] = Progress(known=known, reported_s=self._clock(), on_probation=on_probation)
        self._dealer.receivers = len(self._workers)
        worker.link.send(Kind.ANNOUNCE, self.number, body=self._announcement)
        worker.standing.announced()
        dealt = (1 << self._dealer.dealt) - 1
        under_way = dealt & ~self._credited & reduce(or_, self._owned.values(), 0)
        self._miss(number, dealt & ~under_way)
        self._call_later(SETTLE_S, lambda: self._miss(number, under_way))
        service_s = self._forwarded_bytes / worker.uplink_bytes_per_s if worker.uplink_bytes_per_s else None
        if worker.relays(service_s) and len(self._workers) > 1:
            self._dealer.add_owner(number, service_s)

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

    def withdrawn(self) -> None:
        """Nobody waits for anything of this broadcast any longer."""
        for number, worker in self._workers.items():
            self._dealer.remove_owner(number)
            worker.standing.forget(self.number)
            worker.link.send(Kind.WITHDRAWN, self.number)

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
        if number not in self._progress:
            return
        service_s, skipped = unpack_credit(frame.body)
        in_vain = self._reached_nobody(number, skipped)
        worker.standing.returned(self.number, chunk, served=not in_vain)
        if in_vain:
            self._pass_over(worker)
            self._accuse(worker, "could pass on to nobody")
        elif self._dealer.credit(number, chunk, service_s):
            if self.all_dealt and not self._dealer.backlog(number):
                worker.standing.served()
        elif number in self._stalled:
            self._stalled.remove(number)
            self._dealer.add_owner(number, service_s)
        self._credited |= self._owned.get(number, 0) & 1 << chunk
        for left_out in skipped:
            self._miss(left_out, 1 << chunk)
        self.pump()

    def declined(self, worker: Worker, frame: Frame) -> None:
        """A worker has given this broadcast up, with what it was to forward."""
        for chunk in chunks_of(unpack_bits(frame.body) & self._all):
            worker.standing.returned(self.number, chunk, served=False)
            if self._dealer.credit(worker.member.number, chunk, None):
                self._miss_everybody(1 << chunk, worker.member.number)
        self.pump()

    def progress(self, worker: Worker, frame: Frame) -> None:
        """A worker tells what it has."""
        progress = self._progress.get(worker.member.number)
        if progress is None:
            return
        fresh = unpack_bits(frame.body) & self._all & ~progress.have
        self._learn(progress, fresh)
        worker.standing.told(everything=False)
        progress.report(self._clock(), SILENT_S)
        for owner, bits in self._owned.items():
            if fresh & bits:
                progress.heard_s[owner] = self._clock()

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
        progress = self._progress.get(number)
        if progress is None:
            return
        self._learn(progress, self._all)
        self._keep_uplink(worker)
        if number not in self._arrivals:
            bytes_per_s = self.manifest.total_bytes / done_s
            self._arrivals[number] = Arrival(worker.member.name, done_s, bytes_per_s, tuple(arrivals_s))
            worker.standing.told(everything=True)
            progress.report(self._clock(), SILENT_S)
            if progress.on_probation and progress.prompt:
                worker.standing.received()

    def asked(self, worker: Worker, frame: Frame) -> None:
        """A worker asks the source."""
        self._gathering.ask(worker.member.number, chunks_of(unpack_bits(frame.body) & self._all))

    def distrust(self, number: int) -> None:
        """Deal nothing more to this worker."""
        self._stalled.discard(number)
        self._dealer.remove_owner(number)

    def unlinked(self, reporter: int, other: int) -> None:
        """The connection between two workers broke, and with it what was in it."""
        self._miss(reporter, self._owned.get(other, 0))

    def tick(self) -> None:
        """Look after what is late; to be called some ten times a second."""
        self._dealer.source_bytes_per_s = self._uplink.bytes_per_s
        for number in self._present:
            self._check_stall(number, self._workers[number])
        patience_s = max(SILENT_S, 4 * self._dealer.longest_threshold_s)
        for number in self._progress.keys() - self._arrivals.keys():
            self._check_silence(number, self._progress[number].reported_s - patience_s)
        self.pump()

    def record(self, sent_bytes: int) -> BroadcastRecord:
        """What happened so far."""
        source = Origin(self._uplink.bytes_per_s)
        uplinks = [worker.uplink_bytes_per_s or 0.0 for worker in self._workers.values()]
        receivers = [Receiver(uplink_bytes_per_s, float("inf")) for uplink_bytes_per_s in uplinks]
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
            self._dealt_s.append(self._clock())
        if passed:
            self._miss_everybody(passed)

    def _carry_out(self, deal: Deal) -> None:
        sealed = self._cipher.seal(deal.chunk, self._payload)
        self._dealt_s.append(self._clock())
        if deal.owner is not None:
            self._give(deal.owner, deal.chunk, sealed)
            return
        for number in self._present:
            self._send(number, Kind.CHUNK, deal.chunk, sealed)

    def _give(self, owner: int, chunk: int, sealed: bytes) -> None:
        self._owned[owner] = self._owned.get(owner, 0) | 1 << chunk
        self._send(owner, Kind.STRIPE, chunk, sealed)

    def _send(self, number: int, kind: Kind, chunk: int, sealed: bytes) -> None:
        worker = self._workers[number]
        link = worker.link
        if kind is Kind.CHUNK and (link.detached or not self._progress[number].known):
            self._miss(number, 1 << chunk)
            return

        def done(sent: bool) -> None:
            if not sent:
                self._miss(number, 1 << chunk)
            if kind is Kind.STRIPE and chunk in self._dealer.backlog(number) and not link.closed:
                if sent:
                    worker.standing.took(self.number, chunk)
                else:
                    self._pass_over(worker)

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

    def _repair(self, chunk: int, asked_by: set[int]) -> None:
        """The source answers; of several who ask for one chunk, one gets it for the others too."""
        askers = asked_by & self._workers.keys()
        if not askers:
            return
        sealed = self._cipher.seal(chunk, self._payload)
        owner = self._dealer.deal_again(chunk, askers) if len(askers) > 2 else None
        if owner is None:
            for number in askers:
                self._workers[number].link.send(Kind.CHUNK, self.number, chunk, sealed, asked=True)
            return
        others = pack_numbers(askers - {owner})
        self._workers[owner].link.send(Kind.FORWARD, self.number, chunk, others)
        self._give(owner, chunk, sealed)

    def _check_stall(self, number: int, worker: Worker) -> None:
        patience_s = max(STALL_S, 3 * self._dealer.threshold_s(number))
        if self._dealer.backlog(number) and worker.standing.quiet_s > patience_s:
            self._pass_over(worker)
            self._accuse(worker, f"forwarded nothing for {patience_s:.1f} s")
        elif number in self._stalled - self._arrivals.keys() and worker.standing.silent_s > patience_s:
            self._accuse(worker, f"said nothing for {patience_s:.1f} s")

    def _pass_over(self, worker: Worker) -> None:
        """Nobody waits for anything that this worker has to forward, here or in the next broadcasts."""
        number = worker.member.number
        backlog = self._dealer.remove_owner(number)
        self._stalled.add(number)
        worker.standing.suspend()
        self._miss_everybody(bits_of(backlog), number)

    def _accuse(self, worker: Worker, detail: str) -> None:
        if worker.standing.accuse():
            self._event("stalled", worker, "source", detail)

    def _reached_nobody(self, owner: int, skipped: tuple[int, ...]) -> bool:
        """Whether an owner could forward to none of the others though some of them are there."""
        others = {number for number in self._present if number != owner}
        if not others or not others <= set(skipped):
            return False
        return any(self._workers[number].standing.in_reach for number in others - self._arrivals.keys())

    def _check_silence(self, number: int, before_s: float) -> None:
        """Tell a worker what it said to have not got that was dealt before this time; if it hears all others and did not stand
        still, the owner that says to have sent it is to blame, and nobody waits for anything that it was to forward."""
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
            heard = self._workers[number].standing.in_reach
            if heard and claimed >= WITHHELD_CHUNKS and 2 * len(silent) < len(self._owned):
                self._dealer.remove_owner(owner)
                self._miss_everybody(self._owned[owner], owner)
                detail = f"{claimed} chunks that it says to have forwarded did not come"
                self._event("withheld", self._workers[owner], self._workers[number].member.name, detail)

    def _event(self, kind: str, culprit: Worker, reporter: str, detail: str) -> None:
        self._on_event(BroadcastEvent(kind, culprit.member.name, reporter, self.manifest.version, detail))

    def _keep_uplink(self, worker: Worker) -> None:
        service_s = self._dealer.service_s.get(worker.member.number)
        if service_s:
            worker.uplink_bytes_per_s = self._forwarded_bytes / service_s
