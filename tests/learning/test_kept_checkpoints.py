"""Which checkpoints stay: the newest to go on from, the best as models."""

import pytest
from checkpointing import checkpoints_in

from echo2.learning.simulated_learner import SimulatedLearner


def rewarded_run(checkpoints, rewards, interval=1, learner=None, name="reward"):
    """Commits a step for each reward and saves after every `interval`-th one."""
    learner = learner or SimulatedLearner(0.001, 100)
    for reward in rewards:
        learner.version += 1
        checkpoints.observe({name: reward, "loss": 0.1})
        if learner.version % interval == 0:
            checkpoints.save(learner, cursor=0)
    return learner


def test_the_best_are_kept_beside_the_newest(tmp_path):
    checkpoints = checkpoints_in(tmp_path, "learner.keep_checkpoints=2", "learner.keep_best=2")
    rewarded_run(checkpoints, [0.1, 0.9, 0.2, 0.8, 0.3, 0.4, 0.5])
    assert checkpoints.versions == [2, 4, 6, 7]


def test_the_best_are_still_known_after_a_restart(tmp_path):
    settings = ("learner.keep_checkpoints=1", "learner.keep_best=1")
    learner = rewarded_run(checkpoints_in(tmp_path, *settings), [0.2, 0.9, 0.1])
    again = checkpoints_in(tmp_path, *settings)
    rewarded_run(again, [0.3, 0.4], learner=learner)
    assert again.versions == [2, 5]


def test_a_checkpoint_is_rated_by_all_steps_since_the_one_before(tmp_path):
    checkpoints = checkpoints_in(tmp_path, "learner.keep_checkpoints=1", "learner.keep_best=1")
    rewarded_run(checkpoints, [0.5, 0.5, 0.0, 0.9, 0.1, 0.1], interval=2)
    assert checkpoints.versions == [2, 6]


def test_another_metric_can_be_chosen(tmp_path):
    chosen = ("learner.keep_checkpoints=1", "learner.keep_best=1", "learner.best_metric=exact_match")
    checkpoints = checkpoints_in(tmp_path, *chosen)
    rewarded_run(checkpoints, [0.1, 0.7, 0.2], name="exact_match")
    assert checkpoints.versions == [2, 3]


def test_a_metric_that_is_to_come_later_is_told_once_and_rates_nothing_before(tmp_path, caplog):
    chosen = ("learner.keep_checkpoints=1", "learner.keep_best=1", "learner.best_metric=eval/pass@1")
    checkpoints = checkpoints_in(tmp_path, *chosen)
    rewarded_run(checkpoints, [0.1, 0.7, 0.2])
    assert checkpoints.versions == [3]
    assert caplog.text.count("learner.best_metric = 'eval/pass@1'") == 1


@pytest.mark.parametrize(
    ("name", "steps", "told_at", "named"),
    [
        ("acuracy", [{"accuracy": 0.5, "style": 0.1, "loss": 1.0}] * 3, 0, "accuracy, style"),
        ("acuracy", [{"reward": 0.5}] * 2, 0, "nothing but the reward"),
        ("eval/stile", [{"style": 0.1}, {"eval/style": 0.1, "eval/version": 4.0}], 1, "eval/style"),
        ("style", [{"style": 0.1}] * 2, None, ""),
        ("capacity/observed_utilisation", [{"style": 0.1}] * 2, None, ""),
    ],
)
def test_a_metric_that_no_step_has_is_told_once_with_those_that_came(tmp_path, name, steps, told_at, named):
    checkpoints = checkpoints_in(tmp_path, "learner.keep_best=1", f"learner.best_metric={name}")
    told = [checkpoints.observe(metrics) for metrics in steps]
    assert [place for place, text in enumerate(told) if text] == ([] if told_at is None else [told_at])
    if told_at is not None:
        assert f"learner.best_metric = '{name}'" in told[told_at] and f"gave {named}:" in told[told_at]


def test_nobody_is_told_of_a_metric_that_nothing_is_chosen_by(tmp_path):
    checkpoints = checkpoints_in(tmp_path, "learner.best_metric=acuracy")
    assert checkpoints.observe({"accuracy": 0.5}) == ""


def test_a_rating_that_is_not_finite_does_not_count(tmp_path):
    checkpoints = checkpoints_in(tmp_path, "learner.keep_checkpoints=1", "learner.keep_best=1")
    rewarded_run(checkpoints, [0.1, float("inf"), 0.2])
    assert checkpoints.versions == [3]


def test_a_run_never_has_to_go_on_from_one_of_the_best(tmp_path):
    checkpoints = checkpoints_in(tmp_path, "learner.keep_checkpoints=2", "learner.keep_best=1")
    rewarded_run(checkpoints, [0.9, 0.1, 0.2, 0.3])
    assert checkpoints.versions == [1, 3, 4]
    assert checkpoints.oldest == 3


def test_a_deletion_that_is_cut_off_leaves_nothing_that_looks_like_a_checkpoint(tmp_path, monkeypatch):
    checkpoints = checkpoints_in(tmp_path, "learner.keep_checkpoints=1")

    def cut_off(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("echo2.learning.checkpoint.shutil.rmtree", cut_off)
        rewarded_run(checkpoints, [0.1, 0.2])
    assert checkpoints_in(tmp_path).versions == [2]
