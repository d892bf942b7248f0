"""A task whose scorer does everything wrong, by the prompt's index."""

import os
import time

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
