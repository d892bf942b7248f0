"""The model that a run starts from: made once and cached whole, or checked where it is the user's own."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from echo2.config import load_config
from echo2.errors import ConfigError
from echo2.models.loading import load_model
from echo2.models.preparation import prepare_model, write_stand_in
from echo2.models.recipe import TinyRecipe
from echo2.tasks import Score, Task
from echo2.tasks.catalog import make_task
from echo2.tasks.tokenizer import load_tokenizer

QUICK_TASK = ("task.type=reverse_digits", "task.min_digits=1", "task.max_digits=1")
"""Copying one digit, which the tiny model learns within a few seconds."""


@pytest.fixture
def prepare(tmp_path):
    def run(*overrides, progress=lambda line: None):
        config = load_config([], [f"model.cache_directory={tmp_path / 'cache'}", *overrides])
        return prepare_model(config, progress)

    run.cache = tmp_path / "cache"
    return run


def sampled_exact_match(folder, config, prompts):
    """Share of right completions among one sample for each prompt, by transformers' own generation."""
    model, tokenizer = load_model(folder, "float32", torch.device("cpu")), AutoTokenizer.from_pretrained(folder)
    task = make_task(config.task, config.run.seed)
    torch.manual_seed(0)
    right = 0
    for start in range(0, prompts, 128):
        indexes = range(start, start + 128)
        inputs = tokenizer([task.prompt(index) for index in indexes], return_tensors="pt", padding=True, padding_side="left")
        width = inputs.input_ids.shape[1]
        sampled = model.generate(**inputs, max_new_tokens=8, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)[:, width:]
        for index, ids in zip(indexes, sampled.tolist(), strict=True):
            finished = 2 in ids
            text = load_tokenizer(folder).decode(ids[: ids.index(2)] if finished else ids)
            right += task.score(index, text, finished).metrics["exact_match"]
    return right / prompts


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_the_warm_start_lands_near_its_target(prepare, seed):
    lines = []
    folder = prepare(f"run.seed={seed}", progress=lines.append)
    reached = json.loads((folder / "recipe.json").read_text())["reached"]
    assert 0.25 <= reached["exact_match"] <= 0.33
    sampled = sampled_exact_match(folder, load_config([], [f"run.seed={seed}"]), prompts=1024)
    assert sampled == pytest.approx(reached["exact_match"], abs=0.06)
    assert any("supervised steps" in line for line in lines)


def test_the_same_recipe_is_made_once(prepare):
    folder = prepare(*QUICK_TASK)
    made_at = (folder / "model.safetensors").stat().st_mtime_ns
    assert prepare(*QUICK_TASK) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made_at
    assert [path.name for path in prepare.cache.iterdir()] == [folder.name]


def test_a_recipe_gives_the_same_weights_again(prepare):
    folder = prepare(*QUICK_TASK)
    weights = (folder / "model.safetensors").read_bytes()
    shutil.rmtree(folder)
    assert prepare(*QUICK_TASK) == folder
    assert (folder / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize(
    "change", ["run.seed=1", "model.warm_start_exact_match=0.1", "task.max_digits=2", "task.exact_match_weight=1.0"]
)
def test_another_recipe_has_another_name(change):
    def digest(*overrides):
        config = load_config([], [*QUICK_TASK, *overrides])
        return TinyRecipe.of(config, make_task(config.task, config.run.seed)).digest

    assert digest() == digest()
    assert digest() != digest(change)


def test_without_a_warm_start_the_weights_are_random_and_depend_on_the_seed(prepare):
    random_weights = "model.warm_start_exact_match=0"
    one, two = (prepare(random_weights, f"run.seed={seed}") for seed in (1, 2))
    assert json.loads((one / "recipe.json").read_text())["reached"] == {}
    assert (one / "model.safetensors").read_bytes() != (two / "model.safetensors").read_bytes()


def test_two_runs_that_make_the_same_model_at_once_do_not_clash(prepare):
    others = []

    def meanwhile(line):
        if not others:
            others.append(prepare(*QUICK_TASK))

    folder = prepare(*QUICK_TASK, progress=meanwhile)
    assert others == [folder]
    assert [path.name for path in prepare.cache.iterdir()] == [folder.name]


def test_an_interrupted_warm_start_leaves_no_model(prepare):
    def interrupt(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(*QUICK_TASK, progress=interrupt)
    assert list(prepare.cache.iterdir()) == []


def test_the_tiny_model_is_an_ordinary_model_folder(prepare):
    folder = prepare("model.warm_start_exact_match=0")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.num_parameters() == 597_824
    assert tokenizer("rev 40=").input_ids == load_tokenizer(folder).encode("rev 40=")
    assert (tokenizer.eos_token_id, model.generation_config.eos_token_id, model.config.vocab_size) == (2, 2, len(tokenizer))


def test_making_a_model_leaves_the_random_state_and_threads_alone(prepare):
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    prepare(*QUICK_TASK)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


class Capitals(Task):
    """Prompts that the character tokenizer cannot encode."""

    required_characters = frozenset("ABC")

    def __init__(self, seed):
        pass

    def prompt(self, index):
        return "ABC"

    def score(self, index, completion, finished):
        return Score(0.0)


class Unanswered(Capitals):
    """Prompts without a single right answer."""

    required_characters = frozenset("abc")

    def prompt(self, index):
        return "abc"


@pytest.mark.parametrize(
    ("name", "overrides", "fault"),
    [
        ("Capitals", ["model.warm_start_exact_match=0"], "characters 'ABC'"),
        ("Unanswered", [], "gives no answers for the tiny model's warm start"),
    ],
)
def test_a_task_that_the_tiny_model_cannot_start_on_is_refused(prepare, name, overrides, fault):
    with pytest.raises(ConfigError, match=fault):
        prepare("task.type=python", f"task.path={__name__}:{name}", *overrides)


def test_a_stand_in_makes_the_same_tokens_as_the_tiny_model(prepare, tmp_path):
    folder = prepare("model.warm_start_exact_match=0")
    (tmp_path / "stand-in").mkdir()
    write_stand_in(load_config([], []), tmp_path / "stand-in")
    ours, theirs = load_tokenizer(tmp_path / "stand-in"), load_tokenizer(folder)
    assert ours.encode("rev 4071=") == theirs.encode("rev 4071=")
    assert (ours.eos_token_ids, ours.pad_token_id) == (theirs.eos_token_ids, theirs.pad_token_id)
    with pytest.raises(ConfigError, match="cannot encode"):
        write_stand_in(load_config([], ["task.type=python", f"task.path={__name__}:Capitals"]), tmp_path / "stand-in")


def test_a_folder_of_the_users_own_must_be_complete(prepare, tmp_path):
    own = tmp_path / "own"
    shutil.copytree(prepare("model.warm_start_exact_match=0"), own)
    assert prepare(f"model.path={own}") == own
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        (own / name).unlink()
        with pytest.raises(ConfigError, match=f"lacks .*{name}"):
            prepare(f"model.path={own}")


def test_a_folder_that_is_not_there_is_named(prepare, tmp_path):
    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        prepare(f"model.path={tmp_path / 'nowhere'}")
