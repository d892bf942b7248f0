"""Workers that generate with the real vLLM, in their own environment, for a hub and a learner in this one."""

from pathlib import Path

import departures
import pytest
from model_runs import SETTINGS, Learner, check_versions_change_in_flight, versions

PYTHON = Path(__file__).parent.parent.parent / ".venv-vllm" / "bin" / "python"
VLLM = (*SETTINGS, "worker.engine=vllm", "batch.groups=4", "batch.members=4", "learner.learning_rate=0.01")

ROOMY = ("worker.slots=8", "worker.cache_bytes=600000000")

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM has an environment of its own: make test-vllm"),
    pytest.mark.slow,
]


def test_a_vllm_worker_follows_the_learner_and_ends_when_it_has_other_weights(make_run, serve, start_worker, tmp_path):
    run = make_run(*VLLM, "staleness.bound=0", "run.steps=3")
    learner = Learner(run, tmp_path / "cache")
    _, client = serve(run)
    first = learner.publish(client, 0)
    worker = start_worker(client, run.token, "v", python=str(PYTHON))

    def keep_waiting():
        assert worker.poll() is None, (tmp_path / "v.log").read_text()

    for step in (0, 1):
        batch = client.take_batch(step, keep_waiting)
        assert versions(batch) == {step}
        assert learner.gaps(batch).mean() <= 1e-4
        learner.learner.train_step(batch)
        client.commit(step, {}, 0)
        if step == 0:
            learner.publish(client, 1)
    learner.publish(client, 2, first)
    assert worker.wait(60) == 2
    assert "the engine does not have the weights of version 2" in (tmp_path / "v.log").read_text()
    assert client.status()["groups"]["leased"] == 0


def test_sigterm_loses_no_token(make_run, serve, start_worker, tmp_path):
    departures.check_nothing_is_lost(make_run, serve, start_worker, tmp_path, "vllm", str(PYTHON))


def test_kill_9_loses_at_most_what_is_drawn_between_two_hand_ins(make_run, serve, start_worker, tmp_path):
    departures.check_an_interval_is_lost(make_run, serve, start_worker, tmp_path, "vllm", str(PYTHON))


def test_versions_change_in_flight(make_run, serve, start_worker, tmp_path):
    check_versions_change_in_flight(make_run, serve, start_worker, tmp_path, str(PYTHON), "worker.engine=vllm", *ROOMY)
