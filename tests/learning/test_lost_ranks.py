"""What happens to a learner on several ranks when one is lost, or cannot be had."""

import signal
import time

import pytest
import torch
from learning_batches import random_batch
from spread import SETTINGS, followers, spread

from echo2.config import load_config
from echo2.errors import ConfigError
from echo2.learning.learner import LearnerError
from echo2.learning.ranks import Ranks


@pytest.fixture
def make_spread(random_model_folder, tmp_path):
    """Makes a learner on several ranks, and closes it after the test."""
    made = []

    def make(*settings, devices):
        made.append(spread(random_model_folder, tmp_path, *settings, devices=devices))
        return made[-1]

    yield make
    for learner in made:
        learner.close()
    assert followers() == []


@pytest.fixture
def batches(make_learner):
    model = make_learner().model
    return [random_batch(model, step, seed=step, noise=0.1) for step in range(2)]


def test_a_rank_that_is_killed_ends_the_step_with_its_name(make_spread, batches):
    learner = make_spread(devices=3)
    learner.train_step(batches[0])
    followers()[1].kill()
    began_s = time.monotonic()
    with pytest.raises(LearnerError, match=r"rank 2 of the learner's 3 ended in step 1 \(killed by SIGKILL\)"):
        learner.train_step(batches[1])
    assert time.monotonic() - began_s < 60


def test_a_rank_that_stalls_is_named_after_the_time_out(make_spread, batches):
    learner = make_spread("learner.rank_timeout_s=5", devices=3)
    learner.train_step(batches[0])
    followers()[0].send_signal(signal.SIGSTOP)
    with pytest.raises(LearnerError, match=r"^rank 1 of the learner's 3 did not keep up in step 1 within .* = 5: look into"):
        learner.train_step(batches[1])


def test_a_rank_that_ends_at_its_start_is_named(random_model_folder, tmp_path):
    ranks = Ranks(load_config([], [*SETTINGS, "learner.devices=2"]), random_model_folder, tmp_path)
    followers()[0].kill()
    with pytest.raises(LearnerError, match=r"rank 1 of the learner's 2 ended at its start \(killed by SIGKILL\)"):
        ranks.join()
    ranks.close()


def test_a_folder_without_a_model_is_refused_and_leaves_no_rank(tmp_path):
    with pytest.raises(ConfigError, match="cannot be loaded"):
        spread(tmp_path, tmp_path)
    assert followers() == []


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are enough devices")
def test_more_devices_than_there_are_is_refused(random_model_folder, tmp_path):
    with pytest.raises(ConfigError, match=r"learner\.devices = 2, but this machine has \d CUDA devices"):
        spread(random_model_folder, tmp_path, "learner.device=cuda")
