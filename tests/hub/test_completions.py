"""What the policy wrote can be looked at: trained, evaluated, filtered and failed groups, during a run and after it."""

import json

import numpy as np
import pytest
from test_observations import SETTINGS, KnownRun, echo2, refusal

from echo2.hub.completions import LONGEST_TEXT, render_completions
from echo2.hub.evaluation_groups import is_evaluation
from echo2.hub.group_book import GROUPS_TO_SHOW
from echo2.hub.inspection import completions_of
from echo2.hub.ledger import MemberScore
from echo2.protocol import GroupRollouts, Rollout
from echo2.tasks.catalog import make_task
from echo2.tasks.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer()
(END,) = TOKENIZER.eos_token_ids


@pytest.fixture
def known(make_run):
    made = KnownRun(make_run(*SETTINGS))
    yield made
    made.database.close()


@pytest.fixture
def evaluated(make_run):
    made = KnownRun(make_run(*SETTINGS, "evaluation.every_steps=1", "evaluation.prompts=3"))
    yield made
    made.database.close()


def write(known, text, rewards, reason="", version=0, evaluation=False):
    """All members of a group write `text` and earn these rewards; gives its id."""
    leases = known.ledger.lease(known.workers[0], version, 4 if evaluation else 1)
    lease = next(lease for lease in leases if is_evaluation(lease.group_id) == evaluation)
    ids = np.array([*TOKENIZER.encode(text), END], np.int32)
    rollouts = tuple(
        Rollout(member, ids, np.zeros(len(ids), np.float32), np.full(len(ids), version, np.int32), "stop")
        for member in lease.members
    )
    known.ledger.post(known.workers[0], GroupRollouts(lease.group_id, lease.attempt, rollouts))
    known.now_s += 1.0
    scores = [MemberScore(member, reward, reason=reason) for member, reward in zip(lease.members, rewards, strict=False)]
    known.ledger.record_scores(lease.group_id, scores)
    return lease.group_id


@pytest.mark.parametrize(
    ("rewards", "reason", "state"),
    [((0.0, 1.0), "", "ready"), ((0.0, 0.0), "", "filtered"), ((None, None), "cannot judge", "failed")],
)
def test_what_was_written_is_shown_whatever_came_of_it(known, rewards, reason, state):
    group = write(known, "4321", rewards, reason)
    first, second = completions_of(known.run, groups=1)
    assert (first.group, first.state, first.completion) == (group, state, "4321")
    assert (first.reward, second.reward) == rewards
    assert first.prompt == make_task(known.run.config.task, known.run.config.run.seed).prompt(first.index)


def test_an_evaluation_is_shown_by_its_version_and_a_step_by_its_number(evaluated):
    evaluated.ledger.evaluations.open_if_due(0)
    group = write(evaluated, "12", (1.0,), evaluation=True)
    (shown,) = completions_of(evaluated.run, groups=5, evaluation=0)
    assert (shown.group, shown.state, shown.step, shown.evaluation) == (group, "evaluated", None, 0)
    assert completions_of(evaluated.run, groups=5, evaluation=1) == completions_of(evaluated.run, groups=5, step=0) == []


def test_the_newest_groups_come_first_and_no_more_than_asked_for(known):
    groups = [write(known, str(place), (0.0, 1.0)) for place in range(5)]
    assert [each.group for each in completions_of(known.run, groups=2)] == [groups[4], groups[4], groups[3], groups[3]]


def test_of_dropped_groups_the_newest_are_kept_and_no_others_grow_the_ledger(known):
    groups = [write(known, "7", (0.0, 0.0)) for _ in range(GROUPS_TO_SHOW + 5)]
    shown = {each.group for each in completions_of(known.run, groups=10 * GROUPS_TO_SHOW)}
    assert shown == set(groups[-GROUPS_TO_SHOW:])


def test_people_see_the_ends_of_a_long_text_on_one_line_and_programs_all_of_it(known):
    text = "1" + "0" * 2 * LONGEST_TEXT + "2"
    write(known, text, (0.0, 1.0))
    shown = completions_of(known.run, groups=1)
    head, *lines = render_completions(shown).splitlines()
    assert head.startswith("group 0, ready, prompt 0: ") and len(lines) == 2
    assert " … " in lines[0] and lines[0].endswith('02"') and len(lines[0]) < LONGEST_TEXT + 60
    done = echo2("completions", known.run.path, "--json")
    objects = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["completion"] for each in objects] == [text, text]
    assert [each["reward"] for each in objects] == [0.0, 1.0]


def test_where_nothing_is_kept_that_is_said(known):
    assert echo2("completions", known.run.path).stdout == "no completions are kept of that\n"


def test_a_task_that_is_not_here_is_named(make_run):
    run = make_run("task.type=python", "task.path=nowhere:Task")
    KnownRun(run).database.close()
    assert "nowhere cannot be imported" in refusal("completions", run.path)
