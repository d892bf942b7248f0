"""Which of a model's weights are trained, published and saved, and how they lie in a checkpoint.

Invariants: what is trained is what is published and what is saved, under the same names; a checkpoint of one kind is refused by
a learner of the other.
"""

from __future__ import annotations

import os
import re
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from echo2.config_learner import LoraSection
from echo2.errors import ConfigError, SnapshotError
from echo2.learning.lora import check_adapters
from echo2.models.loading import untied_weights

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
MODEL_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)
ADAPTER = "default"
"""What peft calls an adapter that has no name of its own."""
PEFT_PREFIX = "base_model.model."
"""What peft's own files put before a module's name."""


class TrainedWeights(ABC):
    """The weights of a model that a learner trains."""

    @abstractmethod
    def of(self, model: nn.Module) -> dict[str, Tensor]:
        """These weights by their names, as they are now."""

    @abstractmethod
    def write(self, weights: dict[str, Tensor], model_folder: Path, folder: Path) -> None:
        """Write them into a checkpoint, and from `model_folder` what makes it useful by itself. Raises OSError."""

    @abstractmethod
    def read(self, folder: Path) -> dict[str, Tensor]:
        """What `write` wrote. Raises OSError, SnapshotError."""


class AllWeights(TrainedWeights):
    """Every weight of the model; a checkpoint is an ordinary Hugging Face model folder."""

    FILE = "model.safetensors"

    def of(self, model: nn.Module) -> dict[str, Tensor]:
        return untied_weights(model)

    def write(self, weights: dict[str, Tensor], model_folder: Path, folder: Path) -> None:
        _write(weights, folder / self.FILE)
        _copy(MODEL_FILES, model_folder, folder)

    def read(self, folder: Path) -> dict[str, Tensor]:
        return _read(folder / self.FILE)


class Adapters(TrainedWeights):
    """Low-rank adapters beside frozen weights; a checkpoint is what `peft` loads as an adapter of the model."""

    FILE = "adapter_model.safetensors"

    def __init__(self, model: Any, settings: LoraSection, seed: int) -> None:
        """Puts them into `model`, drawn from `seed` so that they change nothing yet, and freezes all else.

        Raises ConfigError if peft is missing or a target is none.
        """
        check_adapters(settings)
        import torch
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import Linear

        self._config = LoraConfig(
            r=settings.rank, lora_alpha=settings.alpha, target_modules=list(settings.target_modules) or "all-linear"
        )
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                inject_adapter_in_model(self._config, model)
        except ValueError as error:
            raise ConfigError(f"learner.lora.target_modules = {settings.target_modules}: {error}") from None
        model.eval()
        adapted = {name.partition(".lora_")[0] for name, weight in model.named_parameters() if weight.requires_grad}
        head = model.get_output_embeddings()
        for name in sorted(adapted):
            module = model.get_submodule(name)
            if not isinstance(module, Linear) or module is head:
                raise ConfigError(
                    f"learner.lora.target_modules = {settings.target_modules} puts an adapter on {name}, which is the head or "
                    f"no linear layer: leave it out"
                )

    def of(self, model: nn.Module) -> dict[str, Tensor]:
        found = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        return {name.replace(f".{ADAPTER}.", "."): weight for name, weight in found.items()}

    def write(self, weights: dict[str, Tensor], model_folder: Path, folder: Path) -> None:
        _write({PEFT_PREFIX + name: weight for name, weight in weights.items()}, folder / self.FILE)
        self._config.base_model_name_or_path = str(model_folder.absolute())
        self._config.save_pretrained(folder)
        _copy(TOKENIZER_FILES, model_folder, folder)

    def read(self, folder: Path) -> dict[str, Tensor]:
        return {name.removeprefix(PEFT_PREFIX): weight for name, weight in _read(folder / self.FILE).items()}


def _write(weights: dict[str, Tensor], file: Path) -> None:
    try:
        save_file(weights, file, metadata={"format": "pt"})
    except SafetensorError as error:
        # What the disk said is in its text alone.
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(file)) from None
    # safetensors leaves it to its owner alone, unlike all else in a run.
    file.chmod(0o644)


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except SafetensorError as error:
        raise SnapshotError(f"{file.name} is not a complete safetensors file ({error})") from None


def _copy(names: tuple[str, ...], source: Path, target: Path) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
