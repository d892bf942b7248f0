"""The rollout worker: keeps its engine at the newest snapshot, generates what it leases, hands in what it made.

Invariants: no lease is taken before a snapshot was loaded and the engine has proved that it has it, and nothing that an engine
drew without that proof is handed in; weights change as `worker.update_mode` says; what was generated is handed in until the hub
has acknowledged it; heartbeats come from a thread of their own, however busy generation is; after SIGTERM all that was drawn is
handed in and the leases are returned within the notice; a worker that cannot reach its hub for `worker.orphan_timeout_s` ends
itself; so does one whose name another process has taken, which hands in first; whichever way it ends, it takes
part in no broadcast any more, and the hub, unless it is away, was told why.
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
from echo2.durability import naming
from echo2.errors import NameTaken, SnapshotError, UserError, reason_of
from echo2.hub.client import HubClient
from echo2.listening import cannot_listen
from echo2.protocol import Telemetry, WorkerWelcome
from echo2.rollout.engine import Engine
from echo2.rollout.engines import make_engine
from echo2.rollout.generation import Generation
from echo2.rollout.leases import LeaseTaker
from echo2.rollout.outbox import Outbox
from echo2.rollout.proof import require_weights
from echo2.rollout.pulse import Pulse
from echo2.rollout.spool import Spool
from echo2.rollout.updates import Updates

log = logging.getLogger(__name__)
NOTICE_S = 20.0
PATIENCE_S = 5.0
LONGEST_WAIT_S = 0.5


class Orphaned(UserError):
    """The hub was out of reach for too long."""


class _ToldToLeave(Exception):
    pass


def _peer_host(hub_host: str) -> str:
    """Where to listen for peers of a hub at `hub_host`: nobody is on another machine where the hub is reached by loopback."""
    if ":" in hub_host:
        return hub_host if hub_host == "::1" else "::"
    return "127.0.0.1" if hub_host in ("127.0.0.1", "localhost") else "0.0.0.0"


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

    def __init__(
        self,
        client: HubClient,
        name: str,
        config: Config,
        welcome: WorkerWelcome,
        token: str,
        leaving: threading.Event | None = None,
    ) -> None:
        """`leaving` is set by whoever may want it to leave before there is a worker to `stop`."""
        self._client = client
        self._config = config
        self._sampling = welcome.sampling
        self._run_id = welcome.run_id
        self._token = token
        client.patience_s = PATIENCE_S
        self._leaving = leaving or threading.Event()
        self._notice_s = NOTICE_S
        self._reason = ""
        self._news = threading.Condition()
        self._telemetry = Telemetry()
        self._pulse = Pulse(client, name, welcome.worker_id, config.worker.heartbeat_interval_s, lambda: self._telemetry)
        self._leases = LeaseTaker(client, self._pulse, self._news)
        self._outbox = Outbox(client, Spool(config.worker.spool_directory, self._run_id, name), name)
        self._measured_s = 0.0
        self._store = self._open_store()
        source: SnapshotSource = HubSource(client)
        arrivals: Arrivals | None = self._store
        if config.worker.snapshot_source == "auto":
            arrivals = self._join_broadcast(name, welcome)
            source = BackedSource(source, self._store) if self._store else source
        self._follower = SnapshotFollower(source, self._run_id, token, arrivals=arrivals, on_arrival=self._wake)

    @property
    def dismissed(self) -> bool:
        """Whether the hub said that this worker may leave."""
        return self._leases.dismissed.is_set()

    def stop(self, notice_s: float = NOTICE_S, reason: str = "") -> None:
        """Leave within `notice_s`: hand in all that was drawn, return the leases, tell the hub the reason."""
        self._notice_s, self._reason = notice_s, reason
        self._leaving.set()

    def run(self) -> None:
        """Work until `stop`.

        Raises Orphaned when the hub stays away, NameTaken when another process is this worker now, UserError when the engine
        cannot be made.
        """
        self._pulse.start()
        try:
            self._serve(self._make_engine())
        except _ToldToLeave:
            return
        except BaseException as error:
            self._reason = reason_of(error)
            raise
        finally:
            self._leave()

    def _serve(self, engine: Engine) -> None:
        self._follower.start()
        self._outbox.start()
        self._leases.start()
        try:
            self._work(engine)
        finally:
            self._hand_in()

    def _work(self, engine: Engine) -> None:
        generation = Generation(engine, self._sampling, self._config.worker, self._outbox)
        updates = Updates(self._follower, engine, self._config.worker.update_mode, self._wake)
        try:
            self._generate(engine, generation, updates)
        except NameTaken:
            generation.leave()
            raise
        generation.leave()
        self._take_figures(generation)

    def _generate(self, engine: Engine, generation: Generation, updates: Updates) -> None:
        while not self._leaving.is_set():
            self._check_hub()
            snapshot = updates.due()
            if snapshot is not None:
                self._load(engine, snapshot, updates.staged_s)
            if engine.version is not None and not updates.hold_up:
                self._take_leases(generation)
            if generation.under_way:
                generation.step()
            elif self._leases.dismissed.is_set():
                break
            else:
                self._wait_for_news(updates)
            self._measure(generation)

    def _take_leases(self, generation: Generation) -> None:
        room = generation.room
        leased = self._leases.take(room) if room else None
        if leased is not None:
            generation.begin(*leased)

    def _wait_for_news(self, updates: Updates) -> None:
        with self._news:
            self._news.wait_for(lambda: self._leases.has_news or updates.news or self._leaving.is_set(), LONGEST_WAIT_S)

    def _load(self, engine: Engine, snapshot: ReceivedSnapshot, staged_s: float) -> None:
        began = time.monotonic()
        manifest = snapshot.manifest
        engine.load_weights(snapshot.weights, manifest.version)
        require_weights(engine, manifest, self._config.model.dtype)
        self._telemetry = self._telemetry.model_copy(
            update={
                "version": manifest.version,
                "snapshot_id": manifest.snapshot_id,
                "load_s": staged_s + time.monotonic() - began,
                "pause_s": time.monotonic() - began,
                "fetch_s": snapshot.fetch_s,
            }
        )
        self._outbox.put_loaded(self._pulse.worker_id, self._telemetry)

    def _measure(self, generation: Generation) -> None:
        if time.monotonic() - self._measured_s >= self._config.worker.heartbeat_interval_s / 2:
            self._measured_s = time.monotonic()
            self._take_figures(generation)

    def _take_figures(self, generation: Generation) -> None:
        self._telemetry = self._telemetry.model_copy(update=generation.figures())

    def _check_hub(self) -> None:
        silence_s = self._client.silence_s
        if silence_s > self._config.worker.orphan_timeout_s:
            self._notice_s = 0.0
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
                host=own.peer_host or _peer_host(host),
                port=own.peer_port,
                advertised_host=own.peer_advertised_host,
            )
        except OSError as error:
            raise cannot_listen(error, "worker.peer_host", own.peer_host, "worker.peer_port", own.peer_port) from None
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
        if self._leaving.is_set():
            raise _ToldToLeave
        with tempfile.TemporaryDirectory(prefix="echo2-model-") as folder:
            if self._config.worker.engine != "simulated":
                content = self._client.model_file("config.json")
                with naming(Path(folder)):
                    (Path(folder) / "config.json").write_bytes(content)
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

    def _hand_in(self) -> None:
        """Let the hub have all that there is for it, within the notice."""
        deadline = time.monotonic() + self._notice_s
        self._client.patience_s = self._notice_s / 4
        self._leases.stop()
        held = self._leases.take(0)
        if held is not None:
            worker_id, leases = held
            self._outbox.put_return(worker_id, [lease.group_id for lease in leases])
        self._outbox.close(deadline - time.monotonic())

    def _leave(self) -> None:
        self._client.patience_s = self._notice_s / 4
        if self._store is not None:
            self._store.close()
        self._follower.stop()
        self._pulse.stop()
        # A heartbeat after the goodbye would find this worker gone and register it again.
        self._pulse.join(self._client.patience_s)
        if self._notice_s:
            self._pulse.say_goodbye(self._reason)

    def _wake(self) -> None:
        with self._news:
            self._news.notify_all()
