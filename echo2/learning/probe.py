"""What a version's weights give for a prompt that every version is asked, by which an engine proves that it has them.

Invariant: the prompt depends on the size of the vocabulary alone, and its log-probabilities are those of the weights as the
learner holds them, in their own number format.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TOKENS = 8
"""Few, since an engine computes them beside what is under way, and enough to show each matrix in another's place."""
STRIDE = 0x9E3779B1
"""2³² over the golden ratio, a prime: its multiples fall all over the vocabulary."""


def probe_token_ids(vocabulary_size: int) -> list[int]:
    """The prompt."""
    return [(number * STRIDE) % 2**32 % vocabulary_size for number in range(1, TOKENS + 1)]


def prompt_log_probs(model: Any, token_ids: list[int]) -> Tensor:
    """Log-probability of every token of the prompt but the first, at temperature 1; float32 [tokens − 1]."""
    row = torch.tensor([token_ids], device=model.device)
    logits = model(input_ids=row, use_cache=False).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(-1, row[0, 1:, None])[:, 0]
