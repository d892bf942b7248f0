"""Snapshots by way of a bucket, against a real S3 API server on loopback."""

import random
import time

from buckets import CHUNK_BYTES, MB, TOKEN, Learner, all_keys, full_key, keys, never, settings, warnings, weights_of
from patience import wait_until

from echo2.dissemination.object_store import arrivals as arrivals_module
from echo2.dissemination.object_store.arrivals import ObjectStoreArrivals
from echo2.dissemination.object_store.bucket import Bucket
from echo2.dissemination.object_store.mirror import Mirror
from echo2.dissemination.store import SnapshotStore
from flows.dissemination import Export, Publisher


def test_a_worker_has_weights_and_deltas_from_the_bucket_and_nothing_from_the_hub(server, learner, hub, follow):
    learner.publish(0)
    follower = follow(settings(server))
    assert follower.wait_first(20).weights == weights_of(0)
    learner.publish(1)
    second = follower.wait_first(20)
    assert second.weights == weights_of(1)
    assert second.fetched_bytes < len(weights_of(1)) / 20, "a delta"
    assert hub.streamed == [] and learner.told == []


def test_what_lies_in_the_bucket_is_under_its_digest_and_unreadable(server, learner, s3):
    manifests = [learner.publish(version) for version in (0, 1)]
    delta = learner.store.smallest(1)[0]
    assert keys(s3) == all_keys(manifests[0], delta)
    assert full_key(delta) == f"echo2/run-a/1/{delta.payload_digest}"
    stored = s3.get_object(Bucket="weights", Key=full_key(manifests[0]))["Body"].read()
    assert len(stored) == len(weights_of(0)) + 16 * manifests[0].chunk_count
    assert not any(weights_of(0)[start : start + 16] in stored for start in range(0, 100_000, 1000))
    stranger = ObjectStoreArrivals(Bucket(settings(server)), "another token")
    assert stranger.payload(manifests[0], never) is None


def test_a_large_payload_goes_up_in_parts_and_comes_down_in_ranges_side_by_side(server, s3, tmp_path, monkeypatch):
    payload = random.Random(0).randbytes(30 * MB)
    chosen = settings(server, chunk_bytes=256 * 1024)
    manifest = Learner(tmp_path, chosen).publish(0, payload)
    head = s3.head_object(Bucket="weights", Key=full_key(manifest))
    assert head["ETag"].strip('"').endswith("-4"), "parts of 8 MiB"
    bucket, ranges = Bucket(chosen), []

    def note(params, **_):
        if not params["url_path"].endswith(".json"):
            ranges.append(tuple(int(end) for end in params["headers"]["Range"].removeprefix("bytes=").split("-")))

    bucket._client.meta.events.register("before-call.s3.GetObject", note)
    assert ObjectStoreArrivals(bucket, TOKEN).payload(manifest, never) == payload
    sealed = 256 * 1024 + 16
    assert sorted(ranges) == [(start, min(start + 32 * sealed, head["ContentLength"]) - 1) for start, _ in sorted(ranges)]
    assert [start for start, _ in sorted(ranges)] == [number * 32 * sealed for number in range(4)]


