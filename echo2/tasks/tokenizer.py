"""Text to token ids and back, on the `tokenizers` library alone.

Invariant: ids that were sampled are what is trained; text is made from them only to be scored or shown, never encoded again.
Special tokens stay visible in decoded text, so that one in the middle of an answer makes it wrong.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from echo2.errors import ConfigError
from echo2.tasks.base import Task

CHARACTERS = "0123456789+-*=()<>:;?.,abcdefghijklmnopqrstuvwxyz "
PAD_TOKEN, BEGIN_TOKEN, END_TOKEN, UNKNOWN_TOKEN = SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>", "<unk>"]


class TextTokenizer:
    """A tokenizer with the ids that end a completion."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...], pad_token_id: int) -> None:
        self._tokenizer = tokenizer
        self._first: int | None = next(iter(tokenizer.encode("").ids), None)
        self.eos_token_ids = eos_token_ids
        self.pad_token_id = pad_token_id

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids, with those which the model's own tokenizer puts around a text, such as a leading begin token.

        A text that begins with that token, as chat templates make it, does not get it twice.
        """
        bare = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._first is not None and bare[:1] == [self._first]:
            return bare
        return self._tokenizer.encode(text).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens included."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def completion(self, token_ids: Sequence[int]) -> str:
        """Text of a completion, without the tokens that end one."""
        return self.decode([token_id for token_id in token_ids if token_id not in self.eos_token_ids])

    def can_encode(self, character: str) -> bool:
        """Whether the character survives encoding and decoding."""
        # Three of them, since some tokenizers swallow one leading blank.
        ids = self._tokenizer.encode(character * 3).ids
        return character in self._tokenizer.decode(ids, skip_special_tokens=True)

    def save(self, file: Path) -> None:
        """Write a `tokenizer.json`."""
        self._tokenizer.save(str(file))


def character_tokenizer() -> TextTokenizer:
    """One token per character: digits, lower-case letters, a blank, some signs, and four special tokens; 54 in all."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN_TOKEN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return TextTokenizer(tokenizer, (vocabulary[END_TOKEN],), vocabulary[PAD_TOKEN])


def load_tokenizer(model_folder: Path) -> TextTokenizer:
    """The tokenizer of a Hugging Face model folder.

    End and pad ids come from generation_config.json where it names them, else from config.json; without a pad id the first
    end id serves. Raises ConfigError if a file is missing or damaged or no end id is named.
    """
    tokenizer = _read_tokenizer(model_folder / "tokenizer.json")
    settings = _read_json(model_folder / "config.json")
    generation_file = model_folder / "generation_config.json"
    if generation_file.exists():
        settings |= {name: value for name, value in _read_json(generation_file).items() if value is not None}
    end = settings.get("eos_token_id")
    eos_token_ids = tuple(end) if isinstance(end, list) else (end,)
    if not all(isinstance(token_id, int) for token_id in eos_token_ids) or not eos_token_ids:
        raise ConfigError(
            f"model {model_folder} has eos_token_id = {end!r}: name the tokens that end a completion in generation_config.json"
        )
    pad_token_id = settings.get("pad_token_id")
    return TextTokenizer(tokenizer, eos_token_ids, eos_token_ids[0] if pad_token_id is None else pad_token_id)


def check_agreement(task: Task, tokenizer: TextTokenizer) -> None:
    """Raise ConfigError, naming the characters, if the tokenizer cannot encode what the task writes."""
    unknown = sorted(character for character in task.required_characters if not tokenizer.can_encode(character))
    if unknown:
        raise ConfigError(
            f"task {type(task).__name__} uses the characters {''.join(unknown)!r}, which the model's tokenizer cannot encode: "
            f"choose another model.path or task"
        )


def _read_tokenizer(file: Path) -> Tokenizer:
    text = json.dumps(_read_json(file))
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 - the library raises nothing more exact where it refuses a description
        raise ConfigError(f"{file} describes no tokenizer ({error}): fetch the model again") from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}): model.path must be a Hugging Face model folder") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON ({error}): fetch the model again") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds no JSON object but {reprlib.repr(content)}: fetch the model again")
    return content
