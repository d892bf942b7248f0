"""Which names of metrics a run can choose its best checkpoints by."""

import doctest

import pytest

from echo2 import metric_names
from echo2.config import load_config
from echo2.errors import ConfigError
from echo2.metric_names import check_best_metric, recorded_names
from echo2.tasks import Score, Task
from echo2.tasks.catalog import make_task


class OwnTask(Task):
    """A task that says nothing of its metrics."""

    def prompt(self, index):
        return "1="

    def score(self, index, completion, finished):
        return Score(1.0, {"accuracy": 1.0})


class DeclaredTask(OwnTask):
    metric_names = frozenset({"accuracy"})


EVALUATED = ("evaluation.every_steps=10",)


def check(name, *settings, task=None):
    config = load_config([], [f"learner.best_metric={name}", *settings])
    check_best_metric(config, task or make_task(config.task, 0))


@pytest.mark.parametrize(
    ("name", "settings", "parts"),
    [
        ("rewrad", (), ("no metric", "reward")),
        ("exact_macth", (), ("no metric", "exact_match")),
        ("eval/rewrad", EVALUATED, ("no metric", "eval/reward")),
        ("eval/pass@2", EVALUATED, ("no metric", "eval/pass@1")),
        ("zzz", (), ("no metric", "reward, exact_match")),
        ("eval/reward", (), ("only with evaluation.every_steps above 0",)),
        ("eval/prompts", (), ("only with evaluation.every_steps above 0",)),
        ("kl_loss", (), ("only with", "objective.beta above 0")),
        ("learner/skipped", (), ("only with", "learner.max_skipped_steps above 0")),
        ("entropy", ("learner.engine=simulated", "worker.engine=simulated"), ("only with learner.engine = 'torch'",)),
        ("dissemination/last_s", ("dissemination.peers=false",), ("only with dissemination.peers = true",)),
    ],
)
def test_a_metric_that_never_comes_is_refused_with_what_is_near_or_needed(name, settings, parts):
    with pytest.raises(ConfigError) as raised:
        check(name, *settings)
    assert f"learner.best_metric = '{name}'" in str(raised.value)
    assert [part for part in parts if part not in str(raised.value)] == []


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("reward", ()),
        ("exact_match", ()),
        ("eval/pass@4", (*EVALUATED, "evaluation.samples=4", "evaluation.temperature=1.0")),
        ("eval/exact_match_stderr", EVALUATED),
        ("kl_loss", ("objective.beta=0.1",)),
    ],
)
def test_a_metric_that_comes_is_taken(name, settings):
    check(name, *settings)


def test_what_a_task_of_ones_own_may_give_is_refused_only_where_it_says_what_it_gives():
    for name in ("accuracy", "acuracy"):
        check(name, task=OwnTask())
        check(f"eval/{name}", *EVALUATED, task=OwnTask())
    check("accuracy", task=DeclaredTask())
    with pytest.raises(ConfigError, match="choose one such as accuracy"):
        check("acuracy", task=DeclaredTask())
    for name in ("kl_loss", "eval/accuracy"):
        with pytest.raises(ConfigError, match="recorded only with"):
            check(name, task=OwnTask())


def test_a_single_prompt_has_no_standard_errors():
    config = load_config([], [*EVALUATED, "evaluation.prompts=1"])
    assert not any(name.endswith("_stderr") for name in recorded_names(config, {"exact_match"}))


def test_examples_in_the_documentation_are_right():
    assert doctest.testmod(metric_names) == (0, 1)
