"""Deltas in a bucket: what lies there makes every version that is kept, and nothing else stays."""

import random
import threading

import numpy as np
import pytest
from buckets import (
    CATALOG_KEY,
    TOKEN,
    Learner,
    all_keys,
    full_key,
    keys,
    never,
    settings,
    warnings,
    weights_of,
)

from echo2.dissemination.manifest import sign, signing_key
from echo2.dissemination.object_store.arrivals import BackedSource, ObjectStoreArrivals
from echo2.dissemination.object_store.bucket import Bucket, ObjectStoreError
from echo2.dissemination.object_store.catalog import CATALOG, Entry, entry_of, needed, way_to

SMALL = 20_000


def small(version):
    return weights_of(version, SMALL)


def entry(version, base=None, total_bytes=10):
    return Entry(
        version=version,
        snapshot_id=f"{version}-w",
        base_id=None if base is None else f"{base}-w",
        payload_digest=f"{version}-{base}",
        total_bytes=total_bytes,
    )


FULL = {version: entry(version, None, 1000) for version in (0, 4, 8)}
DELTAS = {version: entry(version, version - 1) for version in range(1, 10)}


def test_the_way_to_a_version_is_the_fewest_bytes_from_nothing():
    entries = (*FULL.values(), *DELTAS.values())
    assert way_to(entries, "9-w") == (FULL[8], DELTAS[9])
    assert way_to(entries, "8-w") == (FULL[8],)
    assert way_to(entries, "10-w") is None
    assert way_to((FULL[0], DELTAS[2]), "2-w") is None


def test_what_is_needed_begins_at_the_anchor_of_the_oldest_version_that_is_kept():
    entries = (*FULL.values(), *DELTAS.values())
    assert set(needed(entries, 10)) == set(entries)
    assert set(needed(entries, 5)) == {FULL[4], FULL[8], *(DELTAS[version] for version in range(5, 10))}
    assert set(needed(entries, 3)) == {FULL[4], FULL[8], *(DELTAS[version] for version in range(5, 10))}
    assert set(needed(entries, 2)) == {FULL[8], DELTAS[9]}
    assert set(needed(entries, 1)) == {FULL[8], DELTAS[9]}


class FlakyBucket(Bucket):
    """Refuses some uploads and removals."""

    def __init__(self, chosen, generator, share):
        super().__init__(chosen)
        self._generator, self._share = generator, share

    def _fail(self):
        if self._generator.random() < self._share:
            raise ObjectStoreError("the store has a bad day", True)

    def upload(self, *arguments):
        self._fail()
        super().upload(*arguments)

    def delete(self, key):
        self._fail()
        super().delete(key)


def catalog(s3):
    return (
        CATALOG.validate_json(s3.get_object(Bucket="weights", Key=CATALOG_KEY)["Body"].read())
        if CATALOG_KEY in keys(s3)
        else ()
    )


@pytest.mark.parametrize("seed", range(4))
def test_every_kept_version_can_be_had_from_nothing_whatever_happens(server, s3, tmp_path, seed):
    """Failures, versions in full between, and resumes by new processes that take versions back."""
    generator = random.Random(seed)
    retain, interval = generator.randint(1, 4), generator.randint(1, 4)
    chosen = settings(server, object_store_anchor_interval=interval)
    reader = ObjectStoreArrivals(Bucket(chosen), TOKEN)
    version, learner, manifests = 0, None, {}
    for place in range(14):
        if learner is None or generator.random() < 0.1:
            version = generator.randint(max(0, version - 3), version)
            learner = Learner(tmp_path / str(place), chosen, retain)
            learner.mirror._bucket = FlakyBucket(chosen, generator, generator.choice([0.0, 0.0, 0.15]))
        other = 100 * generator.randint(0, 1) if generator.random() < 0.2 else 0
        manifests[version] = learner.publish(version, small(version + other)), version + other
        found = catalog(s3)
        kept = sorted({entry.version for entry in found if manifests[entry.version][0].snapshot_id == entry.snapshot_id})
        for known in kept[-retain:]:
            manifest, content = manifests[known]
            assert reader.payload(manifest, never) == small(content), (place, known)
        version += 1
    learner.mirror._bucket = Bucket(chosen)
    last = [learner.publish(version + step, small(version + step)) for step in range(retain + 2 * interval)]
    found = catalog(s3)
    named = {f"echo2/{key}" for key in learner.mirror._all_keys(found)}
    assert set(keys(s3)) == named | {CATALOG_KEY}, "nothing else stays"
    assert len({entry.version for entry in found}) <= retain + interval
    for step, manifest in list(enumerate(last))[-retain:]:
        assert reader.payload(manifest, never) == small(version + step)


