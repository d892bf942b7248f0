"""The learner that a configuration names."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from echo2.config import Config
from echo2.config_learner import LoraSection
from echo2.errors import ConfigError
from echo2.learning.learner import Learner


def check_adapters(settings: LoraSection) -> None:
    """Raises ConfigError if adapters are asked for and what makes them is not installed; needs no torch."""
    if settings.rank and importlib.util.find_spec("peft") is None:
        raise ConfigError(f"learner.lora.rank = {settings.rank} needs peft, which is not installed: pip install '.[lora]'")


def make_learner(config: Config, model_folder: Path, log_folder: Path) -> Learner:
    """The learner of `config.learner`, at version 0; imports torch only for one that needs it.

    Processes of its own write to `log_folder`. Raises ConfigError if the model in `model_folder` cannot be loaded or trained,
    LearnerError if such a process ends.
    """
    settings = config.learner
    if settings.engine == "simulated":
        from echo2.learning.simulated_learner import SimulatedLearner

        return SimulatedLearner(settings.simulated_step_s, settings.simulated_snapshot_bytes)
    if settings.devices > 1:
        from echo2.learning.sharded_learner import ShardedLearner

        return ShardedLearner(config, model_folder, log_folder)
    from echo2.learning.torch_learner import TorchLearner

    return TorchLearner.create(config, model_folder)
