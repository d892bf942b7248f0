"""Dissemination as Prefect tasks: export, announce, await workers.

Invariants: the learner waits for the export alone, a copy of the weights to host memory; announcements keep the order of
versions; a snapshot that cannot be announced ends the segment; a worker that is late is named, and the run goes on; so it does
without an object store that fails.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectConcurrentFuture

from echo2.config import Config
from echo2.config_sections import DisseminationSection
from echo2.dissemination.broadcast.record import BroadcastRecord, chunk_bytes_after
from echo2.dissemination.object_store.bucket import Bucket
from echo2.dissemination.object_store.mirror import Mirror
from echo2.dissemination.store import Published, SnapshotStore
from echo2.hub.client import HubClient
from echo2.learning.learner import Learner
from flows.session import Session

log = logging.getLogger(__name__)


class Export:
    """The weights of one version on their way to host memory; a class of its own so that Prefect does not look into them."""

    def __init__(self, version: int, payload: Callable[[], bytes]) -> None:
        self.version = version
        self.payload = payload


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
        published = self._store.publish(exported.version, payload, chunk_bytes, base, mirror)
        self._former = published
        self._sizes = {"dissemination/full_bytes": float(published.manifest.total_bytes)}
        if published.delta:
            self._sizes["dissemination/delta_bytes"] = float(published.delta.total_bytes)

    def finish(self, run_ended: bool, timeout_s: float) -> None:
        """Wait for what goes on in the object store; at the end of the run only its newest version stays there."""
        if self._mirror is not None:
            self._mirror.wait(timeout_s)
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
    """Publishes the learner's versions while it goes on."""

    def __init__(self, session: Session) -> None:
        """Raises UserError where an object store is configured that cannot be opened."""
        self._session = session
        store = SnapshotStore(session.run.snapshots, session.run.run_id, session.run.token)
        mirror = _mirror(session.config, session.run.run_id, session.run.token, session.hub)
        self._publisher = Publisher(store, session.config.dissemination, mirror)
        self._stages: deque[PrefectConcurrentFuture] = deque()
        self._last_announcement: PrefectConcurrentFuture | None = None

    def publish(self) -> dict[str, float]:
        """Export the learner's version and leave the rest to other threads. Raises what an earlier stage raised."""
        self._collect()
        began = time.monotonic()
        exported = export(self._session.learner)
        hub, settings = self._session.hub, self._session.config.dissemination
        former = [self._last_announcement] if self._last_announcement else None
        self._last_announcement = announce.submit(exported, self._publisher, hub, wait_for=former)
        awaited = await_workers.submit(
            exported.version, self._publisher, hub, settings.timeout_s, wait_for=[self._last_announcement]
        )
        self._stages += [self._last_announcement, awaited]
        return {"dissemination/export_s": time.monotonic() - began} | self._publisher.metrics

    def finish(self) -> None:
        """Wait for the stages under way; raises what one of them raised."""
        config, timeout_s = self._session.config, self._session.config.dissemination.timeout_s * 2
        while self._stages:
            self._stages.popleft().result(timeout=timeout_s)
        self._publisher.finish(self._session.learner.version >= config.run.steps, timeout_s)

    def _collect(self) -> None:
        # A future's `state` asks Prefect's server, which may be away; the thread behind it knows as well.
        while self._stages and self._stages[0].wrapped_future.done():
            self._stages.popleft().result()


@task(name="export", task_run_name="export-{learner.version}", cache_policy=NO_CACHE, persist_result=False)
def export(learner: Learner) -> Export:
    """Begin to copy the weights out of the learner; refuses weights that are not finite."""
    return Export(learner.version, learner.begin_export())


@task(name="announce", task_run_name="announce-{exported.version}", cache_policy=NO_CACHE, persist_result=False)
def announce(exported: Export, publisher: Publisher, hub: HubClient) -> None:
    """Write weights, delta and at last the manifests, then tell the hub."""
    publisher.publish(exported)
    hub.announce(exported.version)


@task(name="await-workers", task_run_name="await-workers-{version}", cache_policy=NO_CACHE, persist_result=False)
def await_workers(version: int, publisher: Publisher, hub: HubClient, timeout_s: float) -> int:
    """Wait until every live worker generates with `version` or newer; returns how many do."""
    loaded, late = hub.await_receivers(version, timeout_s)
    if late:
        message = f"version {version} did not reach {', '.join(late)} within dissemination.timeout_s = {timeout_s:g}"
        log.warning("%s; the run goes on without them", message)
        hub.note("worker late", ", ".join(late), message)
    publisher.arrived(hub.broadcast_record(version))
    return len(loaded)
