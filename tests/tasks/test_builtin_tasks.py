"""Built-in tasks: prompts by index, and what an answer earns."""

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.config_tasks import ArithmeticTask, ReverseDigitsTask, SortDigitsTask
from echo2.tasks.builtin import share_of_right_places
from echo2.tasks.catalog import make_task

SECTIONS = [ReverseDigitsTask(), SortDigitsTask(), ArithmeticTask(operators="+-")]
every_task = pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.type)


@every_task
def test_a_prompt_depends_on_seed_and_index_alone(section):
    task, again, other = make_task(section, 7), make_task(section, 7), make_task(section, 8)
    backwards = [again.prompt(index) for index in reversed(range(50))][::-1]
    assert [task.prompt(index) for index in range(50)] == backwards
    assert backwards != [other.prompt(index) for index in range(50)]
    assert len(set(backwards)) > 25


def test_a_prompt_is_the_same_in_every_process():
    code = (
        "from echo2.config_tasks import ReverseDigitsTask; from echo2.tasks.catalog import make_task; "
        "print(make_task(ReverseDigitsTask(), 3).prompt(12345))"
    )
    prompts = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for _ in range(2)
    }
    assert prompts == {make_task(ReverseDigitsTask(), 3).prompt(12345) + "\n"}


@every_task
def test_prompts_and_answers_keep_to_the_announced_characters(section):
    task = make_task(section, 0)
    used = {character for index in range(300) for character in task.prompt(index) + task.answer(index)}
    assert used <= task.required_characters


@every_task
def test_the_answer_alone_earns_everything(section):
    task = make_task(section, 0)
    for index in range(20):
        score = task.score(index, task.answer(index), True)
        assert (score.reward, score.metrics) == (1.0, {"exact_match": 1.0})
        assert task.score(index, task.answer(index) + "0", True).metrics == {"exact_match": 0.0}


def test_reversed_digits_have_the_set_length_and_order():
    task = make_task(ReverseDigitsTask(min_digits=2, max_digits=4), 0)
    prompts = [task.prompt(index) for index in range(100)]
    assert {len(prompt) for prompt in prompts} == {7, 8, 9}
    for index, prompt in enumerate(prompts):
        digits = re.fullmatch(r"rev (\d+)=", prompt)[1]
        assert task.answer(index) == digits[::-1]


def test_sorted_digits_rise():
    task = make_task(SortDigitsTask(), 0)
    for index in range(20):
        digits = re.fullmatch(r"sort (\d+)=", task.prompt(index))[1]
        assert task.answer(index) == "".join(sorted(digits))


def test_arithmetic_answers_are_right_and_draw_every_operator():
    task = make_task(ArithmeticTask(max_operand=9, operators="+-"), 0)
    operators = set()
    for index in range(100):
        left, operator, right = re.fullmatch(r"(\d)([+-])(\d)=", task.prompt(index)).groups()
        assert int(task.answer(index)) == int(left) + (int(right) if operator == "+" else -int(right))
        operators.add(operator)
    assert operators == {"+", "-"}


def test_a_partly_right_answer_earns_its_places():
    task = make_task(ReverseDigitsTask(min_digits=4, max_digits=4, exact_match_weight=0.5), 0)
    answer = task.answer(0)
    last_wrong = answer[:3] + str((int(answer[3]) + 1) % 10)
    assert task.score(0, last_wrong, True).reward == 0.5 * 3 / 4
    assert task.score(0, "", True).reward == 0.0


def test_a_completion_that_was_cut_off_is_no_exact_match():
    task = make_task(ReverseDigitsTask(exact_match_weight=0.75), 0)
    score = task.score(0, task.answer(0), False)
    assert (score.reward, score.metrics["exact_match"]) == (0.25, 0.0)


@given(st.text("012", max_size=6), st.text("012", max_size=6))
def test_share_of_right_places_is_one_only_for_equal_texts(answer, completion):
    share = share_of_right_places(answer, completion)
    assert 0.0 <= share <= 1.0
    assert (share == 1.0) == (answer == completion)
