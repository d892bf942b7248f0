"""Held-out prompts are never trained, whatever the task."""

import pytest

from echo2.config import load_config
from echo2.config_tasks import ArithmeticTask, ReverseDigitsTask, SortDigitsTask
from echo2.errors import ConfigError, UserError
from echo2.models.preparation import check_model_and_task
from echo2.models.warm_start import make_examples
from echo2.tasks import HELD_OUT_FIRST, Score, Task
from echo2.tasks.catalog import make_task
from echo2.tasks.order import PromptOrder
from echo2.tasks.tokenizer import character_tokenizer


@pytest.mark.parametrize("held_out", [0, 1, 7, 19])
def test_a_finite_task_is_split_and_each_epoch_has_the_rest_once(held_out):
    order = PromptOrder(20, seed=3, held_out=held_out)
    kept = set(range(20)) - {order.held_out(place) for place in range(held_out)}
    assert len(kept) == 20 - held_out
    epochs = [[order.trained(epoch * len(kept) + place) for place in range(len(kept))] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(kept) for epoch in epochs)
    if len(kept) > 5:
        assert epochs[0] != epochs[1] != sorted(kept)


def test_held_out_prompts_depend_on_the_seed_alone():
    first, again, other = (PromptOrder(100, seed, 10) for seed in (3, 3, 4))
    chosen = [first.held_out(place) for place in range(10)]
    assert chosen == [again.held_out(place) for place in range(10)]
    assert chosen != [other.held_out(place) for place in range(10)] and chosen != sorted(chosen)


def test_a_task_that_never_runs_out_has_them_out_of_reach():
    order = PromptOrder(None, seed=3, held_out=5)
    assert [order.trained(n) for n in (0, 7, 10**9)] == [0, 7, 10**9]
    assert [order.held_out(place) for place in (0, 4)] == [HELD_OUT_FIRST, HELD_OUT_FIRST + 4]


def test_holding_everything_out_is_refused():
    with pytest.raises(ConfigError, match=r"evaluation\.prompts = 20 leaves none of the task's 20 prompts"):
        PromptOrder(20, seed=0, held_out=20)


@pytest.mark.parametrize("section", [ReverseDigitsTask(min_digits=2, max_digits=2), SortDigitsTask(), ArithmeticTask()])
def test_no_exercise_is_both_trained_and_held_out_under_any_seed(section):
    trained = {task.prompt(n) for task in (make_task(section, 0), make_task(section, 1)) for n in range(1500)}
    held_out = {make_task(section, 2).prompt(HELD_OUT_FIRST + n) for n in range(300)}
    assert len(held_out) >= 8 and not trained & held_out


def test_too_few_exercises_for_a_split_are_refused_before_the_run():
    tiny = ["task.type=arithmetic", "task.max_operand=1", "task.operators=-"]

    def check(config):
        check_model_and_task(config, make_task(config.task, config.run.seed))

    check(load_config([], tiny))
    with pytest.raises(UserError, match="too few prompts for a held-out split"):
        check(load_config([], [*tiny, "evaluation.every_steps=5"]))


class Letters(Task):
    size = 10

    def prompt(self, index):
        return f"{index}="

    def score(self, index, completion, finished):
        return Score(0.0)

    def answer(self, index):
        return f"{index}"


def test_the_warm_start_sees_no_held_out_prompt_of_a_finite_task():
    order = PromptOrder(10, seed=0, held_out=4)
    tokenizer = character_tokenizer()
    examples = make_examples(Letters(), order, tokenizer, first=0, count=60)
    seen = {tokenizer.decode(row[:1].tolist()) for row in examples.token_ids}
    assert seen == {str(index) for index in range(10)} - {str(order.held_out(place)) for place in range(4)}
