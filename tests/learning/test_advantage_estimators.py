"""All estimators of advantages against loops, and what `overlong` does to a batch's members."""

import math
import random

import numpy as np
import pytest
from learning_batches import group, rollout
from objective_oracle import oracle_advantages

from echo2.config_sections import ObjectiveSection
from echo2.learning.advantages import batch_advantages
from echo2.learning.objective import Objective
from echo2.protocol import Batch

ESTIMATORS = ["grpo", "mean_only", "batch", "rloo"]


def ragged_rewards(seed):
    """Groups of 1 to 8 members, some with equal rewards."""
    draw = random.Random(seed)
    rewards = [[draw.uniform(-1, 2) for _ in range(draw.randint(1, 8))] for _ in range(6)]
    return [*rewards, [0.1] * 3, [0.5, 0.25, 0.5]]


def lists(advantages):
    return [values.tolist() for values in advantages]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("seed", range(5))
def test_advantages_are_those_of_the_formulas(estimator, seed):
    rewards = ragged_rewards(seed)
    found = batch_advantages(rewards, estimator)
    for values, expected in zip(found, oracle_advantages(rewards, estimator), strict=True):
        assert values.tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_rewards_and_single_members_give_exactly_zero(estimator):
    equal = np.full(8, 0.1, np.float32).tolist()
    assert lists(batch_advantages([[0.1] * 3, equal, [7.0], [0.0, 1.0]], estimator))[:3] == [[0.0] * 3, [0.0] * 8, [0.0]]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_rewards_that_differ_by_rounding_alone_give_next_to_nothing(estimator):
    assert 0.1 * 3 != 0.3
    assert np.abs(batch_advantages([[0.1 * 3, 0.3], [0.0, 1.0]], estimator)[0]).max() < 1e-9


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(estimator, bad):
    with pytest.raises(ValueError, match="not all finite"):
        batch_advantages([[1.0, 0.0], [bad, 0.0, 1.0]], estimator)


@pytest.mark.parametrize("estimator", ["grpo", "mean_only", "rloo"])
def test_other_groups_do_not_matter(estimator):
    alone, among = batch_advantages([[0.0, 1.0, 1.0]], estimator), batch_advantages([[0.0, 1.0, 1.0], [5.0, -3.0]], estimator)
    assert lists(alone)[0] == lists(among)[0]


def test_the_batchs_deviation_is_shared_by_its_groups():
    first, second = lists(batch_advantages([[0.0, 2.0], [0.0, 1.0]], "batch"))
    assert first == pytest.approx([2 * value for value in second])


def test_no_groups_give_no_advantages():
    assert batch_advantages([], "batch") == []


def ragged_group(group_id, lengths, rewards, limit):
    pairs = [
        (rollout(i, [5] * length, [-1.0] * length, reason="length" if length == limit else "stop"), reward)
        for i, (length, reward) in enumerate(zip(lengths, rewards, strict=True))
    ]
    return group(group_id, [4], pairs)


def trained(batch, limit, **settings):
    """{(group, member): advantage} of what is trained."""
    members = Objective(ObjectiveSection(**settings), limit).trained_members(batch)
    return {(g.group_id, member.rollout.member): advantage for g, member, advantage in members}


BATCH = Batch(0, (ragged_group(7, [10, 8, 2], [1.0, 1.0, 0.0], 10), ragged_group(3, [1, 3], [0.0, 1.0], 10)))


def test_cut_off_completions_are_kept_by_default():
    expected = oracle_advantages([[1.0, 1.0, 0.0], [0.0, 1.0]], "grpo")
    found = trained(BATCH, 10)
    assert list(found) == [(7, 0), (7, 1), (7, 2), (3, 0), (3, 1)]
    assert list(found.values()) == pytest.approx([*expected[0], *expected[1]])


def test_a_masked_completion_is_not_trained_but_counts_for_its_group():
    kept, masked = trained(BATCH, 10), trained(BATCH, 10, overlong="mask")
    assert masked == {place: advantage for place, advantage in kept.items() if place != (7, 0)}


def test_soft_punishment_lowers_rewards_of_long_completions_before_the_groups_mean():
    found = trained(
        BATCH, 10, overlong="soft", overlong_buffer_tokens=4, overlong_penalty_factor=0.5, adv_estimator="mean_only"
    )
    expected = oracle_advantages([[0.5, 0.75, 0.0], [0.0, 1.0]], "mean_only")
    assert list(found.values()) == pytest.approx([*expected[0], *expected[1]])


def test_soft_punishment_tells_equal_rewards_apart_by_length():
    batch = Batch(0, (ragged_group(0, [10, 2], [1.0, 1.0], 10),))
    assert set(trained(batch, 10).values()) == {0.0}
    assert trained(batch, 10, overlong="soft", adv_estimator="mean_only") == {(0, 0): -0.5, (0, 1): 0.5}


def test_a_reward_that_is_missing_is_refused_before_it_is_shaped():
    with pytest.raises(ValueError, match="not all finite"):
        trained(Batch(0, (ragged_group(0, [10, 2], [None, 1.0], 10),)), 10, overlong="soft")
