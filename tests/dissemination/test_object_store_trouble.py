"""A bucket that is away, refuses, or holds what nobody put there: the run goes on by the hub."""

import random
import socket
import sys
import urllib.request

import pytest
from buckets import TOKEN, Learner, full_key, never, settings, warnings, weights_of

from echo2.dissemination.object_store import mirror as mirror_module
from echo2.dissemination.object_store.arrivals import BackedSource, ObjectStoreArrivals
from echo2.dissemination.object_store.bucket import Bucket
from echo2.dissemination.receiver import SourceUnavailable
from echo2.errors import UserError


def change(s3, manifest, make):
    """Put other bytes in the place of an object, with its metadata."""
    found = s3.get_object(Bucket="weights", Key=full_key(manifest))
    body = make(bytearray(found["Body"].read()))
    s3.put_object(Bucket="weights", Key=full_key(manifest), Body=bytes(body), Metadata=found["Metadata"])


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda body: body[:40_000] + bytes([body[40_000] ^ 1]) + body[40_001:], "damaged"),
        (lambda body: body[: len(body) // 2], ""),
        (lambda body: body[:-1], ""),
        (lambda body: body[::-1], "damaged"),
    ],
    ids=["a bit changed", "half of it", "a byte short", "reversed"],
)
def test_an_object_that_is_not_what_was_put_there_is_refused_and_the_hub_used(
    server, s3, learner, hub, follow, caplog, spoil, reason
):
    manifest = learner.publish(0)
    change(s3, manifest, spoil)
    follower = follow(settings(server))
    assert follower.wait_first(30).weights == weights_of(0)
    assert {streamed.version for streamed in hub.streamed} == {0}
    (told,) = warnings(caplog)
    assert "version 0 is fetched from the hub" in told and reason in told
    learner.publish(1)
    assert follower.wait_first(30).weights == weights_of(1)
    assert warnings(caplog)[1:] == ["the object store brings snapshots again"]


def test_an_object_under_another_name_is_refused(server, s3, learner):
    manifests = [learner.publish(version, random.Random(version).randbytes(50_000)) for version in (0, 1)]
    other = s3.get_object(Bucket="weights", Key=full_key(manifests[0]))
    s3.put_object(Bucket="weights", Key=full_key(manifests[1]), Body=other["Body"].read(), Metadata=other["Metadata"])
    arrivals = ObjectStoreArrivals(Bucket(settings(server)), TOKEN)
    assert arrivals.payload(manifests[1], never) is None
    assert arrivals.payload(manifests[0], never) is not None


def unused_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def refusing_strangers(server, s3):
    """The server looks at credentials from now on."""

    def after(requests):
        text = {"Content-Type": "text/plain"}
        asked = urllib.request.Request(f"{server}/moto-api/reset-auth", requests.encode(), text, method="POST")
        urllib.request.urlopen(asked).close()

    after("0")
    yield
    after("inf")


def check_both_sides(chosen, tmp_path, caplog, parts):
    """A learner and a worker go on without the bucket, and each says once why, in one line."""
    learner = Learner(tmp_path, chosen)
    manifests = [learner.publish(version) for version in (0, 1)]
    arrivals = ObjectStoreArrivals(Bucket(chosen), TOKEN)
    assert [arrivals.payload(manifest, never) for manifest in manifests] == [None, None]
    (read,) = warnings(caplog)
    (told,) = learner.told
    assert "version 0 is not in the object store, and workers fetch it from the hub" in told
    assert "version 0 is fetched from the hub" in read
    for sentence in (told, read):
        assert "\n" not in sentence
        assert [part for part in (*parts, chosen.object_store) if part not in sentence] == [], sentence


def test_a_bucket_that_is_not_there_is_told_once(server, s3, tmp_path, caplog):
    chosen = settings(server, object_store="s3://nowhere/echo2")
    check_both_sides(chosen, tmp_path, caplog, ["there is no bucket 'nowhere'", "create it"])


def test_credentials_that_are_refused_are_told_once(server, refusing_strangers, tmp_path, caplog):
    check_both_sides(settings(server), tmp_path, caplog, ["refuses this machine's credentials", "AWS_ACCESS_KEY_ID"])


def test_credentials_that_are_missing_are_told_once(server, s3, tmp_path, caplog, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    check_both_sides(settings(server), tmp_path, caplog, ["no credentials", "AWS_ACCESS_KEY_ID"])


def test_an_endpoint_that_is_away_is_told_once(surroundings, tmp_path, caplog):
    chosen = settings(f"http://127.0.0.1:{unused_port()}")
    check_both_sides(chosen, tmp_path, caplog, ["cannot be reached", "object_store_endpoint_url"])


def test_a_bucket_that_comes_back_is_used_again(server, s3, tmp_path, caplog):
    learner = Learner(tmp_path, settings(server, object_store="s3://late/echo2"))
    learner.publish(0)
    assert len(learner.told) == 1
    s3.create_bucket(Bucket="late")
    manifest = learner.publish(1)
    arrivals = ObjectStoreArrivals(Bucket(settings(server, object_store="s3://late/echo2")), TOKEN)
    assert arrivals.payload(manifest, never) == weights_of(1)
    assert len(learner.told) == 1 and "works again" in caplog.text


def test_a_bucket_that_fails_is_left_alone_for_a_while(surroundings, tmp_path, monkeypatch):
    monkeypatch.setattr(mirror_module, "PAUSE_S", 60.0)
    learner = Learner(tmp_path, settings(f"http://127.0.0.1:{unused_port()}"))
    learner.publish(0)
    monkeypatch.setattr(Bucket, "upload", lambda *_: pytest.fail("it was tried again at once"))
    learner.publish(1)


def test_a_hub_whose_streams_break_is_stood_in_for_by_the_bucket(server, learner, hub, follow, caplog):
    source = BackedSource(hub, ObjectStoreArrivals(Bucket(settings(server)), TOKEN))
    learner.publish(0)
    follower = follow(None, source)
    assert follower.wait_first(20).weights == weights_of(0)
    assert len(hub.streamed) == 1, "the hub is asked first"
    hub.broken = True
    learner.publish(1)
    assert follower.wait_first(20).weights == weights_of(1)
    learner.publish(2)
    assert follower.wait_first(20).weights == weights_of(2)
    (told,) = warnings(caplog)
    assert "version 1 is taken from the object store: connection reset" in told


def test_the_bucket_stands_in_from_the_chunk_that_was_asked_for(server, learner, hub):
    manifest = learner.publish(0)
    source = BackedSource(hub, ObjectStoreArrivals(Bucket(settings(server)), TOKEN))
    hub.broken = True
    start, length = manifest.byte_range(5, 3)
    assert b"".join(source.stream(manifest, 5, 3)) == weights_of(0)[start : start + length]
    hub.break_after = 2
    with pytest.raises(SourceUnavailable):
        list(source.stream(manifest, 0, 10))


def test_without_boto3_the_user_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(UserError, match=r"needs boto3, which is not installed here: pip install 'echo2\[store\]'"):
        Bucket(settings(""))
