"""One host of the broadcast benchmark: the source, or a worker, driven by lines of JSON on standard input.

`python -m benchmarks.broadcast_node source ADDRESS CAP_BYTES_PER_S` (0: none), or
`python -m benchmarks.broadcast_node worker NUMBER SOURCE_ADDRESS OWN_ADDRESS SERVING`.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
import time
from typing import Any

from echo2.dissemination.broadcast.cipher import ChunkCipher
from echo2.dissemination.broadcast.peer import Peer
from echo2.dissemination.broadcast.reception import Rooms
from echo2.dissemination.broadcast.record import BroadcastRecord, chunk_bytes_after
from echo2.dissemination.broadcast.source import Source
from echo2.dissemination.manifest import describe, sign, signing_key
from echo2.dissemination.pacing import Pacer

RUN_ID = "benchmark"
TOKEN = "a token of the benchmark"
PORT = 7700
PROMPT_S = 600.0


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def source(address: str, cap_bytes_per_s: float) -> None:
    """Lines in: {"version", "bytes"}; out: when the broadcast begins, and its record at the end."""
    server = Source(RUN_ID, TOKEN, host=address, port=PORT, pacer=Pacer(cap_bytes_per_s) if cap_bytes_per_s else None)
    server.start()
    say(ready=True)
    payloads = []
    record: BroadcastRecord | None = None
    for line in sys.stdin:
        command = json.loads(line)
        if "workers" in command:
            while len(server.workers) < command["workers"]:
                time.sleep(0.01)
            say(workers=len(server.workers))
            continue
        payload = os.urandom(command["bytes"])
        payloads.append(payload)
        manifest = sign(
            describe(payload, RUN_ID, command["version"], chunk_bytes_after(record, len(payload))), signing_key(TOKEN)
        )
        say(prepared=True)
        sys.stdin.readline()
        cpu_s, start_s = time.process_time(), time.monotonic()
        broadcast = server.broadcast(manifest, payload)
        record = broadcast.wait(PROMPT_S)
        assert record is not None
        events = [f"{event.kind} {event.culprit}: {event.detail}" for event in server.events]
        server.events.clear()
        say(
            start_s=start_s,
            cpu_s=time.process_time() - cpu_s,
            sent_bytes=record.sent_bytes,
            bound_s=record.bound_s,
            events=events,
        )


class Checks:
    """Processor time that decrypting and checking takes, which a worker would need without relaying too."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self._open_into = ChunkCipher.open_into

    def install(self) -> None:
        def measured(cipher: ChunkCipher, chunk: int, sealed: memoryview, payload: memoryview) -> None:
            start_s = time.thread_time()
            self._open_into(cipher, chunk, sealed, payload)
            self.cpu_s += time.thread_time() - start_s

        ChunkCipher.open_into = measured  # type: ignore[method-assign, assignment]


class Memory:
    """Room for the next snapshots that has been written to before.

    The host of a virtual machine takes back memory that has been free for some seconds; to get it again takes a processor 2 s
    per GB, which would tell of that host, not of a broadcast.
    """

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self._rooms: list[memoryview] = []
        self._take = Rooms.take

    def install(self) -> None:
        def taken(rooms: Rooms, total_bytes: int) -> memoryview:
            return self._rooms.pop() if self._rooms else self._take(rooms, total_bytes)

        Rooms.take = taken  # type: ignore[method-assign, assignment]

    def prepare(self, total_bytes: int) -> None:
        start_s = time.thread_time()
        room = self._take(Rooms(), total_bytes)
        room[:: mmap.PAGESIZE] = bytes(-(-total_bytes // mmap.PAGESIZE))
        self._rooms.append(room)
        self.cpu_s += time.thread_time() - start_s


def worker(number: int, source_address: str, own_address: str, serving: bool) -> None:
    """Lines in: {"peers"} waits for that many connections, {"room"} has memory for a snapshot at hand; out: each snapshot as it
    is whole."""
    peer = Peer(
        RUN_ID,
        TOKEN,
        f"w{number}",
        (source_address, PORT),
        host=own_address,
        port=PORT,
        advertised_host=own_address,
        serving=serving,
    )
    checks = Checks()
    checks.install()
    memory = Memory()
    memory.install()
    peer.start()
    threading.Thread(target=tell_deliveries, args=(peer, checks, memory), daemon=True).start()
    for line in sys.stdin:
        command = json.loads(line)
        if "room" in command:
            memory.prepare(command["room"])
        while peer.peers < command.get("peers", 0):
            time.sleep(0.01)
        say(peers=peer.peers)


def tell_deliveries(peer: Peer, checks: Checks, memory: Memory) -> None:
    cpu_s = forwarded = duplicates = checks_s = 0.0
    while True:
        delivery = peer.wait(PROMPT_S)
        done_s = time.monotonic()
        time.sleep(0.5)
        now = time.process_time() - memory.cpu_s, peer.forwarded_bytes, peer.duplicate_bytes, checks.cpu_s
        say(
            version=delivery.manifest.version,
            done_s=done_s,
            bytes=len(delivery.payload),
            cpu_s=now[0] - cpu_s,
            forwarded_bytes=now[1] - forwarded,
            duplicate_bytes=now[2] - duplicates,
            checks_cpu_s=now[3] - checks_s,
        )
        cpu_s, forwarded, duplicates, checks_s = now


if __name__ == "__main__":
    if sys.argv[1] == "source":
        source(sys.argv[2], float(sys.argv[3]))
    else:
        worker(int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5] == "serving")
