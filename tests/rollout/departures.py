"""What is left of long generations when one of two workers goes, whichever engine they have."""

import signal

import numpy as np
from model_runs import LONG, Learner, look, tokens_drawn
from patience import wait_until

LENGTH = 480
INTERVAL = 40
ALL = 2 * 8 * LENGTH
"""Tokens of what one worker has under way."""


def one_of_two_goes(make_run, serve, start_worker, tmp_path, engine, python, how):
    """Send `how` to worker a when it has drawn four fifths of its tokens, and have b finish everything.

    Gives the run, the batch, and the tokens that a had said to have drawn.
    """
    run = make_run(*LONG, f"worker.engine={engine}", f"worker.hand_in_tokens={INTERVAL}", "run.steps=1")
    learner = Learner(run, tmp_path / "cache", endless=True)
    _, client = serve(run)
    learner.publish(client, 0)
    workers = {name: start_worker(client, run.token, name, python=python) for name in ("a", "b")}
    drawn = wait_until(lambda: (found := tokens_drawn(client, "a")) >= 0.8 * ALL and found)
    workers["a"].send_signal(how)
    code = workers["a"].wait(30)
    assert code == (0 if how == signal.SIGTERM else -how), (tmp_path / "a.log").read_text()
    kept = look(run, "SELECT SUM(tokens) AS tokens FROM attempts WHERE worker_id LIKE 'a-%'")[0]["tokens"]
    batch = client.take_batch(0)
    check_whole(batch, learner)
    assert all(len(m.rollout.token_ids) == LENGTH for group in batch.groups for m in group.members)
    return run, client, drawn, kept


def check_whole(batch, learner):
    """Every member is one completion, each token with the log-probability that the policy gives it there."""
    assert learner.gaps(batch).mean() <= 1e-4
    assert all((np.diff(m.rollout.versions) >= 0).all() for group in batch.groups for m in group.members)


def check_nothing_is_lost(make_run, serve, start_worker, tmp_path, engine, python):
    """On SIGTERM, as on a spot notice."""
    run, client, drawn, kept = one_of_two_goes(make_run, serve, start_worker, tmp_path, engine, python, signal.SIGTERM)
    assert kept >= drawn >= 0.8 * ALL
    assert client.status()["wasted_tokens"] == {}
    continued = look(run, "SELECT attempt, outcome FROM attempts WHERE outcome = 'part' AND worker_id LIKE 'a-%'")
    # Its groups may have been finished while it was told to go.
    assert continued or kept == ALL


def check_an_interval_is_lost(make_run, serve, start_worker, tmp_path, engine, python):
    """On kill −9."""
    run, client, drawn, kept = one_of_two_goes(make_run, serve, start_worker, tmp_path, engine, python, signal.SIGKILL)
    members = ALL // LENGTH
    assert kept >= drawn - members * INTERVAL
    assert client.status()["wasted_tokens"].get("lost", 0) <= members * INTERVAL
    assert look(run, "SELECT COUNT(*) AS n FROM attempts WHERE outcome = 'lost'")[0]["n"] > 0
