"""The loop with which the benchmarks measure what staleness costs."""

import sys

import pytest
from plain_loop import plain_synchronous_losses
from train_command import REPOSITORY, SMALL

from echo2.config import load_config
from echo2.models.preparation import prepare_model

sys.path.insert(0, str(REPOSITORY))
from benchmarks.staleness_loop import StalenessLoop


def make_loop(*settings):
    config = load_config([], [*SMALL, "learner.device=cpu", "worker.device=cpu", *settings])
    return config, StalenessLoop(config, prepare_model(config, print))


def versions(batch):
    return {version for group in batch.groups for member in group.members for version in member.rollout.versions.tolist()}


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_every_token_is_exactly_as_many_versions_old_as_asked_for(bound):
    _, loop = make_loop(f"staleness.bound={bound}")
    assert [versions(loop.step()[0]) for _ in range(6)] == [{max(0, step - bound)} for step in range(6)]


def test_without_staleness_the_loop_is_plain_synchronous_training():
    config, loop = make_loop("staleness.bound=0")
    assert [loop.step()[1]["loss"] for _ in range(4)] == pytest.approx(plain_synchronous_losses(config, 4), abs=1e-6)


def test_the_weights_that_sample_are_as_old_as_the_version_says():
    distances = {}
    for bound in (0, 2):
        _, loop = make_loop(f"staleness.bound={bound}", "learner.warmup_steps=0")
        distances[bound] = [loop.step()[1]["sampling/sampling_logp_difference/mean"] for _ in range(3)]
    assert max(distances[0]) < 1e-5, "the trained policy itself sampled"
    assert distances[2][0] < 1e-5 < 1e-3 < distances[2][1] < distances[2][2], "it moves away from the first one"


def test_a_version_is_evaluated_on_held_out_prompts_without_changing_what_is_trained():
    settings = ("staleness.bound=1", "evaluation.every_steps=1", "evaluation.prompts=8")
    watched, other = make_loop(*settings)[1], make_loop(*settings)[1]
    watched.step(), other.step()
    figures = watched.evaluate()
    assert figures["eval/prompts"] == 8 and 0.0 < figures["eval/reward"] < 1.0
    assert watched.step()[1]["loss"] == other.step()[1]["loss"]
