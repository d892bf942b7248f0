"""The rollout worker: keeps its engine at the newest snapshot, generates what it leases, hands in what it made.

Invariants: no lease is taken before a snapshot was loaded; weights change only between generations; what was generated is
handed in until the hub has acknowledged it; heartbeats come from a thread of their own, however busy generation is; after
SIGTERM the finished members are handed in and the rest is returned within the notice; a worker that cannot reach its hub for
`worker.orphan_timeout_s` ends itself.
"""

from __future__ import annotations

import logging
import math
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from echo2.config import Config
from echo2.dissemination.broadcast.arrivals import Arrivals, BroadcastArrivals
from echo2.dissemination.broadcast.peer import Peer
from echo2.dissemination.manifest import Content, Manifest, signing_key
from echo2.dissemination.object_store.arrivals import BackedSource, ObjectStoreArrivals
from echo2.dissemination.object_store.bucket import Bucket
from echo2.dissemination.receiver import ReceivedSnapshot, SnapshotFollower, SnapshotSource, SourceUnavailable, receive
from echo2.errors import SnapshotError, UserError
from echo2.hub.client import HubClient
from echo2.protocol import GroupRollouts, Lease, Telemetry, WorkerWelcome
from echo2.rollout.engine import Engine
from echo2.rollout.engines import make_engine
from echo2.rollout.leases import LeaseTaker
from echo2.rollout.outbox import Outbox
from echo2.rollout.pulse import Pulse

log = logging.getLogger(__name__)
NOTICE_S = 20.0
PATIENCE_S = 5.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Orphaned(UserError):
    """The hub was out of reach for too long."""


class _ToldToLeave(Exception):
    pass


class HubSource:
    """Snapshots over the hub's HTTP."""

    def __init__(self, client: HubClient) -> None:
        self._client = client

    def wait_newest(self, held_id: str | None, wait_s: float) -> tuple[Manifest, ...]:
        with _as_source_errors():
            return self._client.snapshot_route(held_id, wait_s)

    def stream(self, manifest: Manifest, first_chunk: int, count: int) -> Iterator[bytes]:
        with _as_source_errors():
            yield from self._client.stream_snapshot(manifest, first_chunk, count)


@contextmanager
def _as_source_errors() -> Iterator[None]:
    """A hub that is away or refuses is worth another try; what is wrong with a snapshot is for the follower to judge."""
    try:
        yield
    except SnapshotError:
        raise
    except UserError as error:
        raise SourceUnavailable(str(error)) from None


