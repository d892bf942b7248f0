"""Data plane: prompts by index and rewards for completions."""

from echo2.tasks.base import PromptError, Score, ScoringError, Task, checked_prompt, checked_score
from echo2.tasks.order import HELD_OUT_FIRST

__all__ = ["HELD_OUT_FIRST", "PromptError", "Score", "ScoringError", "Task", "checked_prompt", "checked_score"]
