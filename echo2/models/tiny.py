"""The built-in model: a Qwen3 of 0.6 million parameters over single characters, which learns on a CPU in about a minute.

Invariant: the folder that it is saved to is an ordinary Hugging Face model folder; only `recipe.json`, which says how the model
was made, is of use to ECHO-2 alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from echo2.durability import naming
from echo2.models.loading import export_weights
from echo2.models.recipe import TinyRecipe
from echo2.models.warm_start import WarmStart, warm_start
from echo2.tasks.base import Task
from echo2.tasks.order import PromptOrder
from echo2.tasks.tokenizer import BEGIN_TOKEN, END_TOKEN, PAD_TOKEN, UNKNOWN_TOKEN, TextTokenizer, character_tokenizer


def make_tiny_model(recipe: TinyRecipe, task: Task, folder: Path, progress: Callable[[str], None]) -> None:
    """Make the model of `recipe`, warm-started on `task`, and write it into the empty `folder`.

    Runs on one CPU thread and leaves the random state and thread count of the process as they were. Raises ConfigError if the
    warm start fails, DiskError if the model cannot be written.
    """
    tokenizer = character_tokenizer()
    with _one_thread():
        model = random_model(recipe, tokenizer)
        reached = None
        if recipe.warm_start_exact_match > 0:
            order = PromptOrder(task.size, recipe.seed, recipe.held_out_prompts)
            reached = warm_start(model, task, order, tokenizer, recipe.warm_start_exact_match, progress)
    with naming(folder):
        _save(model, tokenizer, recipe, reached, folder)


def random_model(recipe: TinyRecipe, tokenizer: TextTokenizer) -> Qwen3ForCausalLM:
    """The model with random weights, which depend on the recipe's seed alone."""
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_ids[0]}
    config = Qwen3Config(vocab_size=tokenizer.vocab_size, attn_implementation="sdpa", **recipe.architecture, **special)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return Qwen3ForCausalLM(config)


def _save(
    model: Qwen3ForCausalLM, tokenizer: TextTokenizer, recipe: TinyRecipe, reached: WarmStart | None, folder: Path
) -> None:
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(export_weights(model, "float32"))
    tokenizer.save(folder / "tokenizer.json")
    names = {"pad_token": PAD_TOKEN, "bos_token": BEGIN_TOKEN, "eos_token": END_TOKEN, "unk_token": UNKNOWN_TOKEN}
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    figures = {"steps": reached.steps, "exact_match": reached.exact_match} if reached else {}
    _write_json(folder / "recipe.json", {**recipe.as_dict(), "reached": figures})


def _write_json(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
