"""Dissemination as Prefect tasks: export, announce, await workers.

Invariants: the learner waits for the export alone, a copy of the weights to host memory; announcements keep the order of
versions; a snapshot that cannot be announced ends the segment; a worker that is late is named, and the run goes on; so it does
without an object store that fails.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import wait
from typing import Self

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectConcurrentFuture

from echo2.config import Config
from echo2.config_sections import DisseminationSection
from echo2.dissemination.broadcast.record import BroadcastRecord, chunk_bytes_after
from echo2.dissemination.manifest import Probe
from echo2.dissemination.object_store.bucket import Bucket
from echo2.dissemination.object_store.mirror import Mirror
from echo2.dissemination.store import Published, SnapshotStore
from echo2.hub.client import HubClient, HubUnavailable
from echo2.learning.learner import Learner
from flows.session import Session

log = logging.getLogger(__name__)
LAST_STAGES_S = 10.0
"""How long the end of a segment waits for the stages under way."""
STOP_CHECK_S = 0.2
"""How often a wait looks whether the segment is to end."""


class Export:
    """The weights of one version on their way to host memory; a class of its own so that Prefect does not look into them."""

    def __init__(self, version: int, payload: Callable[[], bytes], probe: Probe | None = None) -> None:
        self.version = version
        self.payload = payload
        self.probe = probe


class Publisher:
    """Writes versions into the store, each with its delta from the one before; used by one thread at a time."""

    def __init__(self, store: SnapshotStore, settings: DisseminationSection, mirror: Mirror | None = None) -> None:
        """`mirror` copies every version to an object store."""
        self._store = store
        self._mirror = mirror
        self._settings = settings
        self._former: Published | None = None
        self._sizes: dict[str, float] = {}
        self._record: BroadcastRecord | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """Bytes of the last version, in full and as a delta, and when the last broadcast that ended reached the workers."""
        return self._sizes | (self._record.metrics if self._record else {})

    def publish(self, exported: Export) -> None:
        """Raises SnapshotError for weights that are none."""
        base = self._former if self._settings.deltas else None
        mirror = self._mirror.put if self._mirror else None
        payload = exported.payload()
        chunk_bytes = self._settings.chunk_bytes or chunk_bytes_after(self._record, len(payload))
        published = self._store.publish(exported.version, payload, chunk_bytes, base, mirror, exported.probe)
        self._former = published
        self._sizes = {"dissemination/full_bytes": float(published.manifest.total_bytes)}
        if published.delta:
            self._sizes["dissemination/delta_bytes"] = float(published.delta.total_bytes)

    def finish(self, run_ended: bool, timeout_s: float, check_stop: Callable[[], None]) -> None:
        """Wait for what goes on in the object store; at the end of the run only its newest version stays there."""
        if self._mirror is not None:
            deadline_s = time.monotonic() + timeout_s
            while not self._mirror.wait(STOP_CHECK_S) and time.monotonic() < deadline_s:
                check_stop()
            if run_ended:
                self._mirror.end_run()

    def arrived(self, record: BroadcastRecord | None) -> None:
        """Take note of a broadcast that reached its workers."""
        self._record = record


def _mirror(config: Config, run_id: str, token: str, hub: HubClient) -> Mirror | None:
    """The run's object store, if it is to have one. Raises UserError where it cannot be opened."""
    settings = config.dissemination
    if not settings.object_store:
        return None

    def on_trouble(trouble: str) -> None:
        log.warning("%s", trouble)
        hub.note("object store", settings.object_store, trouble)

    return Mirror(Bucket(settings), run_id, token, settings.retain_snapshots, settings.object_store_anchor_interval, on_trouble)


class Disseminator:
    """Publishes the learner's versions while it goes on; where its block ends early, nobody waits for workers any longer."""

    def __init__(self, session: Session) -> None:
        """Raises UserError where an object store is configured that cannot be opened."""
        self._session = session
        store = SnapshotStore(session.run.snapshots, session.run.run_id, session.run.token)
        mirror = _mirror(session.config, session.run.run_id, session.run.token, session.hub)
        self._publisher = Publisher(store, session.config.dissemination, mirror)
        self._stages: deque[PrefectConcurrentFuture] = deque()
        self._last_announcement: PrefectConcurrentFuture | None = None
        self._over = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        wait([stage.wrapped_future for stage in self._stages], LAST_STAGES_S)

    def publish(self) -> dict[str, float]:
        """Export the learner's version and leave the rest to other threads. Raises what an earlier stage raised."""
        self.check()
        began = time.monotonic()
        exported = export(self._session.learner)
        hub, settings = self._session.hub, self._session.config.dissemination
        former = [self._last_announcement] if self._last_announcement else None
        self._last_announcement = announce.submit(exported, self._publisher, hub, wait_for=former)
        awaited = await_workers.submit(
            exported.version, self._publisher, hub, settings.timeout_s, self._over, wait_for=[self._last_announcement]
        )
        self._stages += [self._last_announcement, awaited]
        return {"dissemination/export_s": time.monotonic() - began} | self._publisher.metrics

    def finish(self) -> None:
        """Wait for the stages under way; raises what one of them raised, and Stopped if the segment is to end meanwhile."""
        config, timeout_s = self._session.config, self._session.config.dissemination.timeout_s * 2
        while self._stages:
            deadline_s = time.monotonic() + timeout_s
            while not wait([self._stages[0].wrapped_future], STOP_CHECK_S).done and time.monotonic() < deadline_s:
                self._session.check_stop()
            self._stages.popleft().result(timeout=0)
        run_ended = self._session.learner.version >= config.run.steps
        self._publisher.finish(run_ended, timeout_s, self._session.check_stop)

    def check(self) -> None:
        """Raises what a stage that has ended raised."""
        # A future's `state` asks Prefect's server, which may be away; the thread behind it knows as well.
        while self._stages and self._stages[0].wrapped_future.done():
            self._stages.popleft().result()


@task(name="export", task_run_name="export-{learner.version}", cache_policy=NO_CACHE, persist_result=False)
def export(learner: Learner) -> Export:
    """Begin to copy the weights out of the learner; refuses weights that are not finite."""
    payload = learner.begin_export()
    return Export(learner.version, payload, learner.probe)


@task(name="announce", task_run_name="announce-{exported.version}", cache_policy=NO_CACHE, persist_result=False)
def announce(exported: Export, publisher: Publisher, hub: HubClient) -> None:
    """Write weights, delta and at last the manifests, then tell the hub."""
    publisher.publish(exported)
    hub.announce(exported.version)


@task(name="await-workers", task_run_name="await-workers-{version}", cache_policy=NO_CACHE, persist_result=False)
def await_workers(version: int, publisher: Publisher, hub: HubClient, timeout_s: float, over: threading.Event) -> int:
    """Wait until every live worker generates with `version` or newer, or all is over; returns how many do."""
    try:
        loaded, late = hub.await_receivers(version, timeout_s, over.is_set)
    except HubUnavailable:
        if not over.is_set():
            raise
        return 0
    if over.is_set():
        return len(loaded)
    if late:
        message = f"version {version} did not reach {', '.join(late)} within dissemination.timeout_s = {timeout_s:g}"
        log.warning("%s; the run goes on without them", message)
        hub.note("worker late", ", ".join(late), message)
    publisher.arrived(hub.broadcast_record(version))
    return len(loaded)
