"""Questions with numbers as answers, from a file, put to a chat model in the form of its own template.

Used with the settings `task.type=python` and `task.path=chat_task:ChatTask`, with this folder in PYTHONPATH. The options name
the model and a file with a JSON object per line, such as GSM8K's.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from echo2.tasks import Score, Task

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class ChatTask(Task):
    """A question is right if the last number of the completion is the last one of the answer."""

    metric_names = frozenset({"exact_match", "has_number"})

    def __init__(self, seed: int, model: str, file: str, template: dict[str, Any] | None = None) -> None:
        """`template` is what the model's chat template takes besides the messages, such as `{enable_thinking = false}`."""
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        self._questions = [json.loads(line) for line in lines if line.strip()]
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._template = template or {}

    @property
    def size(self) -> int:
        return len(self._questions)

    def prompt(self, index: int) -> str:
        messages = [{"role": "user", "content": self._questions[index]["question"]}]
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **self._template))

    def score(self, index: int, completion: str, finished: bool) -> Score:
        said, wanted = last_number(completion), last_number(self._questions[index]["answer"])
        right = float(finished and said is not None and said == wanted)
        return Score(right, {"exact_match": right, "has_number": float(said is not None)})


def last_number(text: str) -> float | None:
    """The last number in a text; None where there is none."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
