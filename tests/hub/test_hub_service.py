"""The hub as a process over real HTTP, with simulated workers where work has to be done."""

import http.server
import os
import signal
import sqlite3
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from patience import PATIENCE_S, wait_until

from echo2.errors import UserError
from echo2.hub.client import HubClient, HubUnavailable
from echo2.protocol import GroupRollouts, Rollout, Telemetry
from echo2.report import render_status
from echo2.rollout.outbox import Outbox
from echo2.rollout.spool import Spool

HERE = str(Path(__file__).parent)
FEW = ("batch.groups=2", "batch.members=2", "run.steps=6", "sampling.max_completion_tokens=4")


def group_of(lease, text_ids=(4, 5), version=0):
    rollouts = tuple(
        Rollout(m, np.array([*text_ids, 2], np.int32), np.full(3, -0.1, np.float32), np.full(3, version, np.int32), "stop")
        for m in lease.members
    )
    return GroupRollouts(lease.group_id, lease.attempt, rollouts)


def join(client, name="w", version=0, snapshot_id=None):
    worker_id = client.register(name).worker_id
    if snapshot_id:
        client.loaded(worker_id, Telemetry(version=version, snapshot_id=snapshot_id))
    return worker_id


def test_every_route_but_health_wants_the_token(make_run, serve):
    _, client = serve(make_run(*FEW))
    assert httpx.get(f"{client.url}/health").status_code == 200
    for path in ("/v1/status", "/metrics", "/v1/snapshots/newest", "/v1/batches/0"):
        assert httpx.get(f"{client.url}{path}").status_code == 401
    stranger = HubClient(client.url, "wrong", patience_s=1.0)
    with pytest.raises(UserError, match="ECHO2_TOKEN"):
        stranger.register("w")


@pytest.mark.parametrize("token", ["", " t", "t ", "t\n", "a\nb", "a\0b", "é"])
def test_a_token_that_no_request_can_carry_is_refused_before_any(token):
    with pytest.raises(UserError, match=r"its token cannot be sent \(.+\): check both"):
        HubClient("http://127.0.0.1:1", token)


def test_of_a_worker_that_has_not_generated_yet_nothing_is_made_up(make_run, serve):
    run = make_run(*FEW)
    _, client = serve(run)
    worker_id = client.register("w").worker_id
    client.heartbeat(worker_id, Telemetry())
    status = client.status()
    assert status["workers"][0]["version"] is None
    assert status["workers"][0]["latency_s"] == {"p50": None, "p90": None, "p99": None}
    assert f"| {worker_id} | live | – | 0 | 0 |" in render_status(status)


def test_damaged_and_oversized_bodies_are_refused_and_change_nothing(make_run, serve, publish):
    run = make_run(*FEW, "hub.max_body_bytes=100000")
    _, client = serve(run)
    worker_id = join(client, snapshot_id=publish(run, client, 0))
    headers = {"Authorization": f"Bearer {run.token}"}
    url = f"{client.url}/v1/workers/{worker_id}/rollouts"
    before = client.status()["groups"]
    for body, status in ((b"", 422), (b"\x08" + b"\0" * 7 + b"{}", 422), (b"x" * 200000, 413)):
        answer = httpx.post(url, content=body, headers=headers)
        assert answer.status_code == status
        assert set(answer.json()) == {"error"}
    unsized = httpx.post(url, content=iter([b"x"]), headers=headers)
    assert unsized.status_code == 411
    assert client.status()["groups"] == before


def test_each_of_several_groups_in_one_body_has_a_verdict_of_its_own(make_run, serve, publish):
    run = make_run(*FEW)
    _, client = serve(run)
    worker_id = join(client, snapshot_id=publish(run, client, 0))
    first, second = (group_of(lease) for lease in client.lease(worker_id, 2, wait_s=5.0).leases)
    never_leased = replace(second, attempt=7)
    broken = replace(second, rollouts=(replace(second.rollouts[0], log_probs=second.rollouts[0].log_probs + 9.0),))
    found = client.post(worker_id, [first, never_leased, first, broken, second])
    assert [found[0], found[2], found[4]] == ["accepted", "duplicate", "accepted"]
    assert "was never leased" in str(found[1]) and "log-probability" in str(found[3])