def test_ranges_travel_at_the_same_time(server, learner, monkeypatch):
    monkeypatch.setattr(arrivals_module, "RANGE_BYTES", 2 * CHUNK_BYTES)
    manifest, bucket = learner.publish(0), Bucket(settings(server))
    under_way, most = [], []
    original = bucket._client.get_object

    def slow(**arguments):
        if arguments["Key"].endswith(".json"):
            return original(**arguments)
        under_way.append(1)
        most.append(len(under_way))
        time.sleep(0.05)
        under_way.pop()
        return original(**arguments)

    monkeypatch.setattr(bucket._client, "get_object", slow)
    assert ObjectStoreArrivals(bucket, TOKEN).payload(manifest, never) == weights_of(0)
    assert max(most) == 4 and len(most) == -(-manifest.chunk_count // 2)


def test_what_arrived_is_not_asked_for_again_after_a_break(server, learner, monkeypatch, caplog):
    monkeypatch.setattr(arrivals_module, "RANGE_BYTES", 4 * CHUNK_BYTES)
    manifest, bucket = learner.publish(0), Bucket(settings(server, object_store_concurrency=1))
    starts, original = [], bucket._client.get_object

    def break_within(**arguments):
        answer = original(**arguments)
        if arguments["Key"].endswith(".json"):
            return answer
        starts.append(int(arguments["Range"].removeprefix("bytes=").split("-")[0]) // (CHUNK_BYTES + 16))
        if len(starts) == 3:
            # Two chunks and a half, then an end of the stream before its length.
            answer["Body"]._raw_stream.read = short(answer["Body"]._raw_stream.read, 2.5 * (CHUNK_BYTES + 16))
        return answer

    def short(read, left):
        def limited(amount):
            nonlocal left
            piece = read(int(min(amount, left)))
            left -= len(piece)
            return piece

        return limited

    monkeypatch.setattr(bucket._client, "get_object", break_within)
    assert ObjectStoreArrivals(bucket, TOKEN).payload(manifest, never) == weights_of(0)
    assert starts[:4] == [0, 4, 8, 10]
    assert len(starts) == len(set(starts))
    assert warnings(caplog) == []


def test_only_the_newest_stay_and_only_this_runs_are_removed(server, s3, tmp_path):
    s3.put_object(Bucket="weights", Key="echo2/run-b/0/digest", Body=b"another run's")
    unfinished = s3.create_multipart_upload(Bucket="weights", Key="echo2/run-a/0/digest")
    learner = Learner(tmp_path, settings(server, deltas=False), retain=2)
    manifests = {version: learner.publish(version) for version in range(4)}
    assert keys(s3) == [*all_keys(manifests[2], manifests[3]), "echo2/run-b/0/digest"]
    uploads = s3.list_multipart_uploads(Bucket="weights").get("Uploads", [])
    assert unfinished["UploadId"] not in [upload["UploadId"] for upload in uploads]


def test_a_resumed_run_takes_back_what_it_makes_anew(server, s3, tmp_path):
    first = Learner(tmp_path / "a", settings(server), retain=3)
    for version in range(3):
        first.publish(version)
    again = Learner(tmp_path / "b", settings(server), retain=3)
    anew = again.publish(1, weights_of(7))
    assert keys(s3) == all_keys(first.store.manifest(0), anew)


def test_a_worker_that_leaves_does_not_wait_for_the_bucket(server, learner, caplog):
    manifest = learner.publish(0)
    closed = ObjectStoreArrivals(Bucket(settings(server)), TOKEN)
    closed.close()
    assert closed.payload(manifest, never) is None
    assert ObjectStoreArrivals(Bucket(settings(server)), TOKEN).payload(manifest, lambda: True) is None
    assert warnings(caplog) == []


def test_a_cap_on_the_uplink_holds_for_the_upload_too(server, s3, tmp_path):
    learner = Learner(tmp_path, settings(server, uplink_bytes_per_s=1e6))
    began = time.monotonic()
    learner.publish(0, random.Random(0).randbytes(2 * MB))
    assert 1.0 < time.monotonic() - began < 6.0


def test_a_worker_process_trains_by_way_of_the_bucket(server, s3, make_run, serve, start_worker, tmp_path):
    """Real hub and worker: manifests from the hub, payloads from the bucket."""
    run = make_run(
        "dissemination.object_store=s3://weights/echo2",
        f"dissemination.object_store_endpoint_url={server}",
        "worker.snapshot_source=object_store",
    )
    _, client = serve(run)
    store = SnapshotStore(run.snapshots, run.run_id, run.token)
    chosen, told = run.config.dissemination, []
    publisher = Publisher(store, chosen, Mirror(Bucket(chosen), run.run_id, run.token, 8, 8, told.append))
    start_worker(client, run.token, "a", "worker.simulated_group_latency_s=0.05")
    for version in (0, 1):
        publisher.publish(Export(version, lambda version=version: weights_of(version)))
        client.announce(version)
        wait_until(lambda version=version: client.await_receivers(version, 1.0)[0])
    assert told == []
    assert "fetched from the hub" not in (tmp_path / "a.log").read_text()
