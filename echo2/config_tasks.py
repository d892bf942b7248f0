"""The tasks that a configuration can name.

Invariants: nothing here imports torch or network code; every field says what it is.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, Union

from pydantic import Field, model_validator

from echo2.config_base import Section


class DigitsSection(Section):
    """What the tasks on strings of digits have in common."""

    min_digits: Annotated[int, Field(ge=1, le=4096)] = 3
    """Fewest digits in a prompt."""
    max_digits: Annotated[int, Field(ge=1, le=4096)] = 6
    """Most digits in a prompt."""
    exact_match_weight: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """Share of the reward that only an exact match earns; the rest is the share of right places."""

    @model_validator(mode="after")
    def _digits_in_order(self) -> Self:
        if self.min_digits > self.max_digits:
            raise ValueError(
                f"task.min_digits = {self.min_digits} exceeds task.max_digits = {self.max_digits}: lower the first"
            )
        return self


class ReverseDigitsTask(DigitsSection):
    """Write the digits of a number backwards: `rev 4071=` → `1704`."""

    type: Literal["reverse_digits"] = "reverse_digits"
    """Selects this task."""


class SortDigitsTask(DigitsSection):
    """Write the digits of a number in rising order: `sort 4071=` → `0147`."""

    type: Literal["sort_digits"] = "sort_digits"
    """Selects this task."""


class ArithmeticTask(Section):
    """Add or subtract small whole numbers: `17+25=` → `42`."""

    type: Literal["arithmetic"] = "arithmetic"
    """Selects this task."""
    max_operand: Annotated[int, Field(ge=1, le=10**18)] = 99
    """Operands are drawn from 0 to this number."""
    operators: Annotated[str, Field(pattern=r"^[+-]{1,2}$")] = "+"
    """Operators to draw from: `+`, `-` or `+-`."""
    exact_match_weight: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Share of the reward that only an exact match earns; the rest is the share of right places."""


class PythonTask(Section):
    """A task of your own: a class that implements `echo2.tasks.Task`."""

    type: Literal["python"]
    """Selects this task."""
    path: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    """`package.module:ClassName`, importable where the hub runs."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments for the class."""


TaskSection = Annotated[
    Union[ReverseDigitsTask, SortDigitsTask, ArithmeticTask, PythonTask],
    Field(discriminator="type"),
]


DEFAULT_TASK = ReverseDigitsTask()
