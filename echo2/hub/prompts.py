"""The prompts of a run's groups, as token ids, and how completions of them are sampled.

Invariant: which prompt a group has depends on its id and the run's configuration alone, so it is asked for and never kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from echo2.config import Config
from echo2.hub.evaluation_groups import is_evaluation
from echo2.hub.group_book import rules_of
from echo2.protocol import Sampling
from echo2.run_directory import RunRecord
from echo2.tasks import checked_prompt
from echo2.tasks.catalog import make_task
from echo2.tasks.order import PromptOrder
from echo2.tasks.tokenizer import check_agreement, load_tokenizer


class Prompts:
    """Of one run; raises ConfigError where task and tokenizer do not fit, or there are too few prompts."""

    def __init__(self, run: RunRecord) -> None:
        self._config: Config = run.config
        self._task = make_task(run.config.task, run.config.run.seed)
        self._tokenizer = load_tokenizer(run.model)
        check_agreement(self._task, self._tokenizer)
        self._evaluation_groups = rules_of(run.config).evaluation_groups
        self._order = PromptOrder(self._task.size, run.config.run.seed, run.config.evaluation.held_out_prompts)

    @property
    def sampling(self) -> Sampling:
        """The same for all groups that are to be trained."""
        settings = self._config.sampling
        return Sampling(
            temperature=settings.temperature,
            max_completion_tokens=settings.max_completion_tokens,
            stop_token_ids=tuple(self._tokenizer.eos_token_ids),
            seed=self._config.run.seed,
        )

    def index_of(self, group_id: int) -> int:
        """The index of the group's prompt in the task."""
        if is_evaluation(group_id):
            return self._order.held_out(self._evaluation_groups.place(group_id))
        return self._order.trained(group_id)

    def temperature_of(self, group_id: int) -> float | None:
        """What a group of an evaluation is sampled with; None for one that is to be trained."""
        return self._config.evaluation.temperature if is_evaluation(group_id) else None

    def text_of(self, group_id: int) -> str:
        """Raises PromptError where the task cannot give the prompt."""
        return checked_prompt(self._task, self.index_of(group_id))

    def completion_of(self, token_ids: Sequence[int]) -> str:
        """The text that the task is given to score."""
        return self._tokenizer.completion(token_ids)

    def token_ids_of(self, group_id: int) -> tuple[int, ...]:
        """Raises PromptError where the task cannot give the prompt."""
        return tuple(self._tokenizer.encode(self.text_of(group_id)))
