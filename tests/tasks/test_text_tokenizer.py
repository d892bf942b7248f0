"""Text to ids and back, and whether task and tokenizer fit."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from echo2.config_tasks import ReverseDigitsTask
from echo2.errors import ConfigError
from echo2.tasks.catalog import make_task
from echo2.tasks.tokenizer import CHARACTERS, TextTokenizer, character_tokenizer, check_agreement, load_tokenizer


@pytest.fixture
def folder(tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.save(tmp_path / "tokenizer.json")
    write(tmp_path / "config.json", {"eos_token_id": 2, "pad_token_id": 0})
    return tmp_path


def write(file, content):
    file.write_text(json.dumps(content))


@given(st.text(CHARACTERS, max_size=20))
def test_text_becomes_one_token_a_character_and_comes_back(text):
    tokenizer = character_tokenizer()
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_the_character_tokenizer_has_54_tokens_and_one_end():
    tokenizer = character_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids, tokenizer.pad_token_id) == (54, (2,), 0)


def test_a_special_token_inside_an_answer_is_seen():
    assert character_tokenizer().decode([8, 0, 4]) == "4<pad>0"


def test_a_saved_tokenizer_is_read_back(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("rev 40=") == character_tokenizer().encode("rev 40=")
    assert (tokenizer.eos_token_ids, tokenizer.pad_token_id) == ((2,), 0)


def test_several_end_tokens_come_from_the_generation_config(folder):
    write(folder / "generation_config.json", {"eos_token_id": [2, 1], "pad_token_id": None})
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eos_token_ids, tokenizer.pad_token_id) == ((2, 1), 0)


def test_without_a_pad_token_the_first_end_token_serves(folder):
    write(folder / "config.json", {"eos_token_id": [2, 1]})
    assert load_tokenizer(folder).pad_token_id == 2


@pytest.mark.parametrize("end", [None, [], "</s>", [2, None]])
def test_a_model_without_an_end_token_is_refused(folder, end):
    write(folder / "config.json", {"eos_token_id": end})
    with pytest.raises(ConfigError, match="eos_token_id"):
        load_tokenizer(folder)


def test_missing_and_damaged_files_are_named(folder):
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text[: len(text) // 2])
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not valid JSON"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(folder)


@pytest.mark.parametrize("content", [[], [["a"] * 99], None, 7, "text", True])
@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "generation_config.json"])
def test_json_that_is_no_object_is_refused(folder, name, content):
    write(folder / name, content)
    with pytest.raises(ConfigError, match=f"{name} holds no JSON object but") as refused:
        load_tokenizer(folder)
    assert len(str(refused.value)) < 300


def test_json_that_is_nested_without_end_is_refused(folder):
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "damage",
    [
        {"model": None},
        {"model": {}},
        {"model": {"type": "WordLevel", "vocab": {"a": -1}, "unk_token": "a"}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
        {"version": "9.9"},
    ],
    ids=json.dumps,
)
def test_a_tokenizer_that_the_library_refuses_is_refused(folder, damage):
    file = folder / "tokenizer.json"
    write(file, json.loads(file.read_text()) | damage)
    with pytest.raises(ConfigError, match=r"tokenizer\.json describes no tokenizer \(.+\): fetch the model again"):
        load_tokenizer(folder)


def test_an_object_that_describes_no_tokenizer_at_all_is_refused(folder):
    write(folder / "tokenizer.json", {})
    with pytest.raises(ConfigError, match=r"tokenizer\.json describes no tokenizer"):
        load_tokenizer(folder)


def test_a_task_and_a_tokenizer_that_fit_agree():
    check_agreement(make_task(ReverseDigitsTask(), 0), character_tokenizer())


def test_characters_that_the_tokenizer_cannot_encode_are_named():
    task = make_task(ReverseDigitsTask(), 0)
    task.required_characters = frozenset("17Ω#")
    with pytest.raises(ConfigError, match="'#Ω'"):
        check_agreement(task, character_tokenizer())


def test_a_tokenizer_that_drops_what_it_does_not_know_is_found_out():
    tokenizer = TextTokenizer(Tokenizer(models.BPE({"a": 0, " ": 1}, [])), (0,), 0)
    assert [tokenizer.can_encode(character) for character in "a b"] == [True, True, False]


def test_a_begin_token_that_a_chat_template_wrote_is_not_put_twice():
    from tokenizers.processors import TemplateProcessing

    around, begin, text = character_tokenizer()._tokenizer, 1, character_tokenizer().encode("1+2=")
    around.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", begin)])
    tokenizer = TextTokenizer(around, (2,), 0)
    assert tokenizer.encode("1+2=") == tokenizer.encode("<bos>1+2=") == [begin, *text]
