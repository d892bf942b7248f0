"""A task of one's own that does not say which metrics its scores have."""

from echo2.tasks import Score, Task


class PlainTask(Task):
    def __init__(self, seed):
        self.seed = seed

    def prompt(self, index):
        return f"{index}="

    def score(self, index, completion, finished):
        return Score(float(len(completion) % 2), {"accuracy": 1.0})
