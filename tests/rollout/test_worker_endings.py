"""Workers that end before they have generated anything, and what the hub hears of it."""

import importlib.util
import signal
import socket
import threading

import pytest
from model_runs import look
from patience import PATIENCE_S, wait_until

from echo2.config import Config, override
from echo2.errors import ConfigError
from echo2.hub.client import HubClient
from echo2.rollout.worker import Worker

FEW = ("batch.groups=4", "batch.members=2", "batch.drop_zero_variance=false", "worker.slots=4", "run.steps=3")


def goodbyes(run):
    return [(event["kind"], event["detail"]) for event in look(run, "SELECT * FROM events WHERE kind LIKE 'worker l%'")]


without_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM's engine can be made here")


@without_vllm
def test_a_worker_whose_engine_cannot_be_made_tells_the_hub_why(make_run, serve, start_worker, tmp_path):
    run = make_run(*FEW)
    _, client = serve(run)
    assert start_worker(client, run.token, "w", "worker.engine=vllm").wait(30) == 2
    said = (tmp_path / "w.log").read_text().splitlines()
    assert len(said) == 3 and said[-1].startswith("echo2: worker.engine = 'vllm' needs vLLM"), said
    assert goodbyes(run) == [("worker left", said[-1].removeprefix("echo2: "))]
    assert client.live_workers() == []


@without_vllm
def test_a_worker_that_cannot_begin_takes_part_in_no_broadcast_any_more(make_run, serve):
    run = make_run(*FEW, "dissemination.peers=true")
    _, client = serve(run)
    welcome = client.register("w")
    config = override(Config.model_validate(welcome.config), ["worker.engine=vllm"])
    worker = Worker(client, "w", config, welcome, run.token)
    assert "broadcast-peer" in {thread.name for thread in threading.enumerate()}
    with pytest.raises(ConfigError):
        worker.run()
    assert "broadcast-peer" not in {thread.name for thread in threading.enumerate()}


def test_a_worker_whose_own_port_is_taken_tells_the_hub_why(make_run, serve, start_worker, tmp_path):
    run = make_run(*FEW, "fleet.workers=0")
    _, client = serve(run)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert start_worker(client, run.token, "w", f"worker.peer_port={port}").wait(30) == 2
    ((kind, reason),) = goodbyes(run)
    assert kind == "worker left" and f"worker.peer_port = {port}: cannot listen there (Address already in use)" in reason


def test_a_worker_that_ends_by_a_defect_tells_the_hub_its_name(make_run, serve, start_worker, tmp_path):
    run = make_run(*FEW)
    _, client = serve(run)
    (run.model / "config.json").write_text("[]")
    assert start_worker(client, run.token, "w", "worker.engine=transformers").wait(60) != 0
    ((kind, reason),) = goodbyes(run)
    assert kind == "worker left" and reason in (tmp_path / "w.log").read_text() and reason


@pytest.mark.parametrize("notice", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_still_waits_for_its_hub_leaves_in_order(start_worker, tmp_path, notice):
    log = tmp_path / "w.log"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = HubClient(f"http://127.0.0.1:{silent.getsockname()[1]}", "t")
        worker = start_worker(client, "t")
        silent.accept()
        worker.send_signal(notice)
        assert worker.wait(PATIENCE_S) == 0
        joins, left = log.read_text().splitlines()
        assert joins.endswith(f"joins hub {client.url}") and left == f"worker w left before it had joined hub {client.url}"
        client.close()


def test_a_worker_that_pauses_between_two_tries_leaves_in_order(start_worker, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = HubClient(f"http://127.0.0.1:{listener.getsockname()[1]}", "t")
    worker = start_worker(client, "t")
    wait_until(lambda: "joins" in (tmp_path / "w.log").read_text())
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(PATIENCE_S) == 0
    client.close()


def test_a_notice_that_comes_before_there_is_an_engine_is_heeded(make_run, serve):
    run = make_run(*FEW)
    _, client = serve(run)
    welcome = client.register("w")
    leaving = threading.Event()
    config = override(Config.model_validate(welcome.config), ["worker.engine=vllm"])
    worker = Worker(client, "w", config, welcome, run.token, leaving)
    leaving.set()
    worker.run()
    assert goodbyes(run) == [("worker left", "it was told to end")]