def test_a_worker_without_a_snapshot_gets_no_lease(make_run, serve, publish):
    run = make_run(*FEW)
    _, client = serve(run)
    worker_id = join(client)
    snapshot_id = publish(run, client, 0)
    assert client.lease(worker_id, 4, wait_s=0.2).leases == ()
    client.loaded(worker_id, Telemetry(version=0, snapshot_id=snapshot_id))
    assert len(client.lease(worker_id, 4, wait_s=5.0).leases) == 4


def test_a_worker_that_holds_a_snapshot_that_was_taken_back_gets_no_lease(make_run, serve, publish):
    run = make_run(*FEW)
    _, client = serve(run)
    publish(run, client, 0)
    worker_id = join(client, version=0, snapshot_id="0-other-weights")
    assert client.lease(worker_id, 4, wait_s=0.2).leases == ()


def test_a_batch_comes_when_its_groups_are_scored(make_run, serve, publish):
    run = make_run(*FEW, "task.type=arithmetic", "task.exact_match_weight=0.5", "batch.drop_zero_variance=false")
    _, client = serve(run)
    worker_id = join(client, snapshot_id=publish(run, client, 0))
    for lease in client.lease(worker_id, 2, wait_s=5.0).leases:
        assert client.post(worker_id, [group_of(lease)]) == ["accepted"]
    batch = client.take_batch(0)
    assert [g.group_id for g in batch.groups] == [0, 1]
    assert all(len(g.members) == 2 and g.prompt_token_ids for g in batch.groups)
    assert batch.scored["groups"] == 2
    client.commit(0, {"loss": 1.0}, 0)
    client.commit(0, {"loss": 1.0}, 0)
    status = client.status()
    assert status["step"] == 1 and status["groups"]["trained"] == 2


def test_an_accepted_rollout_survives_kill_9_of_the_hub(make_run, serve, publish):
    run = make_run(*FEW, "batch.drop_zero_variance=false")
    process, client = serve(run)
    worker_id = join(client, snapshot_id=publish(run, client, 0))
    leases = client.lease(worker_id, 2, wait_s=5.0).leases
    assert client.post(worker_id, [group_of(leases[0])]) == ["accepted"]
    os.kill(process._process.pid, signal.SIGKILL)
    wait_until(lambda: process._process.poll() is not None)
    time.sleep(1.0)
    process.keep_alive()
    assert client.post(worker_id, [group_of(leases[0])]) == ["duplicate"]
    assert client.post(worker_id, [group_of(leases[1])]) == ["accepted"]
    assert [g.group_id for g in client.take_batch(0).groups] == [0, 1]


def test_a_hub_that_was_killed_is_told_by_its_signal_and_remembered_once_it_is_back(make_run, serve, caplog):
    process, client = serve(make_run(*FEW))
    os.kill(process._process.pid, signal.SIGKILL)
    wait_until(lambda: process._process.poll() is not None)
    time.sleep(1.0)

    def restarts():
        process.keep_alive()
        return [(event["subject"], event["detail"]) for event in client.status()["events"] if event["kind"] == "hub restarted"]

    wait_until(restarts)
    assert [restarts() for _ in range(3)][-1] == [("hub", "killed by SIGKILL")]
    assert caplog.messages == ["the hub ended and is started again: killed by SIGKILL"]


def test_a_hub_whose_chore_fails_ends_with_an_error_and_says_which(make_run, serve, caplog):
    run = make_run(*FEW)
    process, _ = serve(run)
    with closing(sqlite3.connect(run.ledger)) as database:
        database.execute("DROP TABLE groups")
    assert process._process.wait(20) == 1
    time.sleep(1.0)
    process.keep_alive()
    (message,) = caplog.messages
    assert "exit code 1; it said: sqlite3.OperationalError: no such table: groups" in message


