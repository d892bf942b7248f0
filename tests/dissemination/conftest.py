"""A real S3 API server on loopback, and both ends of a run's dissemination around it."""

import urllib.request

import pytest


@pytest.fixture(scope="session")
def s3_server():
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def surroundings(monkeypatch, tmp_path):
    """Credentials as the environment has them, none of the machine's own, and little patience."""
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "word"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_EC2_METADATA_DISABLED", "true"),
        ("AWS_CONFIG_FILE", str(tmp_path / "none")),
        ("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none")),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("echo2.dissemination.object_store.bucket.TRIES", 1)
    monkeypatch.setattr("echo2.dissemination.object_store.mirror.PAUSE_S", 0.0)


@pytest.fixture
def server(s3_server, surroundings):
    """Address of the server, which holds nothing."""
    urllib.request.urlopen(urllib.request.Request(f"{s3_server}/moto-api/reset", method="POST")).close()
    return s3_server


@pytest.fixture
def s3(server):
    """A client of the test's own; there is a bucket `weights`."""
    import boto3

    client = boto3.client("s3", endpoint_url=server)
    client.create_bucket(Bucket="weights")
    return client


@pytest.fixture
def learner(server, s3, tmp_path):
    from buckets import Learner, settings

    return Learner(tmp_path, settings(server))


@pytest.fixture
def hub(learner):
    from buckets import Hub

    return Hub(learner.store)


@pytest.fixture
def follow(hub):
    """Starts a worker's follower."""
    from buckets import RUN_ID, TOKEN

    from echo2.dissemination.object_store.arrivals import ObjectStoreArrivals
    from echo2.dissemination.object_store.bucket import Bucket
    from echo2.dissemination.receiver import SnapshotFollower

    started = []

    def start(chosen, source=None):
        arrivals = ObjectStoreArrivals(Bucket(chosen), TOKEN) if chosen else None
        started.append(SnapshotFollower(source or hub, RUN_ID, TOKEN, arrivals=arrivals, wait_s=0.2))
        started[-1].start()
        return started[-1]

    yield start
    for follower in started:
        follower.stop()
