"""Both ends of a run's dissemination around an S3 API server."""

import pytest


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
