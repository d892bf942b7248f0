"""What a worker says when its hub is away."""

import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from patience import wait_until

from echo2.dissemination.manifest import describe
from echo2.hub import client as hub_client
from echo2.hub.client import HubClient, HubUnavailable

FEW = ("batch.groups=4", "batch.members=2", "batch.drop_zero_variance=false", "worker.slots=4", "run.steps=1")
LEASED = ("worker.simulated_group_latency_s=2", "hub.lease_timeout_s=600", "hub.heartbeat_timeout_s=300")
OUTAGE = ("worker.request_timeout_s=1", "worker.orphan_timeout_s=9", "worker.heartbeat_interval_s=0.2")


@pytest.fixture
def hole():
    """Takes connections and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("has_disk", [True, False])
def test_an_outage_is_told_once_and_what_becomes_of_the_groups(make_run, serve, publish, start_worker, tmp_path, has_disk):
    spool = tmp_path / "spool"
    run = make_run(*FEW, *LEASED, *OUTAGE, f"worker.spool_directory={spool}")
    hub, client = serve(run)
    publish(run, client, 0)
    worker = start_worker(client, run.token)
    wait_until(lambda: client.status()["groups"].get("leased") == 4)
    if not has_disk:
        spool.rmdir()
        spool.write_text("a file where the folder was")
    hub.stop()
    assert worker.wait(60) == 2
    said = (tmp_path / "w.log").read_text()
    assert said.count("did not answer") == 1, said
    assert not re.search(r"\b0 s", said), said
    folder = spool / run.run_id / "w"
    fate = f"4 groups wait in {folder} for the next worker of this name" if has_disk else "4 groups are lost"
    assert f"hub {client.url} could not be told everything: {fate}" in said


def test_how_long_the_hub_is_away_is_told_over_all_requests(hole):
    client = HubClient(hole, "t", request_timeout_s=0.1, patience_s=0.0)
    with pytest.raises(HubUnavailable, match=r"did not answer \("):
        client.status()
    time.sleep(1.2)
    with pytest.raises(HubUnavailable, match=r"did not answer for 1 s \("):
        client.status()
    client.close()


def test_the_warning_comes_again_while_the_hub_stays_away(hole, monkeypatch, caplog):
    client = HubClient(hole, "t")
    for _ in range(3):
        client.warn(HubUnavailable("away"))
    monkeypatch.setattr(hub_client, "WARNING_PAUSE_S", 0.0)
    client.warn(HubUnavailable("still away"))
    assert [record.getMessage() for record in caplog.records] == ["away", "still away"]
    client.close()


def test_a_request_under_way_when_its_caller_closes_ends_without_a_word(hole, caplog):
    client = HubClient(hole, "t", request_timeout_s=0.5, patience_s=60.0)
    with ThreadPoolExecutor(2) as threads:
        under_way = [
            threads.submit(client.lease, "w", 1, 0.0),
            threads.submit(lambda: list(client.stream_base(describe(b"weights", "run", 0, 16), 0, 1))),
        ]
        time.sleep(0.2)
        client.close()
        for request in under_way:
            error = request.exception(10.0)
            assert isinstance(error, HubUnavailable), error
            client.warn(error)
    with pytest.raises(HubUnavailable, match="closed by its own side"):
        client.status()
    assert caplog.records == []