def test_a_worker_that_has_nothing_gets_a_version_by_its_anchor_and_deltas(server, learner, hub, follow):
    for version in range(4):
        learner.publish(version)
    follower = follow(settings(server))
    assert follower.wait_first(20).weights == weights_of(3)
    learner.publish(4)
    assert follower.wait_first(20).weights == weights_of(4)
    assert hub.streamed == [] and learner.told == []


def test_a_hub_whose_streams_break_is_stood_in_for_by_a_chain(server, learner, hub, follow):
    for version in range(3):
        learner.publish(version)
    hub.broken = True
    follower = follow(None, BackedSource(hub, ObjectStoreArrivals(Bucket(settings(server)), TOKEN)))
    assert follower.wait_first(20).weights == weights_of(2)


def test_after_so_many_deltas_a_version_is_there_in_full_too(server, s3, tmp_path):
    learner = Learner(tmp_path, settings(server, object_store_anchor_interval=3))
    full = [learner.publish(version) for version in range(8)]
    deltas = [learner.store.smallest(version)[0] for version in range(1, 8)]
    assert keys(s3) == all_keys(*deltas, full[0], full[3], full[6])


def test_deltas_that_come_to_more_than_the_whole_are_followed_by_one(server, s3, tmp_path):
    def weights(version):
        values = np.frombuffer(weights_of(0), np.uint8).copy()
        for step in range(version):
            change = np.random.default_rng(step)
            values[-200_000:][change.integers(0, 200_000, 80_000)] = change.integers(0, 256, 80_000, np.uint8)
        return values.tobytes()

    learner = Learner(tmp_path, settings(server))
    full = [learner.publish(version, weights(version)) for version in range(6)]
    sizes = [learner.store.smallest(version)[0].total_bytes for version in range(1, 6)]
    assert sum(sizes[:2]) < full[0].total_bytes < sum(sizes)
    in_full = [manifest.version for manifest in full if full_key(manifest) in keys(s3)]
    first = next(count for count in range(1, 6) if sum(sizes[:count]) > full[0].total_bytes)
    assert in_full == [0, first]


def test_a_version_does_not_wait_for_its_copy_in_full(server, s3, tmp_path, monkeypatch):
    learner = Learner(tmp_path, settings(server, object_store_anchor_interval=1))
    learner.publish(0)
    released, original = threading.Event(), Bucket.upload

    def slow(bucket, key, content, total_bytes, metadata):
        if total_bytes > 100_000:
            assert released.wait(20)
        original(bucket, key, content, total_bytes, metadata)

    monkeypatch.setattr(Bucket, "upload", slow)
    manifests = [learner.publish(version, wait_s=0) for version in (1, 2)]
    arrivals = ObjectStoreArrivals(Bucket(settings(server)), TOKEN)
    assert [arrivals.payload(manifest, never) for manifest in manifests] == [weights_of(1), weights_of(2)]
    assert full_key(manifests[0]) not in keys(s3)
    released.set()
    learner.mirror.wait(20)
    assert full_key(manifests[0]) in keys(s3) and full_key(manifests[1]) not in keys(s3)
    assert arrivals.payload(manifests[1], never) == weights_of(2)


def test_at_the_end_of_a_run_only_what_makes_the_newest_version_stays(server, s3, tmp_path):
    learner = Learner(tmp_path, settings(server, object_store_anchor_interval=3))
    full = [learner.publish(version) for version in range(6)]
    s3.create_multipart_upload(Bucket="weights", Key="echo2/run-a/9/digest")
    before = keys(s3)
    learner.finish(run_ended=False)
    assert keys(s3) == before, "a segment has ended, the run goes on"
    learner.finish(run_ended=True)
    assert keys(s3) == all_keys(full[3], *(learner.store.smallest(version)[0] for version in (4, 5)))
    assert s3.list_multipart_uploads(Bucket="weights").get("Uploads", []) == []
    assert ObjectStoreArrivals(Bucket(settings(server)), TOKEN).payload(full[5], never) == weights_of(5)


def test_the_end_of_a_run_that_copied_nothing_is_quiet(server, learner):
    learner.finish(run_ended=True)
    assert learner.told == []


