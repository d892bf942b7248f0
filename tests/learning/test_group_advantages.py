"""Advantages by hand: absent members, single members, equal rewards, repeated prompts."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learning_batches import group, rollout

from echo2.learning.advantages import group_advantages
from echo2.learning.batch import rank_share
from echo2.protocol import Batch

rewards = st.lists(st.floats(-10, 10), min_size=2, max_size=8)


def test_two_members_lie_on_both_sides_of_their_mean():
    expected = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert group_advantages([1.0, 0.0]) == pytest.approx([expected, -expected])


def test_an_absent_member_is_not_a_zero():
    assert group_advantages([1.0, 1.0]).tolist() == [0.0, 0.0]
    assert group_advantages([1.0, 1.0, 0.0]).tolist() != group_advantages([1.0, 1.0, 0.0, 0.0])[:3].tolist()


def test_a_single_valid_member_has_no_advantage():
    assert group_advantages([1.0]).tolist() == [0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_a_reward_that_is_no_number_never_enters_a_group(bad):
    with pytest.raises(ValueError, match="not all finite"):
        group_advantages([bad, 0.0, 1.0, 1.0])


def test_equal_rewards_give_exactly_zero_whatever_rounding_does_to_their_deviation():
    assert np.std([0.1] * 3) > 0.0
    assert group_advantages([0.1] * 3).tolist() == [0.0] * 3
    assert group_advantages(np.full(8, 0.1, np.float32)).tolist() == [0.0] * 8


def test_rewards_that_differ_by_rounding_alone_give_no_advantage_worth_the_name():
    assert 0.1 * 3 != 0.3
    assert np.abs(group_advantages([0.1 * 3, 0.3])).max() < 1e-9


@given(rewards, st.floats(-5, 5))
def test_advantages_sum_to_zero_and_ignore_a_common_shift(values, shift):
    advantages = group_advantages(values)
    assert advantages.sum() == pytest.approx(0.0, abs=1e-6)
    if np.std(values) > 1e-2:
        assert group_advantages([value + shift for value in values]) == pytest.approx(advantages, abs=1e-6)


def advantages_by_token(groups):
    """{token id: advantage} of one-token rollouts with distinct tokens."""
    parts = rank_share(Batch(0, tuple(groups)), 10_000, torch.device("cpu")).parts
    return {int(token): float(value) for part in parts for token, value in zip(part.targets, part.advantages, strict=True)}


def one_token_group(group_id, prompt, first_token, values):
    tokens = range(first_token, first_token + len(values))
    pairs = [(rollout(i, [token], [-1.0]), value) for i, (token, value) in enumerate(zip(tokens, values, strict=True))]
    return group(group_id, prompt, pairs)


def test_dropping_a_member_of_one_group_leaves_the_next_one_alone():
    neighbour = one_token_group(1, [5], 20, [0.0, 1.0, 1.0, 0.5])
    whole = advantages_by_token([one_token_group(0, [4], 10, [1.0, 0.0, 1.0, 0.0]), neighbour])
    short = advantages_by_token([one_token_group(0, [4], 10, [1.0, 0.0, 1.0]), neighbour])
    assert {token: whole[token] for token in range(20, 24)} == {token: short[token] for token in range(20, 24)}
    assert whole[10] != short[10]


def test_the_same_prompt_twice_in_a_batch_keeps_two_baselines():
    found = advantages_by_token([one_token_group(0, [4, 4], 10, [1.0, 0.0]), one_token_group(1, [4, 4], 20, [1.0, 1.0])])
    assert found[10] == pytest.approx(-found[11])
    assert found[10] > 0.5
    assert (found[20], found[21]) == (0.0, 0.0)
