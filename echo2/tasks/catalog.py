"""From the task section of a configuration to a task."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from echo2.config_tasks import ArithmeticTask, PythonTask, ReverseDigitsTask, SortDigitsTask, TaskSection
from echo2.errors import ConfigError
from echo2.tasks.base import Task, checked_prompt
from echo2.tasks.builtin import Arithmetic, ReverseDigits, SortDigits


def make_task(section: TaskSection, seed: int) -> Task:
    """The task that `section` describes. Raises ConfigError if a `python` task cannot be imported or made."""
    match section:
        case ReverseDigitsTask():
            return ReverseDigits(section, seed)
        case SortDigitsTask():
            return SortDigits(section, seed)
        case ArithmeticTask():
            return Arithmetic(section, seed)
        case PythonTask():
            return _python_task(section, seed)


def _python_task(section: PythonTask, seed: int) -> Task:
    task_class = _imported_class(section.path)
    arguments: dict[str, Any] = {"seed": seed, **section.options}
    try:
        inspect.signature(task_class).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"task.options = {section.options!r} do not fit {section.path} ({error}): it is made with seed=… and these options"
        ) from None
    try:
        task = task_class(**arguments)
    except Exception as error:  # a task is the user's code and may raise anything
        raise ConfigError(f"task {section.path} cannot be made: it raised {type(error).__name__}: {error}") from error
    if task.size is not None and (not isinstance(task.size, int) or task.size < 1):
        raise ConfigError(f"task {section.path} has size {task.size!r}: it needs to be a whole number from 1 up, or None")
    checked_prompt(task, 0)
    return task


def _imported_class(path: str) -> type[Task]:
    module_name, class_name = path.split(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"task.path = {path!r}: {module_name} cannot be imported ({error}): install it or add its folder to PYTHONPATH"
        ) from None
    task_class = getattr(module, class_name, None)
    if not inspect.isclass(task_class) or not issubclass(task_class, Task):
        raise ConfigError(f"task.path = {path!r}: {module_name} has no class {class_name} that implements echo2.tasks.Task")
    if inspect.isabstract(task_class):
        missing = ", ".join(sorted(task_class.__abstractmethods__))
        raise ConfigError(f"task.path = {path!r}: class {class_name} lacks {missing} of echo2.tasks.Task")
    return task_class
