"""The names of the metrics that a run records with its steps, and the settings that some of them need.

Invariants: what is recorded under a name that is not here, or not here after `eval/`, comes from the scores of the run's task;
`docs/learning.md` says what each one means.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from echo2.config import Config
from echo2.errors import ConfigError
from echo2.hub.evaluation_figures import ks_of
from echo2.tasks.base import Task

EVALUATION = "eval/"
NEAR_NAMES = 3


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Metrics that are recorded where `when` holds of the configuration."""

    names: tuple[str, ...]
    when: Callable[[Config], bool] = lambda config: True
    needs: str = ""
    """`when` in words, which end a sentence that begins with "only with"."""


def _of(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}/{name}" for name in names)


def _trained(config: Config) -> bool:
    return config.learner.engine == "torch"


TORCH = "learner.engine = 'torch'"
RECORDED = (
    _Recorded(
        (
            *("reward", "reward_std", "groups", "frac_reward_zero_std", "tokens"),
            *_of("completions", "mean_length", "clipped_ratio"),
            *_of("staleness", "mean", "max"),
            *_of("learner", "step_s", "start_s", "wait_s", "idle_share"),
            *_of("dissemination", "export_s", "full_bytes"),
            *_of("capacity", "observed_utilisation", "predicted_utilisation"),
        )
    ),
    _Recorded(
        (
            *("loss", "grad_norm", "learning_rate", "entropy", "kl"),
            *_of("clip_ratio", "low_mean", "high_mean", "region_mean", "low_min", "high_max"),
            *_of("sampling/importance_sampling_ratio", "min", "mean", "max"),
            *_of("sampling/sampling_logp_difference", "mean", "max", "worker_max"),
        ),
        _trained,
        TORCH,
    ),
    _Recorded(
        ("kl_loss",),
        lambda config: _trained(config) and config.objective.beta > 0,
        f"{TORCH} and objective.beta above 0",
    ),
    _Recorded(
        ("clip_ratio/dual_mean",),
        lambda config: _trained(config) and config.objective.clip_ratio_c > 0,
        f"{TORCH} and objective.clip_ratio_c above 0",
    ),
    _Recorded(
        ("sampling/importance_sampling_weight/mean",),
        lambda config: _trained(config) and config.objective.importance_sampling_mode != "off",
        f"{TORCH} and objective.importance_sampling_mode other than 'off'",
    ),
    _Recorded(
        ("learner/skipped",),
        lambda config: _trained(config) and config.learner.max_skipped_steps > 0,
        f"{TORCH} and learner.max_skipped_steps above 0",
    ),
    _Recorded(("dissemination/delta_bytes",), lambda config: config.dissemination.deltas, "dissemination.deltas = true"),
    _Recorded(
        (
            *_of("dissemination", "version", "bound_s", "first_s", "median_s", "last_s"),
            *_of("dissemination", "source_uplink_bytes_per_s", "worker_uplink_bytes_per_s"),
        ),
        lambda config: config.dissemination.peers,
        "dissemination.peers = true",
    ),
    _Recorded(
        _of("eval", "version", "oldest_version", "newest_version", "prompts", "failed_prompts", "duration_s", "token_share"),
        lambda config: config.evaluation.every_steps > 0,
        "evaluation.every_steps above 0",
    ),
)
KNOWN = frozenset(name for group in RECORDED for name in group.names)
"""Names that come by themselves, some of them not with the first steps."""


def recorded_names(config: Config, of_task: Collection[str]) -> frozenset[str]:
    """Every name that a run of `config` can record, whose task's scores have the metrics `of_task`."""
    names = {name for group in RECORDED if group.when(config) for name in group.names} | {*of_task}
    if config.evaluation.every_steps:
        means = ["reward", *of_task, *(f"pass@{k}" for k in ks_of(config.evaluation.samples))]
        names |= {*_of("eval", *means)}
        if config.evaluation.prompts > 1:
            names |= {f"eval/{mean}_stderr" for mean in means}
    return frozenset(names)


def check_best_metric(config: Config, task: Task) -> None:
    """Raises ConfigError if `learner.best_metric` is a name that no step of the run will have.

    Where the task does not say which metrics its scores have, a name that may be one of them passes.
    """
    name, of_task = config.learner.best_metric, task.metric_names
    recorded = recorded_names(config, of_task or ())
    if name in recorded:
        return
    said = f"learner.best_metric = {name!r}"
    needs = next((group.needs for group in RECORDED if name in group.names), "")
    if name.startswith(EVALUATION) and not config.evaluation.every_steps:
        needs = "evaluation.every_steps above 0"
    if needs:
        raise ConfigError(f"{said} is recorded only with {needs}: set that, or choose another metric, such as reward")
    if of_task is not None:
        near = near_names(name, recorded) or ["reward", *sorted(of_task)]
        raise ConfigError(f"{said} is no metric that this run records: choose one such as {', '.join(near)}")


def near_names(name: str, names: Collection[str]) -> list[str]:
    """Those of `names` that one who wrote `name` may have meant, the nearest first.

    >>> near_names("exact_macth", ["reward", "exact_match", "loss"])
    ['exact_match']
    """
    return difflib.get_close_matches(name, sorted(names), NEAR_NAMES)


def told_missing(name: str, metrics: Mapping[str, float]) -> str:
    """What a user is to be told where `metrics` of a committed step should have had `name` and do not; empty where not.

    An evaluation's figure is to be there with the first evaluation, any other one that the task gives with every step.
    """
    evaluated = name.startswith(EVALUATION)
    if name in metrics or name in KNOWN or (evaluated and "eval/version" not in metrics):
        return ""
    came = sorted(other for other in metrics if other.startswith(EVALUATION) == evaluated and other not in KNOWN)
    named = ", ".join(dict.fromkeys([*near_names(name, came), *came])) or "nothing but the reward"
    occasion = "an evaluation" if evaluated else "a step"
    return (
        f"learner.best_metric = {name!r} has not come with {occasion}, for which the task gave {named}: no checkpoint is "
        f"kept as one of the best until it comes; end the run and go on with --resume and another learner.best_metric"
    )
