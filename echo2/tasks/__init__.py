"""Data plane: prompts by index and rewards for completions."""

from echo2.tasks.base import PromptError, Score, ScoringError, Task, checked_prompt, checked_score

__all__ = ["PromptError", "Score", "ScoringError", "Task", "checked_prompt", "checked_score"]
