"""What the tiny model is made from.

Invariant: two recipes with the same digest make the same model, so a model that was made once can serve every later run.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from blake3 import blake3

from echo2.config import Config
from echo2.tasks.base import Task

WARM_START_FORMAT = 2
"""To be raised whenever the warm start changes what it makes of the same recipe."""
EXAMPLES = 8
"""First prompts and answers that count as part of a recipe, since a task of the user's own may change its code."""


def tiny_architecture() -> dict[str, Any]:
    """Sizes of the tiny model but for its vocabulary, in the words of transformers' Qwen3Config."""
    return {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        # Prompts span some twenty places; at the usual base of 10,000 most rotations would hardly tell them apart.
        "rope_parameters": {"rope_type": "default", "rope_theta": 30.0},
    }


@dataclass(frozen=True, slots=True)
class TinyRecipe:
    """Seed, task and target of a tiny model, and its sizes."""

    seed: int
    task: dict[str, Any]
    examples: tuple[tuple[str, str | None], ...]
    warm_start_exact_match: float
    held_out_prompts: int
    """Prompts of a finite task that the warm start must not see either."""
    architecture: dict[str, Any] = field(default_factory=tiny_architecture)
    warm_start_format: int = WARM_START_FORMAT

    @classmethod
    def of(cls, config: Config, task: Task) -> TinyRecipe:
        """The recipe of the run's tiny model."""
        indexes = range(EXAMPLES if task.size is None else min(EXAMPLES, task.size))
        examples = tuple((task.prompt(index), task.answer(index)) for index in indexes)
        held_out = 0 if task.size is None else config.evaluation.held_out_prompts
        settings = config.task.model_dump(mode="json")
        return cls(config.run.seed, settings, examples, config.model.warm_start_exact_match, held_out)

    def as_dict(self) -> dict[str, Any]:
        """The recipe as JSON values."""
        return asdict(self)

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that stand for the recipe."""
        return blake3(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest(length=8)