class Worker:
    """One worker process. `stop` may be called from a signal handler or another thread."""

    def __init__(self, client: HubClient, name: str, config: Config, welcome: WorkerWelcome, token: str) -> None:
        self._client = client
        self._config = config
        self._sampling = welcome.sampling
        self._run_id = welcome.run_id
        self._token = token
        client.patience_s = PATIENCE_S
        self._leaving = threading.Event()
        self._notice_s = NOTICE_S
        self._news = threading.Condition()
        self._telemetry = Telemetry()
        self._pulse = Pulse(client, name, welcome.worker_id, config.worker.heartbeat_interval_s, lambda: self._telemetry)
        self._leases = LeaseTaker(client, self._pulse, config.worker.slots, self._news)
        self._outbox = Outbox(client, self._news)
        self._store = self._open_store()
        source: SnapshotSource = HubSource(client)
        arrivals: Arrivals | None = self._store
        if config.worker.snapshot_source == "auto":
            arrivals = self._join_broadcast(name, welcome)
            source = BackedSource(source, self._store) if self._store else source
        self._follower = SnapshotFollower(source, self._run_id, token, arrivals=arrivals, on_arrival=self._wake)

    @property
    def run_ended(self) -> bool:
        """Whether the hub said that the run is over."""
        return self._leases.run_ended.is_set()

    def stop(self, notice_s: float = NOTICE_S) -> None:
        """Leave within `notice_s`: hand in what is finished, return the rest."""
        self._notice_s = notice_s
        self._leaving.set()

    def run(self) -> None:
        """Work until `stop`. Raises Orphaned when the hub stays away, UserError when the engine cannot be made."""
        self._pulse.start()
        try:
            engine = self._make_engine()
        except _ToldToLeave:
            self._pulse.stop()
            self._pulse.say_goodbye()
            return
        self._follower.start()
        self._outbox.start()
        self._leases.start()
        try:
            self._work(engine)
        except Orphaned:
            self._notice_s = 0.0
            raise
        finally:
            self._leave(self._notice_s)

    def _work(self, engine: Engine) -> None:
        while not self._leaving.is_set() and not self._leases.run_ended.is_set():
            self._check_hub()
            snapshot = self._follower.take()
            if snapshot is not None:
                self._load(engine, snapshot)
            leased = self._leases.take()
            if leased is not None:
                self._generate(engine, *leased)
            elif snapshot is None:
                with self._news:
                    self._news.wait_for(lambda: self._leases.has_news or self._follower.has_arrival, 0.5)

    def _generate(self, engine: Engine, worker_id: str, leases: list[Lease]) -> None:
        began = time.monotonic()
        groups = tokens = 0
        unfinished = {lease.group_id for lease in leases}
        for group in engine.generate(leases, self._sampling, self._leaving.is_set):
            self._outbox.put(worker_id, group)
            groups += 1
            tokens += sum(len(r.token_ids) for r in group.rollouts)
            if _is_whole(group, leases):
                unfinished.discard(group.group_id)
        if unfinished:
            self._outbox.put_return(worker_id, sorted(unfinished))
        self._measure(groups=groups, tokens=tokens, generating_s=time.monotonic() - began)

    def _load(self, engine: Engine, snapshot: ReceivedSnapshot) -> None:
        began = time.monotonic()
        manifest = snapshot.manifest
        engine.load_weights(snapshot.weights, manifest.version)
        self._telemetry = self._telemetry.model_copy(
            update={
                "version": manifest.version,
                "snapshot_id": manifest.snapshot_id,
                "load_s": time.monotonic() - began,
                "fetch_s": snapshot.fetch_s,
            }
        )
        self._outbox.put_loaded(self._pulse.worker_id, self._telemetry)

    def _measure(self, groups: int, tokens: int, generating_s: float) -> None:
        past = self._telemetry
        self._telemetry = past.model_copy(
            update={
                "groups": past.groups + groups,
                "tokens": past.tokens + tokens,
                "generating_s": past.generating_s + generating_s,
            }
        )

    def _check_hub(self) -> None:
        silence_s = self._client.silence_s
        if silence_s > self._config.worker.orphan_timeout_s:
            raise Orphaned(
                f"hub {self._client.url} was out of reach for {silence_s:.0f} s, over worker.orphan_timeout_s = "
                f"{self._config.worker.orphan_timeout_s:g}: this worker ends"
            )
        for thread in (self._pulse, self._leases, self._outbox):
            thread.raise_if_failed()

    def _join_broadcast(self, name: str, welcome: WorkerWelcome) -> Arrivals | None:
        """Take part in the broadcast if the hub has one. Raises UserError if this worker's own port cannot be had."""
        if welcome.broadcast_port is None:
            return None
        host, own = urlsplit(self._client.url).hostname or "", self._config.worker
        try:
            peer = Peer(
                self._run_id,
                self._token,
                name,
                (host, welcome.broadcast_port),
                host=own.peer_host or ("127.0.0.1" if host in LOOPBACK else "0.0.0.0"),
                port=own.peer_port,
                advertised_host=own.peer_advertised_host,
            )
        except OSError as error:
            raise UserError(
                f"worker.peer_host = {own.peer_host!r} with worker.peer_port = {own.peer_port} cannot be listened on "
                f"({error.strerror}): choose another one"
            ) from None
        return BroadcastArrivals(peer)

    def _open_store(self) -> ObjectStoreArrivals | None:
        """The run's object store. Raises UserError where it is to be used and cannot be."""
        asked_for = self._config.worker.snapshot_source == "object_store"
        if not self._config.dissemination.object_store:
            return None
        try:
            return ObjectStoreArrivals(Bucket(self._config.dissemination), self._token)
        except UserError as error:
            if asked_for:
                raise
            log.warning("snapshots come from the hub alone: %s", error)
            return None

    def _make_engine(self) -> Engine:
        with tempfile.TemporaryDirectory(prefix="echo2-model-") as folder:
            if self._config.worker.engine != "simulated":
                (Path(folder) / "config.json").write_bytes(self._client.model_file("config.json"))
            return make_engine(self._config, Path(folder), self._fetch_base())

    def _fetch_base(self) -> Content | None:
        """The weights that the run's adapters belong to; None where snapshots hold all weights."""
        if self._config.worker.engine == "simulated" or not self._config.learner.lora.rank:
            return None
        manifest = self._client.base()

        def fetch(first_chunk: int, count: int) -> Iterator[bytes]:
            with _as_source_errors():
                for piece in self._client.stream_base(manifest, first_chunk, count):
                    if self._leaving.is_set():
                        raise _ToldToLeave
                    yield piece

        def pause(seconds: float) -> None:
            self._check_hub()
            if self._leaving.wait(seconds):
                raise _ToldToLeave

        key = signing_key(self._token)
        return receive(manifest, fetch, key, self._run_id, break_attempts=math.inf, pause=pause)

    def _leave(self, notice_s: float) -> None:
        deadline = time.monotonic() + notice_s
        self._client.patience_s = notice_s / 4
        self._leases.stop()
        if self._store is not None:
            self._store.close()
        self._follower.stop()
        held = self._leases.take()
        if held is not None:
            worker_id, leases = held
            self._outbox.put_return(worker_id, [lease.group_id for lease in leases])
        self._outbox.close(deadline - time.monotonic())
        self._pulse.stop()
        if notice_s:
            self._pulse.say_goodbye()

    def _wake(self) -> None:
        with self._news:
            self._news.notify_all()


def _is_whole(group: GroupRollouts, leases: list[Lease]) -> bool:
    wanted = next(lease.members for lease in leases if lease.group_id == group.group_id)
    return len(group.rollouts) + len(group.failures) == len(wanted)