def test_a_silent_worker_is_lost_and_its_leases_go_to_another(make_run, serve, publish):
    run = make_run(*FEW, "hub.heartbeat_timeout_s=1.0", "worker.heartbeat_interval_s=0.3")
    _, client = serve(run)
    snapshot_id = publish(run, client, 0)
    silent = join(client, "silent", snapshot_id=snapshot_id)
    taken = client.lease(silent, 2, wait_s=5.0).leases
    wait_until(lambda: not client.live_workers())
    other = join(client, "other", snapshot_id=snapshot_id)
    again = client.lease(other, 2, wait_s=5.0).leases
    assert [lease.group_id for lease in again] == [lease.group_id for lease in taken]
    assert [lease.attempt for lease in again] == [2, 2]


def test_simulated_workers_fill_batches_and_follow_versions(make_run, serve, publish, start_worker):
    run = make_run(*FEW, "run.steps=7", "batch.drop_zero_variance=false", "worker.simulated_group_latency_s=0.05")
    _, client = serve(run)
    workers = [start_worker(client, run.token, name) for name in ("a", "b")]
    publish(run, client, 0)
    for step in range(6):
        batch = client.take_batch(step)
        assert all(0 <= step - g.oldest_version <= 2 for g in batch.groups)
        client.commit(step, {}, 0)
        publish(run, client, step + 1)
    loaded, late = client.await_receivers(6, 20.0)
    assert (len(loaded), late) == (2, [])
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
    assert [worker.wait(20) for worker in workers] == [0, 0]
    assert client.live_workers() == []
    status = client.status()
    assert [(w["state"], w["reason"]) for w in status["workers"]] == [("left", "it was told to end")] * 2
    generated = sum(count for state, count in status["groups"].items() if state != "leased")
    assert sum(w["groups"] for w in status["workers"]) == generated, "what they generated until the end is told"


def test_a_worker_goes_straight_to_the_newest_version(make_run, serve, publish, start_worker):
    run = make_run(*FEW)
    _, client = serve(run)
    for version in range(4):
        publish(run, client, version)
    start_worker(client, run.token)
    wait_until(client.live_workers)
    loaded, late = client.await_receivers(3, 30.0)
    assert (len(loaded), late) == (1, [])
    assert client.status()["versions_disseminated"] == 1


def test_sigterm_hands_leases_back_at_once(make_run, serve, publish, start_worker):
    run = make_run(*FEW, "worker.simulated_group_latency_s=60")
    _, client = serve(run)
    publish(run, client, 0)
    worker = start_worker(client, run.token)
    wait_until(lambda: client.status()["groups"]["leased"] == 6)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(PATIENCE_S) == 0
    other = join(client, "other", snapshot_id=client.snapshot_route(None, 0.0)[-1].snapshot_id)
    assert len(client.lease(other, 6, wait_s=2.0).leases) == 6


def test_a_worker_with_a_wrong_token_ends_with_one_message(make_run, serve, start_worker, tmp_path):
    _, client = serve(make_run(*FEW))
    assert start_worker(client, "wrong").wait(30) == 2
    said = (tmp_path / "w.log").read_text()
    assert "ECHO2_TOKEN" in said and "Traceback" not in said


def test_a_worker_without_a_hub_ends_by_itself(make_run, serve, publish, start_worker, tmp_path):
    run = make_run(*FEW, "worker.orphan_timeout_s=2")
    process, client = serve(run)
    worker = start_worker(client, run.token)
    wait_until(client.live_workers)
    process.stop()
    assert worker.wait(60) == 2
    assert "out of reach" in (tmp_path / "w.log").read_text()


def test_a_hub_that_accepts_and_never_answers_is_given_up_in_time(make_run):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as hole:
        client = HubClient(f"http://127.0.0.1:{hole.getsockname()[1]}", "t", request_timeout_s=0.3, patience_s=1.0)
        began = time.monotonic()
        with pytest.raises(HubUnavailable, match="did not answer"):
            client.status()
        assert time.monotonic() - began < 10


def test_metrics_are_in_prometheus_format(make_run, serve):
    run = make_run(*FEW)
    _, client = serve(run)
    text = httpx.get(f"{client.url}/metrics", headers={"Authorization": f"Bearer {run.token}"}).text
    assert "echo2_step 0.0" in text and 'echo2_groups{state="trained"} 0.0' in text


