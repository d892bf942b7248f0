"""From the learner's new weights to workers that generate with them, in full and as a delta.

The publisher puts each version into a `SnapshotStore` and broadcasts the smallest form of it, as the hub does; workers follow
with a `SnapshotFollower` that the broadcast feeds, and learn what to fetch by a long-poll over the same links. A version is
there when the last worker has the weights, of the digest in the manifest, has loaded them into its engine, and has drawn a
first token from them. Store and weights are in memory: disks are not what this is about.

One host is `python -m benchmarks.broadcast_publication publisher ADDRESS FOLDER`, or `… follower NUMBER PUBLISHER_ADDRESS
OWN_ADDRESS FOLDER`, FOLDER holding the model's `config.json`.
"""

from __future__ import annotations

import json
import mmap
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from transformers import PretrainedConfig

from benchmarks.broadcast_node import PORT, PROMPT_S, RUN_ID, TOKEN, say
from benchmarks.conversation import Conversation
from benchmarks.wan import Host, Wan
from echo2.dissemination.broadcast.arrivals import BroadcastArrivals
from echo2.dissemination.broadcast.peer import Peer
from echo2.dissemination.broadcast.record import FIRST_CHUNK_BYTES
from echo2.dissemination.broadcast.source import Source
from echo2.dissemination.manifest import Manifest
from echo2.dissemination.receiver import SnapshotFollower, SourceUnavailable
from echo2.dissemination.store import Published, SnapshotStore
from echo2.protocol import Lease, Sampling
from echo2.rollout.transformers_engine import TransformersEngine

REPOSITORY = Path(__file__).parent.parent
ROUTE_PORT = PORT + 1
LEASE = Lease(group_id=0, attempt=1, members=(0,), prompt_token_ids=(1, 2, 3, 4), timeout_s=PROMPT_S)
SAMPLING = Sampling(temperature=1.0, max_completion_tokens=1, stop_token_ids=(), seed=0)


@dataclass(frozen=True, slots=True)
class Publication:
    """One version: seconds from its weights in the learner's memory to the last worker's first token, and bytes broadcast."""

    last_s: float
    publish_s: float
    """Until the store had it, encoding included; part of the former."""
    sent_bytes: int


def publications(
    hosts: Sequence[Host], model: PretrainedConfig, base: bytes, target: bytes, repeats: int
) -> dict[str, list[Publication]]:
    """Go back and forth between two versions of the weights of `model`, `full` one way and by `delta` the other."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name, Wan(hosts) as wan:
        model.save_pretrained(name)
        files = {"full": Path(name, "target"), "delta": Path(name, "base")}
        files["full"].write_bytes(target)
        files["delta"].write_bytes(base)
        publisher = _start(wan, 0, "publisher", wan.address(0), name)
        publisher.hear()
        followers = [
            _start(wan, number, "follower", str(number), wan.address(0), wan.address(number), name)
            for number in range(1, len(hosts))
        ]
        for follower in followers:
            follower.ask(peers=len(followers) - 1)
        made: dict[str, list[Publication]] = {form: [] for form in files}
        for form in ("delta", *("full", "delta") * (1 + repeats)):
            told = publisher.ask(file=str(files[form]), delta=form == "delta")
            reports = [follower.hear() for follower in followers]
            assert all(report["digest"] == told["digest"] for report in reports), "weights that arrived are not those sent"
            last_s = max(report["done_s"] for report in reports) - told["start_s"]
            made[form].append(Publication(last_s, told["publish_s"], told["sent_bytes"]))
    # Before these, connections were fresh, memory had not been used, and the first version had none to build on.
    return {form: made[form][-repeats:] for form in made}


def _start(wan: Wan, host: int, *arguments: str) -> Conversation:
    command = [sys.executable, "-m", "benchmarks.broadcast_publication", *arguments]
    return Conversation(wan.spawn(host, command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE))


class Routes:
    """Answers who asks what to fetch, once there is something new for it."""

    def __init__(self, store: SnapshotStore, address: str) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._listener = socket.create_server((address, ROUTE_PORT), backlog=64)
        threading.Thread(target=self._listen, daemon=True).start()

    def announce(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _listen(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        lines = connection.makefile("r")
        for line in lines:
            held_id = json.loads(line)
            with self._changed:
                self._changed.wait_for(lambda held_id=held_id: self._store.route(held_id))  # type: ignore[misc]
            route = [manifest.model_dump(mode="json") for manifest in self._store.route(held_id)]
            connection.sendall(json.dumps(route).encode() + b"\n")


class RouteSource:
    """A `SnapshotSource` that tells what there is and leaves the bytes to the broadcast."""

    def __init__(self, address: str) -> None:
        self._connection = socket.create_connection((address, ROUTE_PORT))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines = self._connection.makefile("r")

    def wait_newest(self, held_id: str | None, wait_s: float) -> tuple[Manifest, ...]:
        self._connection.sendall(json.dumps(held_id).encode() + b"\n")
        return tuple(Manifest.model_validate(fields) for fields in json.loads(self._lines.readline()))

    def stream(self, manifest: Manifest, first_chunk: int, count: int) -> Iterator[bytes]:
        raise SourceUnavailable("the benchmark's publisher serves nothing outside the broadcast")


def publisher(address: str, folder: str) -> None:
    """Lines in: {"file", "delta"}; out: when it was begun, how long it took, bytes to broadcast, the digest of the weights."""
    store = SnapshotStore(Path(folder, "snapshots"), RUN_ID, TOKEN)
    routes = Routes(store, address)
    source = Source(RUN_ID, TOKEN, host=address, port=PORT)
    source.start()
    say(ready=True)
    former: Published | None = None
    for version, line in enumerate(sys.stdin, start=1):
        asked = json.loads(line)
        weights = bytearray(Path(asked["file"]).read_bytes())
        # A worker takes nothing that it had already: no two versions may be the same.
        weights[-8:] = version.to_bytes(8)
        digest = blake3(weights).hexdigest()
        start_s = time.monotonic()
        former = store.publish(version, weights, FIRST_CHUNK_BYTES, former if asked["delta"] else None)
        manifest, file = store.smallest(version)
        with file.open("rb") as opened:
            payload = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        publish_s = time.monotonic() - start_s
        source.broadcast(manifest, payload)
        routes.announce()
        say(start_s=start_s, publish_s=publish_s, sent_bytes=manifest.total_bytes, digest=digest)


def follower(number: str, publisher_address: str, own_address: str, folder: str) -> None:
    """Line in: {"peers"} waits for so many connections; out: that, then each version as its first token is drawn."""
    engine = TransformersEngine(Path(folder), "bfloat16", "cpu", threads=1)
    peer = Peer(RUN_ID, TOKEN, f"w{number}", (publisher_address, PORT), host=own_address, port=PORT)
    following = SnapshotFollower(RouteSource(publisher_address), RUN_ID, TOKEN, arrivals=BroadcastArrivals(peer))
    following.start()
    peers = json.loads(sys.stdin.readline())["peers"]
    while peer.peers < peers:
        time.sleep(0.01)
    say(peers=peer.peers)
    while True:
        received = following.wait_first(PROMPT_S)
        engine.load_weights(received.weights, received.manifest.version)
        next(engine.generate([LEASE], SAMPLING, lambda: False))
        done_s = time.monotonic()
        say(done_s=done_s, version=received.manifest.version, digest=blake3(received.weights).hexdigest())


if __name__ == "__main__":
    if sys.argv[1] == "publisher":
        publisher(*sys.argv[2:])
    else:
        follower(*sys.argv[2:])
