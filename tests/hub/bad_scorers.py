"""Tasks that do everything wrong that a task can."""

import os
import time
from pathlib import Path

from echo2.tasks import Score, Task


class BadScorer(Task):
    def __init__(self, seed):
        del seed

    def prompt(self, index):
        return str(index)

    def score(self, index, completion, finished):
        match completion:
            case "1":
                raise ValueError("no")
            case "2":
                return None
            case "3":
                return Score(float("nan"))
            case "4":
                time.sleep(60)
            case "5":
                os._exit(7)
        return Score(0.25, {"exact_match": 0.0})


class BadPrompts(BadScorer):
    """Every prompt with an odd index cannot be had."""

    def prompt(self, index):
        if index % 4 == 1:
            raise ValueError("no prompt here")
        return None if index % 4 == 3 else "1+1="

    def score(self, index, completion, finished):
        return Score(float(len(completion)))


class AllFail(BadScorer):
    """Nothing can be scored."""

    def prompt(self, index):
        return "1+1="

    def score(self, index, completion, finished):
        raise ValueError("the judge is out")


class Unmakeable(BadScorer):
    def __init__(self, seed):
        raise OSError("the data set is gone")


class HangsOnce(BadScorer):
    """Its first process never gets as far as scoring."""

    def __init__(self, seed):
        super().__init__(seed)
        first = Path(os.environ["FIRST_START"])
        if not first.exists():
            first.write_text(str(os.getpid()))
            time.sleep(600)
