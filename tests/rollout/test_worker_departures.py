"""Workers of long generations that go, stay away or run out of memory, with the transformers engine."""

import sys

import departures
import pytest
from model_runs import LONG, Learner, look, tokens_drawn
from patience import wait_until

from echo2.hub.client import HubClient

pytestmark = pytest.mark.slow


def test_sigterm_loses_no_token(make_run, serve, start_worker, tmp_path):
    departures.check_nothing_is_lost(make_run, serve, start_worker, tmp_path, "transformers", sys.executable)


def test_kill_9_loses_at_most_what_is_drawn_between_two_hand_ins(make_run, serve, start_worker, tmp_path):
    departures.check_an_interval_is_lost(make_run, serve, start_worker, tmp_path, "transformers", sys.executable)


def test_a_worker_whose_name_is_taken_hands_in_what_it_has_drawn(make_run, serve, start_worker, tmp_path):
    run = make_run(*LONG, "worker.engine=transformers", "worker.hand_in_tokens=100000", "run.steps=1")
    _, client = serve(run)
    Learner(run, tmp_path / "cache", endless=True).publish(client, 0)
    worker = start_worker(client, run.token, "a")
    drawn = wait_until(lambda: (found := tokens_drawn(client, "a")) >= 0.3 * departures.ALL and found)
    taker = HubClient(client.url, run.token)
    taker.register("a")
    taker.close()
    assert worker.wait(30) == 2, (tmp_path / "a.log").read_text()
    kept = look(run, "SELECT SUM(tokens) AS tokens FROM attempts WHERE worker_id LIKE 'a-%'")[0]["tokens"]
    assert kept >= drawn
