"""The folder of the model that a run starts from.

Invariants: a folder that `prepare_model` returns is complete; a tiny model appears in the cache whole or not at all, whoever
else makes the same one at the same time. torch is imported only when a model has to be made.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from echo2.config import Config
from echo2.durability import naming
from echo2.errors import ConfigError
from echo2.models.recipe import TinyRecipe, tiny_architecture
from echo2.tasks.base import Task, checked_prompt
from echo2.tasks.catalog import make_task
from echo2.tasks.order import PromptOrder
from echo2.tasks.tokenizer import character_tokenizer, check_agreement, load_tokenizer

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""A model's name on the Hugging Face Hub, where other trainers would fetch it from."""
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")


def prepare_model(config: Config, progress: Callable[[str], None]) -> Path:
    """The run's model folder, made first if `model.path` is `tiny` and no earlier run has made the same.

    `progress` is called with one line at a time. Raises ConfigError if the folder is incomplete, or if its tokenizer cannot
    encode what the task writes; DiskError if the made model cannot be kept.
    """
    task = make_task(config.task, config.run.seed)
    folder = _tiny_model(config, task, progress) if config.model.path == "tiny" else Path(config.model.path).expanduser()
    check_model_folder(folder)
    check_agreement(task, load_tokenizer(folder))
    return folder


def write_stand_in(config: Config, folder: Path) -> None:
    """Write into `folder` how the tiny model makes tokens of text: all that a rehearsal needs of a model.

    Raises ConfigError if that tokenizer cannot encode what the task writes.
    """
    tokenizer = character_tokenizer()
    check_agreement(make_task(config.task, config.run.seed), tokenizer)
    tokenizer.save(folder / "tokenizer.json")
    ends = {"eos_token_id": list(tokenizer.eos_token_ids), "pad_token_id": tokenizer.pad_token_id}
    (folder / "config.json").write_text(json.dumps(ends, indent=2) + "\n", encoding="utf-8")


def check_model_and_task(config: Config, task: Task) -> None:
    """Raises ConfigError if the model folder is incomplete or does not fit the run's task; needs no torch.

    The same if too few prompts are there for the evaluation's.
    """
    order = PromptOrder(task.size, config.run.seed, config.evaluation.held_out_prompts)
    if config.evaluation.held_out_prompts:
        checked_prompt(task, order.held_out(0))
    if config.model.path == "tiny":
        check_agreement(task, character_tokenizer())
        architecture = tiny_architecture()
    else:
        folder = Path(config.model.path).expanduser()
        check_model_folder(folder)
        check_agreement(task, load_tokenizer(folder))
        architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config.learner.engine == "torch" and not isinstance(architecture.get("model_type"), str):
            raise ConfigError(f"model.path: {folder / 'config.json'} names no model_type: fetch the model again")
    if config.worker.engine != "simulated":
        _check_positions(config, architecture)


def _check_positions(config: Config, architecture: Mapping[str, Any]) -> None:
    """Raises ConfigError if a completion of the greatest length leaves no room for a prompt in the model."""
    longest = config.sampling.max_completion_tokens
    positions = (architecture.get("text_config") or architecture).get("max_position_embeddings")
    if isinstance(positions, int) and longest >= positions:
        raise ConfigError(
            f"sampling.max_completion_tokens = {longest} leaves a prompt no room in the {positions} positions of model.path = "
            f"{config.model.path!r}: lower it"
        )


def check_model_folder(folder: Path) -> None:
    """Raise ConfigError unless `folder` holds config.json, tokenizer.json and safetensors weights."""
    if not folder.is_dir():
        hint = ""
        if HUB_NAME.fullmatch(str(folder)) and not folder.parent.exists():
            hint = f"; models are not fetched by name, but by: hf download {folder} --local-dir FOLDER"
        raise ConfigError(f"model.path: {folder} is not a folder: name the folder of a Hugging Face model, or `tiny`{hint}")
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not any((folder / name).is_file() for name in WEIGHT_FILES):
        missing.append(WEIGHT_FILES[0])
    if missing:
        raise ConfigError(f"model.path: {folder} lacks {', '.join(missing)}: name the folder of a complete Hugging Face model")


def tiny_folder(config: Config, task: Task) -> Path:
    """Where the run's tiny model lies once it is made."""
    return config.model.cache_directory.expanduser() / f"tiny-{TinyRecipe.of(config, task).digest}"


def _tiny_model(config: Config, task: Task, progress: Callable[[str], None]) -> Path:
    folder = tiny_folder(config, task)
    cache = folder.parent
    if folder.is_dir():
        return folder
    from echo2.models.tiny import make_tiny_model  # imports torch, which a cached model does not need

    with naming(cache):
        cache.mkdir(parents=True, exist_ok=True)
        making = tempfile.TemporaryDirectory(prefix="making-", dir=cache)
    with making as temporary:
        made = Path(temporary) / "model"
        made.mkdir()
        make_tiny_model(TinyRecipe.of(config, task), task, made, progress)
        _put_in_place(made, folder)
    return folder


def _put_in_place(made: Path, folder: Path) -> None:
    """Rename `made` to `folder`, unless another process was quicker."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(made)
