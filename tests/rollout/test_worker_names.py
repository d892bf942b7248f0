"""A worker's name belongs to one process: who holds it, who takes it over, and what becomes of the other one."""

import signal

import pytest
from model_runs import look
from patience import wait_until

from echo2.errors import NameTaken
from echo2.hub.client import HubClient

FEW = ("batch.groups=4", "batch.members=2", "batch.drop_zero_variance=false", "worker.slots=4", "run.steps=3")
QUICK = ("worker.heartbeat_interval_s=0.2", "hub.heartbeat_timeout_s=1.5")
TAKEN = "another worker has taken the name same: give each worker a --name of its own"


def test_of_two_workers_of_one_name_the_later_stays_and_the_earlier_ends(make_run, serve, publish, start_worker, tmp_path):
    run = make_run(*FEW, *QUICK, "worker.simulated_group_latency_s=60")
    _, client = serve(run)
    publish(run, client, 0)
    first = start_worker(client, run.token, "same")
    wait_until(lambda: client.status()["groups"].get("leased") == 4)
    (former,) = client.live_workers()
    second = start_worker(client, run.token, "same")
    assert first.wait(30) == 2
    said = (tmp_path / "same.log").read_text()
    assert said.count(TAKEN) == 1 and "Traceback" not in said
    (now,) = client.live_workers()
    assert now != former and second.poll() is None
    assert len(look(run, "SELECT * FROM workers")) == 2, "nobody registered again"
    told = [(event["subject"], event["detail"]) for event in look(run, "SELECT * FROM events WHERE kind = 'worker lost'")]
    assert told == [(former, f"{now} has taken its name")]


def test_a_worker_that_was_stopped_while_another_took_its_name_ends_when_it_wakes(
    make_run, serve, publish, start_worker, tmp_path
):
    run = make_run(*FEW, *QUICK)
    hub, client = serve(run)
    publish(run, client, 0)
    stopped = start_worker(client, run.token, "same")
    wait_until(client.live_workers)
    stopped.send_signal(signal.SIGSTOP)
    wait_until(lambda: not client.live_workers())
    second = start_worker(client, run.token, "same")
    (holder,) = wait_until(client.live_workers)
    hub.stop()
    hub.start()
    hub.wait_ready()
    stopped.send_signal(signal.SIGCONT)
    assert stopped.wait(30) == 2
    assert TAKEN in (tmp_path / "same.log").read_text()
    assert client.live_workers() == [holder] and second.poll() is None


def test_a_worker_that_was_silent_for_too_long_registers_again(make_run, serve, publish, start_worker):
    run = make_run(*FEW, *QUICK)
    _, client = serve(run)
    publish(run, client, 0)
    worker = start_worker(client, run.token, "same")
    (former,) = wait_until(client.live_workers)
    worker.send_signal(signal.SIGSTOP)
    wait_until(lambda: not client.live_workers())
    worker.send_signal(signal.SIGCONT)
    (now,) = wait_until(client.live_workers)
    assert now != former
    assert len(client.take_batch(0).groups) == 4
    assert worker.poll() is None


def test_a_name_goes_back_to_its_former_holder_only_when_it_is_free(make_run, serve):
    run = make_run(*FEW)
    _, first = serve(run)
    second = HubClient(first.url, run.token)
    first.register("same")
    holder = second.register("same").worker_id
    with pytest.raises(NameTaken, match="another worker has taken the name same"):
        first.register("same")
    again = second.register("same").worker_id
    assert first.live_workers() == [again] != [holder]
    first.register("other")
    second.leave(again)
    first.register("same")
    second.close()
