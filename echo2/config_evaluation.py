"""The section of a configuration that says when and how the policy is evaluated.

Invariants: nothing here imports torch or network code; every field says what it is.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from echo2.config_base import GREATEST_TEMPERATURE, LEAST_TEMPERATURE, MOST_MEMBERS, MOST_ROLLOUTS, MOST_STEPS, Section, Share


class EvaluationSection(Section):
    """How the policy does on prompts that are never trained; the workers evaluate it while the run goes on."""

    every_steps: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 0
    """Evaluate version 0, that after every n-th step (a multiple of κ), and the last one; 0: never, and nothing is held out."""
    prompts: Annotated[int, Field(ge=1, le=65536)] = 128
    """Held-out prompts, the same in every evaluation."""
    samples: Annotated[int, Field(ge=1, le=MOST_MEMBERS)] = 1
    """Completions of each prompt; with more than one, pass@k is told for k = 1, 2, 4, … and for all of them."""
    temperature: Annotated[float, Field(ge=0.0, le=GREATEST_TEMPERATURE)] = 0.0
    """Divides the logits before sampling; 0 takes the most probable token each time (greedy)."""
    pass_reward: Annotated[float, Field(ge=-1e9, le=1e9)] = 1.0
    """A completion with at least this reward counts as right for pass@k."""
    share: Share = 0.5
    """Most of a worker's slots that an evaluation takes while there are groups to train."""

    @property
    def held_out_prompts(self) -> int:
        """Prompts that are kept from training."""
        return self.prompts if self.every_steps else 0

    def is_due(self, version: int, total_steps: int) -> bool:
        """Whether `version` is to be evaluated, in a run of `total_steps` steps."""
        return self.every_steps > 0 and (version % self.every_steps == 0 or version == total_steps)

    @model_validator(mode="after")
    def _rollouts_have_room(self) -> Self:
        if self.prompts * self.samples > MOST_ROLLOUTS:
            raise ValueError(
                f"evaluation.prompts = {self.prompts} with evaluation.samples = {self.samples} makes "
                f"{self.prompts * self.samples} completions in one evaluation, over {MOST_ROLLOUTS}: lower one of them"
            )
        return self

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.temperature == 0.0 and self.samples > 1:
            raise ValueError(
                f"evaluation.samples = {self.samples} with evaluation.temperature = 0 gives the same completion "
                f"{self.samples} times: set evaluation.temperature=1.0, or evaluation.samples=1"
            )
        if 0.0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"evaluation.temperature = {self.temperature:g} is below {LEAST_TEMPERATURE:g}: set it to 0 for greedy decoding"
            )
        return self
