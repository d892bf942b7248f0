"""A learner and a worker's follower with a bucket between them, for tests of the object store."""

import time

import numpy as np
from safetensors.numpy import save

from echo2.config_sections import DisseminationSection
from echo2.dissemination.object_store.bucket import Bucket
from echo2.dissemination.object_store.mirror import Mirror
from echo2.dissemination.object_store.sealing import object_key
from echo2.dissemination.receiver import SourceUnavailable
from echo2.dissemination.store import SnapshotStore
from flows.dissemination import Export, Publisher

RUN_ID, TOKEN = "run-a", "secret"
CATALOG_KEY = "echo2/run-a/catalog.json"
CHUNK_BYTES = 16 * 1024
MB = 1_000_000


def settings(server, **changes):
    return DisseminationSection(
        **{
            "object_store": "s3://weights/echo2",
            "object_store_endpoint_url": server,
            "object_store_concurrency": 4,
            "chunk_bytes": CHUNK_BYTES,
            **changes,
        }
    )


class Learner:
    """The learner's side: store, mirror and publisher, and what the user was told."""

    def __init__(self, folder, chosen, retain=8):
        self.store = SnapshotStore(folder, RUN_ID, TOKEN)
        self.told = []
        self.mirror = Mirror(Bucket(chosen), RUN_ID, TOKEN, retain, chosen.object_store_anchor_interval, self.told.append)
        self._publisher = Publisher(self.store, chosen, self.mirror)

    def publish(self, version, weights=None, wait_s=20):
        """Its manifest in full, once the bucket has all that is to come of it, or after `wait_s`."""
        self._publisher.publish(Export(version, lambda: weights or weights_of(version)))
        self.mirror.wait(wait_s)
        return self.store.manifest(version)

    def finish(self, run_ended):
        self._publisher.finish(run_ended, 20, lambda: None)


class Hub:
    """Manifests from a store, and streams that are counted or broken."""

    def __init__(self, store):
        self.store = store
        self.streamed = []
        self.broken = False
        self.break_after = 0

    def wait_newest(self, held_id, wait_s):
        end_s = time.monotonic() + wait_s
        while time.monotonic() < end_s:
            if route := self.store.route(held_id):
                return route
            time.sleep(0.01)
        return ()

    def stream(self, manifest, first_chunk, count):
        if not self.broken:
            self.streamed.append(manifest)
        given = self.break_after if self.broken else count
        if given:
            yield from self.store.stream(manifest.version, manifest.payload_digest, first_chunk, given)
        if self.broken:
            raise SourceUnavailable("connection reset")


def weights_of(version, size=200_000):
    values = np.random.default_rng(0).integers(0, 2**16, size, np.uint16)
    for step in range(version):
        values[np.random.default_rng(step + 1).integers(0, size, 50)] += np.uint16(1)
    return save({"w": values.view(np.float16)})


def keys(s3):
    return sorted(found["Key"] for found in s3.list_objects_v2(Bucket="weights").get("Contents", ()))


def full_key(manifest):
    return f"echo2/{object_key(manifest)}"


def all_keys(*manifests):
    """What lies in the bucket for these payloads."""
    return sorted({CATALOG_KEY, *(f"{full_key(manifest)}{end}" for manifest in manifests for end in ("", ".json"))})


def never():
    return False


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("echo2")]
