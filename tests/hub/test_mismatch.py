"""Workers whose log-probabilities stand out, from the differences alone; `test_lying_worker.py` has real ones."""

import doctest
import itertools
import math

import numpy as np
import pytest

from echo2.hub import mismatch
from echo2.hub.database import Database
from echo2.hub.group_book import rules_of
from echo2.hub.ledger import Ledger
from echo2.hub.mismatch import mismatches, recent_mismatches
from echo2.protocol import LogProbDifference
from echo2.report import render_status

SPREAD = 1.2
"""Standard deviation of ln distance between groups of the same step and version; a trained model shows less."""


def difference(worker_id, group_id=0, versions=(0, 0), mean=0.1, tokens=40):
    oldest, newest = versions
    return LogProbDifference(
        group_id=group_id,
        worker_id=worker_id,
        oldest_version=oldest,
        newest_version=newest,
        tokens=tokens,
        mean=mean,
        max=3 * mean,
    )


def trained(random, workers, steps, groups=8, lag_of=None, factor=None, per_version=0.05):
    """What steps say about honest workers, but that the distances of those in `factor` are multiplied."""
    numbers = itertools.count()
    found = []
    for step in range(8, 8 + steps):
        for worker_id in workers:
            for _ in range(groups):
                lag = (lag_of or {}).get(worker_id, int(random.integers(0, 4)))
                length = int(random.integers(1, 200))
                mean = (1e-6 + per_version * lag) * math.exp(SPREAD * random.normal()) * (factor or {}).get(worker_id, 1.0)
                versions = (step - lag, step - lag)
                found.append((step, difference(worker_id, next(numbers), versions, mean, length)))
    return found


def accused(found):
    return [worker.worker_id for worker in mismatches(found) if worker.stands_out]


def test_doctests_hold():
    assert doctest.testmod(mismatch).failed == 0


def test_a_score_by_hand():
    # Ranks 3 and 4 of 4 are "b"'s: their sum is 7, by chance 5 on average, with variance 2 · 2 · 5 / 12.
    found = [(0, difference(worker, n, mean=n + 1.0, tokens=10 * (n + 1))) for n, worker in enumerate("aabb")]
    a, b = mismatches(found)
    assert b.score == pytest.approx((7 - 5) / math.sqrt(2 * 2 * 5 / 12)) and a.score == -b.score
    assert b.mean == b.compared_mean == pytest.approx((3 * 30 + 4 * 40) / 70)
    assert b.others_mean == pytest.approx((1 * 10 + 2 * 20) / 30)
    assert (b.groups, b.tokens, b.compared_tokens, b.max) == (2, 70, 70, 12.0)


def test_what_nobody_else_sampled_with_the_same_versions_is_not_compared():
    found = [(0, difference("a", 0, (0, 0), 0.1)), (0, difference("b", 1, (0, 1), 9.0)), (1, difference("b", 2, (0, 0), 9.0))]
    for worker in mismatches(found):
        assert (worker.compared_tokens, worker.compared_mean, worker.others_mean, worker.score) == (0, None, None, 0.0)
        assert not worker.stands_out


@pytest.mark.parametrize("workers", ["ab", "abc", "abcdefgh"])
def test_honest_workers_of_any_length_and_staleness_are_never_accused(workers):
    random = np.random.default_rng(0)
    highest = 0.0
    for _ in range(200):
        found = mismatches(trained(random, workers, steps=20))
        assert not any(worker.stands_out for worker in found)
        highest = max(highest, *(worker.score for worker in found))
    assert highest < 5.0, "the score is one of standard deviations"


def test_an_honest_worker_that_is_always_older_than_the_others_is_not_accused():
    random = np.random.default_rng(1)
    assert accused(trained(random, "abc", steps=20, lag_of={"a": 3})) == []


def test_the_farther_of_two_workers_is_accused_and_not_the_nearer():
    random = np.random.default_rng(2)
    assert accused(trained(random, "ab", steps=20, factor={"b": 4.0})) == ["b"]


def test_one_of_eight_is_found():
    random = np.random.default_rng(3)
    assert accused(trained(random, "abcdefgh", steps=20, factor={"d": 3.0})) == ["d"]


def test_a_difference_of_the_size_of_a_number_format_is_not_held_against_a_worker():
    random = np.random.default_rng(4)
    found = trained(random, "ab", steps=20, lag_of={"a": 0, "b": 0}, factor={"b": 6000.0})
    assert mismatches(found)[1].score > 10.0, "the ranks see it"
    assert accused(found) == []


def test_few_tokens_accuse_nobody():
    random = np.random.default_rng(5)
    assert accused(trained(random, "ab", steps=20, factor={"b": 50.0})) == ["b"]
    short = [(step, d.model_copy(update={"tokens": 1})) for step, d in trained(random, "ab", steps=20, factor={"b": 50.0})]
    assert accused(short) == []


@pytest.fixture
def ledger_of_run(make_run):
    run = make_run("batch.groups=1", "batch.members=1", "run.steps=50", "batch.drop_zero_variance=false")
    database = Database(run.ledger, run.run_id)
    yield Ledger(database, rules_of(run.config)), database
    database.close()


def commit(ledger, database, step, differences):
    with database.transaction():
        database.execute(
            "INSERT OR REPLACE INTO groups (group_id, state, attempt, lease_version, oldest_version, step, leased_at_s)"
            " VALUES (?, 'ready', 1, ?, ?, ?, 0.0)",
            (step, step, step, step),
        )
    ledger.batches.commit(step, {}, 0, differences)


def test_the_ledger_looks_back_on_the_newest_steps_and_forgets_those_that_are_replayed(ledger_of_run):
    ledger, database = ledger_of_run
    for step in range(mismatch.WINDOW_STEPS + 5):
        commit(ledger, database, step, [difference("a", step, tokens=2), difference("b", step, tokens=3)])
    assert [(w.worker_id, w.groups, w.tokens) for w in recent_mismatches(database)] == [("a", 20, 40), ("b", 20, 60)]
    ledger.batches.resume(2)
    assert [(w.worker_id, w.groups) for w in recent_mismatches(database)] == [("a", 2), ("b", 2)]


def test_the_report_has_a_row_for_each_worker(make_run, serve):
    _, client = serve(make_run())
    status = client.status()
    assert status["log_prob_differences"] == []
    status["log_prob_differences"] = [
        {**{name: getattr(w, name) for name in w.__dataclass_fields__}} for w in mismatches([(0, difference("w-1", mean=0.25))])
    ]
    assert "| w-1 | 1 | 40 | 0.25 | 0.75 | – | – | 0.0 |" in render_status(status)
