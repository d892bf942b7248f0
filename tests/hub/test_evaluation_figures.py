"""Figures of an evaluation, from the rewards of its completions alone."""

import doctest
from itertools import combinations
from math import sqrt

import numpy as np
import pytest

from echo2.config_evaluation import EvaluationSection
from echo2.hub import evaluation_figures
from echo2.hub.evaluation_figures import PromptResult, figures_of, ks_of, pass_at_k


def test_doctests_hold():
    assert doctest.testmod(evaluation_figures).failed == 0


@pytest.mark.parametrize(("samples", "right"), [(5, 0), (5, 1), (5, 3), (5, 5), (8, 2)])
def test_pass_at_k_is_the_share_of_choices_that_have_a_right_one(samples, right):
    outcomes = [1] * right + [0] * (samples - right)
    for k in range(1, samples + 1):
        choices = list(combinations(outcomes, k))
        assert pass_at_k(samples, right, k) == pytest.approx(sum(map(max, choices)) / len(choices))


def test_pass_at_k_is_unbiased_where_the_plain_estimate_is_not():
    random = np.random.default_rng(0)
    probability, samples, k = 0.2, 6, 3
    draws = random.binomial(samples, probability, 20_000)
    wanted = 1 - (1 - probability) ** k
    assert np.mean([pass_at_k(samples, int(right), k) for right in draws]) == pytest.approx(wanted, abs=0.01)
    assert abs(np.mean(1 - (1 - draws / samples) ** k) - wanted) > 0.02


def test_figures_by_hand():
    results = [
        PromptResult([1.0, 0.0, 0.5, 0.5], {"reward": 0.5, "exact_match": 0.25, "words": 3.0}),
        PromptResult([1.0, 1.0, 1.0, 1.0], {"reward": 1.0, "exact_match": 1.0}),
        PromptResult([0.0], {"reward": 0.0, "exact_match": 0.0}),
    ]
    figures = figures_of(results, EvaluationSection(prompts=5, samples=4, temperature=1.0))
    first, spread = [0.25, 1.0, 0.0], np.std([0.25, 1.0, 0.0], ddof=1)
    assert figures == pytest.approx(
        {
            "eval/prompts": 3.0,
            "eval/failed_prompts": 2.0,
            "eval/reward": np.mean([0.5, 1.0, 0.0]),
            "eval/reward_stderr": np.std([0.5, 1.0, 0.0], ddof=1) / sqrt(3),
            "eval/exact_match": np.mean(first),
            "eval/exact_match_stderr": spread / sqrt(3),
            "eval/words": 3.0,
            "eval/pass@1": np.mean(first),
            "eval/pass@1_stderr": spread / sqrt(3),
            "eval/pass@2": np.mean([0.5, 1.0]),
            "eval/pass@2_stderr": np.std([0.5, 1.0], ddof=1) / sqrt(2),
            "eval/pass@4": 1.0,
            "eval/pass@4_stderr": 0.0,
        }
    )


def test_what_counts_as_right_is_a_setting():
    results = [PromptResult([0.75], {}), PromptResult([0.5], {})]
    assert figures_of(results, EvaluationSection(prompts=2))["eval/pass@1"] == 0.0
    assert figures_of(results, EvaluationSection(prompts=2, pass_reward=0.7))["eval/pass@1"] == 0.5


def test_an_evaluation_without_any_score_says_so_and_nothing_else():
    assert figures_of([], EvaluationSection(prompts=7)) == {"eval/prompts": 0.0, "eval/failed_prompts": 7.0}


def test_k_goes_up_in_powers_of_two_to_all_samples():
    assert [ks_of(n) for n in (1, 2, 3, 16, 20)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8, 16], [1, 2, 4, 8, 16, 20]]
