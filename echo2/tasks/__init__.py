"""Data plane: prompts by index and rewards for completions."""

from echo2.tasks.base import Score, ScoringError, Task, checked_score

__all__ = ["Score", "ScoringError", "Task", "checked_score"]
