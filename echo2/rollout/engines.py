"""The engine that a configuration names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from echo2.config import Config
from echo2.dissemination.manifest import Content
from echo2.errors import ConfigError
from echo2.packages import missing_packages
from echo2.rollout.engine import Engine

if TYPE_CHECKING:
    from echo2.rollout.transformers_engine import TransformersEngine
    from echo2.rollout.vllm_engine import VllmEngine


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
    engine = _vllm(config, model_folder) if worker.engine == "vllm" else _transformers(config, model_folder)
    if base is not None:
        engine.adapt(base, config.learner.lora.alpha / config.learner.lora.rank)
    return engine


def _transformers(config: Config, model_folder: Path) -> TransformersEngine:
    from echo2.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(model_folder, config.model.dtype, config.worker.device, config.worker.threads)


def _vllm(config: Config, model_folder: Path) -> VllmEngine:
    if missing_packages(["vllm"]):
        raise ConfigError(
            "worker.engine = 'vllm' needs vLLM, which is not installed: pip install '.[vllm]' into an environment of its own"
        )
    from echo2.rollout.vllm_engine import VllmEngine

    return VllmEngine(
        model_folder, config.model.dtype, config.worker, config.batch.members, config.sampling.max_completion_tokens
    )
