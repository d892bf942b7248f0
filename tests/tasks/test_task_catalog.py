"""Tasks of the user's own, named by path."""

import pytest

from echo2.config_tasks import PythonTask
from echo2.errors import ConfigError
from echo2.tasks import Task
from echo2.tasks.catalog import make_task

MODULE = """
from echo2.tasks import Score, Task

class Echo(Task):
    def __init__(self, seed, word="hi", size=5):
        self.seed, self.word, self.length = seed, word, size

    @property
    def size(self):
        return self.length

    def prompt(self, index):
        return f"{self.word} {self.seed} {index}"

    def score(self, index, completion, finished):
        return Score(float(completion == self.word))

class NoPrompt(Task):
    def score(self, index, completion, finished):
        return Score(0.0)

class Unrelated:
    pass
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path, monkeypatch):
    (tmp_path / "users_tasks.py").write_text(MODULE)
    (tmp_path / "needs_more.py").write_text("import not_installed_here\n")
    monkeypatch.syspath_prepend(tmp_path)


def section(path, **options):
    return PythonTask(type="python", path=path, options=options)


def test_a_python_task_gets_the_seed_and_its_options():
    task = make_task(section("users_tasks:Echo", word="ho"), 4)
    assert isinstance(task, Task)
    assert (task.prompt(2), task.size) == ("ho 4 2", 5)


@pytest.mark.parametrize(
    ("path", "options", "fault"),
    [
        ("not_there:Echo", {}, "not_there cannot be imported"),
        ("needs_more:Echo", {}, "not_installed_here"),
        ("users_tasks:Ecko", {}, "no class Ecko"),
        ("users_tasks:Unrelated", {}, "no class Unrelated that implements echo2.tasks.Task"),
        ("users_tasks:NoPrompt", {}, "NoPrompt lacks prompt"),
        ("users_tasks:Echo", {"volume": 3}, "unexpected keyword argument 'volume'"),
        ("users_tasks:Echo", {"size": 0}, "has size 0"),
    ],
)
def test_what_is_wrong_with_a_python_task_is_named(path, options, fault):
    with pytest.raises(ConfigError, match=fault):
        make_task(section(path, **options), 0)
