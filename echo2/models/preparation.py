"""The folder of the model that a run starts from.

Invariants: a folder that `prepare_model` returns is complete; a tiny model appears in the cache whole or not at all, whoever
else makes the same one at the same time. torch is imported only when a model has to be made.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from echo2.config import Config
from echo2.errors import ConfigError
from echo2.models.recipe import TinyRecipe
from echo2.tasks.base import Task, checked_prompt
from echo2.tasks.catalog import make_task
from echo2.tasks.order import PromptOrder
from echo2.tasks.tokenizer import character_tokenizer, check_agreement, load_tokenizer

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")


def prepare_model(config: Config, progress: Callable[[str], None]) -> Path:
    """The run's model folder, made first if `model.path` is `tiny` and no earlier run has made the same.

    `progress` is called with one line at a time. Raises ConfigError if the folder is incomplete, or if its tokenizer cannot
    encode what the task writes.
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


def check_model_and_task(config: Config) -> None:
    """Raises ConfigError if the task cannot be made, or if a model folder is incomplete or does not fit it; needs no torch.

    The same if too few prompts are there for the evaluation's.
    """
    task = make_task(config.task, config.run.seed)
    order = PromptOrder(task.size, config.run.seed, config.evaluation.held_out_prompts)
    if config.evaluation.held_out_prompts:
        checked_prompt(task, order.held_out(0))
    if config.model.path != "tiny":
        folder = Path(config.model.path).expanduser()
        check_model_folder(folder)
        check_agreement(task, load_tokenizer(folder))


def check_model_folder(folder: Path) -> None:
    """Raise ConfigError unless `folder` holds config.json, tokenizer.json and safetensors weights."""
    if not folder.is_dir():
        raise ConfigError(f"model.path: {folder} is not a folder: name the folder of a Hugging Face model, or `tiny`")
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not any((folder / name).is_file() for name in WEIGHT_FILES):
        missing.append(WEIGHT_FILES[0])
    if missing:
        raise ConfigError(f"model.path: {folder} lacks {', '.join(missing)}: name the folder of a complete Hugging Face model")


def _tiny_model(config: Config, task: Task, progress: Callable[[str], None]) -> Path:
    recipe = TinyRecipe.of(config, task)
    cache = config.model.cache_directory.expanduser()
    folder = cache / f"tiny-{recipe.digest}"
    if folder.is_dir():
        return folder
    from echo2.models.tiny import make_tiny_model  # imports torch, which a cached model does not need

    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="making-", dir=cache) as temporary:
        made = Path(temporary) / "model"
        made.mkdir()
        make_tiny_model(recipe, task, made, progress)
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
