"""What an evaluation says: means over held-out prompts, each with its standard error, and pass@k.

Invariants: a prompt counts once, however many of its completions could be scored; a completion without a reward is missing,
not wrong; a standard error is that over prompts, and is left out where there is one prompt alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import fmean, stdev

from echo2.config_evaluation import EvaluationSection


@dataclass(frozen=True, slots=True)
class PromptResult:
    """What was made of one held-out prompt."""

    rewards: Sequence[float]
    """Of the completions that could be scored, one at least."""
    means: Mapping[str, float]
    """Over these, `reward` and the task's own metrics, such as `exact_match`."""


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that k completions have a right one among them, from n = `samples` ≥ k of which c = `right` are right.

    The unbiased estimator 1 − C(n − c, k) / C(n, k) of Chen et al. 2021 ("Evaluating large language models trained on code").

    >>> pass_at_k(samples=4, right=1, k=1), pass_at_k(samples=4, right=1, k=2), pass_at_k(samples=4, right=3, k=2)
    (0.25, 0.5, 1.0)
    """
    return 1.0 - comb(samples - right, k) / comb(samples, k)


def figures_of(results: Sequence[PromptResult], settings: EvaluationSection) -> dict[str, float]:
    """The figures under their metrics' names; pass@k comes from the prompts with at least k scored completions."""
    names = sorted({name for result in results for name in result.means})
    columns = {name: [r.means[name] for r in results if name in r.means] for name in names}
    for k in ks_of(settings.samples):
        columns[f"pass@{k}"] = [_pass_at_k(r, k, settings.pass_reward) for r in results if len(r.rewards) >= k]
    figures = {}
    for name, values in columns.items():
        if values:
            figures[f"eval/{name}"] = fmean(values)
        if len(values) > 1:
            figures[f"eval/{name}_stderr"] = stdev(values) / sqrt(len(values))
    return figures | {"eval/prompts": float(len(results)), "eval/failed_prompts": float(settings.prompts - len(results))}


def ks_of(samples: int) -> list[int]:
    """For which k pass@k is told: the powers of 2 up to `samples`, and `samples` itself.

    >>> ks_of(1), ks_of(8), ks_of(12)
    ([1], [1, 2, 4, 8], [1, 2, 4, 8, 12])
    """
    return sorted({1 << power for power in range(samples.bit_length())} | {samples})


def _pass_at_k(result: PromptResult, k: int, pass_reward: float) -> float:
    return pass_at_k(len(result.rewards), sum(reward >= pass_reward for reward in result.rewards), k)
