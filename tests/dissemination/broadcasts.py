"""A source and workers on loopback, for tests of the broadcast."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from patience import wait_until

from echo2.dissemination.broadcast.peer import Peer
from echo2.dissemination.broadcast.source import Source
from echo2.dissemination.manifest import Manifest, describe, sign, signing_key
from echo2.dissemination.pacing import Pacer

RUN_ID = "run-a"
TOKEN = "secret"
CHUNK_BYTES = 32 * 1024
MB = 1_000_000

WORKER = """
import hashlib, sys
from echo2.dissemination.broadcast.peer import Peer
peer = Peer("run-a", "secret", sys.argv[1], ("127.0.0.1", int(sys.argv[2])), host="127.0.0.1")
peer.start()
while True:
    delivery = peer.wait(60)
    print(delivery.manifest.version, hashlib.sha256(delivery.payload).hexdigest(), flush=True)
"""


def snapshot(version: int, total_bytes: int) -> tuple[Manifest, bytes]:
    payload = random.Random(version).randbytes(total_bytes)
    return sign(describe(payload, RUN_ID, version, CHUNK_BYTES), signing_key(TOKEN)), payload


def spoil(peer: Peer, change: Callable[..., None]) -> None:
    """Let a worker forward something else: `change(honest, broadcast, chunk, body, targets)` is called in its place."""
    relay = peer._exchange.relay
    honest = relay.forward
    relay.forward = lambda *arguments: change(honest, *arguments)


def flip_a_bit(honest: Callable[..., None], broadcast: int, chunk: int, body: memoryview, targets: object) -> None:
    wrong = bytearray(body)
    wrong[len(wrong) // 2] ^= 1
    honest(broadcast, chunk, memoryview(wrong), targets)


@dataclass
class Fleet:
    source: Source
    pacer: Pacer | None = None
    peers: list[Peer] = field(default_factory=list)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def add(self, name: str, **options: object) -> Peer:
        peer = Peer(RUN_ID, TOKEN, name, self.source.address, host="127.0.0.1", **options)
        peer.start()
        self.peers.append(peer)
        return peer

    def add_process(self, name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WORKER, name, str(self.source.address[1])]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def wait_connected(self) -> None:
        count = len(self.peers) + len(self.processes)
        wait_until(lambda: len(self.source.workers) == count and all(peer.peers >= count - 1 for peer in self.peers))

    def kinds(self, culprit: str) -> set[str]:
        return {event.kind for event in self.source.events if event.culprit == culprit}


@contextmanager
def fleet(workers: int, uplink_bytes_per_s: float = 0.0) -> Iterator[Fleet]:
    """A source, with a cap or without, and this many workers, w0 and on, all connected to each other."""
    pacer = Pacer(uplink_bytes_per_s) if uplink_bytes_per_s else None
    source = Source(RUN_ID, TOKEN, host="127.0.0.1", pacer=pacer)
    source.start()
    started = Fleet(source, pacer)
    try:
        for number in range(workers):
            started.add(f"w{number}")
        started.wait_connected()
        yield started
    finally:
        for process in started.processes:
            process.kill()
            process.wait()
        for peer in started.peers:
            peer.stop()
        source.stop()
