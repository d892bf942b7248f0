"""The weights that a run's adapters belong to, from the hub."""

import time

import pytest
from patience import wait_until

from echo2.dissemination.manifest import signing_key
from echo2.dissemination.receiver import receive
from echo2.dissemination.store import SnapshotStore
from echo2.errors import SnapshotError, UserError

WEIGHTS = bytes(range(256)) * 3000


def test_a_worker_gets_the_base_whole_and_checked(make_run, serve):
    run = make_run("dissemination.chunk_bytes=65536")
    SnapshotStore(run.base, run.run_id, run.token).publish(0, WEIGHTS, run.config.dissemination.chunk_bytes)
    _, client = serve(run)
    manifest = client.base()
    assert manifest.chunk_count > 5

    def fetch(first, count):
        return client.stream_base(manifest, first, count)

    assert receive(manifest, fetch, signing_key(run.token), run.run_id) == WEIGHTS
    with pytest.raises(SnapshotError):
        receive(manifest, fetch, signing_key("another token"), run.run_id)


def test_a_run_without_adapters_has_none(make_run, serve):
    _, client = serve(make_run())
    with pytest.raises(UserError, match="the run has no base"):
        client.base()


def test_a_worker_that_is_told_to_leave_while_it_fetches_the_base_leaves_in_order(make_run, serve, start_worker):
    run = make_run(
        "worker.engine=transformers", "learner.lora.rank=4", "dissemination.uplink_bytes_per_s=20000",
        "dissemination.chunk_bytes=65536",
    )  # fmt: skip
    SnapshotStore(run.base, run.run_id, run.token).publish(0, WEIGHTS, run.config.dissemination.chunk_bytes)
    _, client = serve(run)
    worker = start_worker(client, run.token)
    wait_until(client.live_workers)
    time.sleep(1.0)
    worker.terminate()
    assert worker.wait(20) == 0
    assert client.live_workers() == []
