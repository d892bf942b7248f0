"""The engine that a configuration names."""

from __future__ import annotations

from pathlib import Path

from echo2.config import Config
from echo2.dissemination.manifest import Content
from echo2.errors import ConfigError
from echo2.rollout.engine import Engine


def make_engine(config: Config, model_folder: Path | None, base: Content | None = None) -> Engine:
    """The engine of `config.worker`; imports torch only for an engine that needs it.

    `base` has the weights that snapshots bring adapters for; without it they bring all weights. Raises ConfigError if that
    engine needs a model and `model_folder` is None, or if it cannot be loaded.
    """
    worker = config.worker
    if worker.engine == "simulated":
        from echo2.rollout.simulated_engine import SimulatedEngine

        return SimulatedEngine(worker.simulated_group_latency_s, worker.simulated_latency_cv)
    if model_folder is None:
        raise ConfigError(f"worker.engine = {worker.engine!r} needs a model folder: name one, or set worker.engine=simulated")
    from echo2.rollout.transformers_engine import TransformersEngine

    engine = TransformersEngine(model_folder, config.model.dtype, worker.device, worker.threads)
    if base is not None:
        engine.adapt(base, config.learner.lora.alpha / config.learner.lora.rank)
    return engine
