"""What a scorer may do wrong is a failure to score and never a reward."""

import math
import pickle

import numpy as np
import pytest

from echo2.tasks import Score, ScoringError, Task, checked_score


class Returning(Task):
    def __init__(self, outcome):
        self.outcome = outcome

    def prompt(self, index):
        return "?"

    def score(self, index, completion, finished):
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (ZeroDivisionError("no digits"), "index 3 raised ZeroDivisionError: no digits"),
        (None, "returned None"),
        (1.0, "returned 1.0"),
        (Score(math.nan), "reward nan"),
        (Score(math.inf), "reward inf"),
        (Score(None), "reward None"),
        (Score("1"), "reward '1'"),
        (Score(1.0, {"exact_match": math.nan}), "metric exact_match nan"),
        (Score(1.0, None), "metrics None"),
    ],
)
def test_a_bad_outcome_is_a_scoring_error_that_says_what_came(outcome, reason):
    with pytest.raises(ScoringError, match=reason) as caught:
        checked_score(Returning(outcome), 3, "1", True)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_numbers_of_other_kinds_become_floats():
    score = checked_score(Returning(Score(np.float32(0.5), {"exact_match": True})), 0, "1", True)
    assert score == Score(0.5, {"exact_match": 1.0})
    assert {type(score.reward), type(score.metrics["exact_match"])} == {float}