def test_after_a_failure_a_version_is_there_in_full(server, s3, tmp_path, monkeypatch):
    learner = Learner(tmp_path, settings(server))
    learner.publish(0)
    with monkeypatch.context() as away:
        away.setattr(Bucket, "upload", refuse)
        learner.publish(1)
    manifest = learner.publish(2)
    assert full_key(manifest) in keys(s3)
    assert [trouble.split(" and ")[0] for trouble in learner.told] == ["version 1 is not in the object store,"]


def refuse(*arguments):
    raise ObjectStoreError("the store refuses", True)


def test_what_could_not_be_removed_is_removed_later(server, s3, tmp_path, monkeypatch):
    learner = Learner(tmp_path, settings(server, deltas=False), retain=1)
    learner.publish(0)
    with monkeypatch.context() as away:
        away.setattr(Bucket, "delete", refuse)
        learner.publish(1)
        learner.publish(2)
    assert learner.told == ["old snapshots stay in the object store: the store refuses"]
    manifest = learner.publish(3)
    assert keys(s3) == all_keys(manifest)


def test_what_is_copied_again_is_not_removed_as_a_leftover(server, s3, tmp_path, monkeypatch):
    """A resumed run makes the same bytes again, whose former copies are on the list of what is to be removed."""
    first = Learner(tmp_path / "a", settings(server))
    for version in range(5):
        first.publish(version)
    again = Learner(tmp_path / "b", settings(server))
    with monkeypatch.context() as away:
        away.setattr(Bucket, "delete", refuse)
        again.publish(1)
    manifests = [again.publish(version) for version in (2, 3, 4)]
    deltas = [again.store.smallest(version)[0] for version in (2, 3, 4)]
    assert keys(s3) == all_keys(first.store.manifest(0), again.store.manifest(1), *deltas)
    arrivals = ObjectStoreArrivals(Bucket(settings(server)), TOKEN)
    assert arrivals.payload(manifests[-1], never) == weights_of(4)


@pytest.mark.parametrize("what", ["catalog", "manifest", "manifest of another version", "manifest of a stranger", "delta"])
def test_what_is_damaged_or_forged_in_a_chain_is_refused_and_the_hub_used(server, s3, learner, hub, follow, caplog, what):
    full = [learner.publish(version) for version in range(3)]
    deltas = {version: learner.store.smallest(version)[0] for version in (1, 2)}
    key, body = f"{full_key(deltas[1])}.json", b"{}"
    if what == "catalog":
        key, body = CATALOG_KEY, b"[{]"
    elif what == "manifest of another version":
        body = deltas[2].model_dump_json().encode()
    elif what == "manifest of a stranger":
        body = sign(deltas[1], signing_key("another token")).model_dump_json().encode()
    elif what == "delta":
        key = full_key(deltas[1])
        body = bytes(deltas[1].total_bytes + 16 * deltas[1].chunk_count)
    found = s3.get_object(Bucket="weights", Key=key)
    s3.put_object(Bucket="weights", Key=key, Body=body, Metadata=found["Metadata"])
    follower = follow(settings(server))
    assert follower.wait_first(30).weights == weights_of(2)
    assert {manifest.payload_digest for manifest in hub.streamed} == {full[2].payload_digest}
    (told,) = warnings(caplog)
    assert "version 2 is fetched from the hub" in told and "damaged" in told


def test_an_old_version_that_the_store_passes_off_as_the_newest_is_refused(server, s3, learner, hub, follow, caplog):
    old, _, newest = [learner.publish(version) for version in range(3)]
    forged = entry_of(newest).model_copy(update={"payload_digest": old.payload_digest, "total_bytes": old.total_bytes})
    text = old.model_dump_json().encode()
    s3.put_object(Bucket="weights", Key=f"echo2/run-a/2/{old.payload_digest}.json", Body=text)
    s3.put_object(Bucket="weights", Key=CATALOG_KEY, Body=CATALOG.dump_json((forged,)))
    assert follow(settings(server)).wait_first(30).weights == weights_of(2)
    assert hub.streamed == [newest]
    assert "manifest of version 2" in warnings(caplog)[0]


def test_a_damaged_catalog_is_made_anew(server, s3, tmp_path):
    first = Learner(tmp_path / "a", settings(server))
    for version in range(3):
        first.publish(version)
    s3.put_object(Bucket="weights", Key=CATALOG_KEY, Body=b"[{]")
    again = Learner(tmp_path / "b", settings(server))
    manifest = again.publish(3)
    assert keys(s3) == all_keys(manifest)