def test_a_prompt_that_cannot_be_had_costs_its_group_alone(make_run, serve, publish, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", HERE)
    run = make_run(*FEW, "task.type=python", "task.path=bad_scorers:BadPrompts")
    _, client = serve(run)
    worker_id = join(client, snapshot_id=publish(run, client, 0))
    assert [lease.group_id for lease in client.lease(worker_id, 4, wait_s=5.0).leases] == [0, 2]
    assert [lease.group_id for lease in client.lease(worker_id, 4, wait_s=5.0).leases] == [4, 6]
    status = client.status()
    assert status["groups"]["failed"] >= 2
    assert any("no prompt here" in event["detail"] for event in status["events"])


def test_a_hub_whose_scoring_is_killed_goes_on(make_run, serve, publish):
    run = make_run(*FEW, "batch.drop_zero_variance=false")
    process, client = serve(run)
    worker_id = join(client, snapshot_id=publish(run, client, 0))
    for lease in client.lease(worker_id, 2, wait_s=5.0).leases:
        for child in psutil.Process(process._process.pid).children(recursive=True):
            child.kill()
        client.post(worker_id, [group_of(lease)])
        time.sleep(0.5)
    assert len(client.take_batch(0, lambda: process.keep_alive()).groups) == 2


def test_what_is_no_hub_is_named(tmp_path, start_worker):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = HubClient(f"http://127.0.0.1:{server.server_address[1]}", "t", patience_s=1.0)
    assert start_worker(client, "any").wait(20) == 2
    said = (tmp_path / "w.log").read_text().splitlines()
    assert len(said) == 2 and said[1].startswith("echo2: ") and "hub of an ECHO-2 run" in said[1]
    server.shutdown()


def test_workers_end_by_themselves_when_the_last_step_is_done(make_run, serve, publish, start_worker, tmp_path):
    run = make_run(*FEW, "run.steps=1", "batch.drop_zero_variance=false")
    _, client = serve(run)
    publish(run, client, 0)
    worker = start_worker(client, run.token)
    client.take_batch(0)
    client.commit(0, {}, 0)
    assert worker.wait(20) == 0
    assert "no more for it to do" in (tmp_path / "w.log").read_text()


def test_a_worker_takes_only_settings_of_its_own(start_worker, make_run, serve, tmp_path):
    _, client = serve(make_run(*FEW))
    assert start_worker(client, "any", "w", "batch.groups=3").wait(20) == 2
    assert "batch.groups=3 is not a worker's own setting" in (tmp_path / "w.log").read_text()


def test_a_worker_that_never_loads_a_version_is_named_in_time(make_run, serve, publish):
    run = make_run(*FEW)
    _, client = serve(run)
    publish(run, client, 0)
    idle = join(client, "idle")
    began = time.monotonic()
    assert client.await_receivers(0, timeout_s=1.0) == ([], [idle])
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("most_bytes", [1_000_000, 1_000])
def test_groups_that_wait_in_a_workers_outbox_are_all_handed_in(make_run, serve, publish, tmp_path, most_bytes):
    run = make_run("batch.groups=8", "batch.members=2", "run.steps=2", f"hub.max_body_bytes={most_bytes}")
    _, client = serve(run)
    worker_id = join(client, snapshot_id=publish(run, client, 0))
    groups = [group_of(lease) for lease in client.lease(worker_id, 8, wait_s=5.0).leases]
    requests = []
    client.post = lambda *arguments: requests.append(arguments) or HubClient.post(client, *arguments)
    outbox = Outbox(client, Spool(tmp_path, run.run_id, "w"), "w")
    outbox.put(worker_id, replace(groups[0], attempt=9))
    for group in groups:
        outbox.put(worker_id, group)
    outbox.start()
    outbox.close(20.0)
    generated = client.status()["groups"]
    assert sum(generated.values()) - generated.get("leased", 0) == 8
    assert (len(requests) == 1) == (most_bytes == 1_000_000), "together where the hub takes so much"
