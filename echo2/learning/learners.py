"""The learner that a configuration names."""

from __future__ import annotations

from pathlib import Path

from echo2.config import Config
from echo2.learning.learner import Learner


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
