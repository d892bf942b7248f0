"""A small random Qwen3, what it is asked to draw, and what it must say of what it drew."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import echo2.rollout.transformers_engine as module
from echo2.protocol import GroupRollouts, Lease, Rollout, Sampling
from echo2.rollout.transformers_engine import TransformersEngine

VOCABULARY = 54
STOP = 2


def make_model(seed: int, tied: bool = True) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.15,
    )
    return Qwen3ForCausalLM(config).eval()


def make_sampling(**changes: object) -> Sampling:
    values = {"temperature": 1.0, "max_completion_tokens": 12, "stop_token_ids": (STOP, 3, 4), "seed": 11}
    return Sampling.model_validate(values | changes)


def make_leases(lengths: Sequence[int] = (5, 9, 1, 7), members: Sequence[int] = range(6)) -> list[Lease]:
    random = np.random.default_rng(3)
    return [
        Lease(
            group_id=100 + group,
            attempt=1,
            members=tuple(members),
            prompt_token_ids=tuple(random.integers(5, VOCABULARY, length).tolist()),
            timeout_s=10,
        )
        for group, length in enumerate(lengths)
    ]


def generate(
    engine: TransformersEngine, leases: Sequence[Lease], sampling: Sampling, should_stop: Callable[[], bool] = lambda: False
) -> dict[int, GroupRollouts]:
    groups = list(engine.generate(leases, sampling, should_stop))
    assert len({group.group_id for group in groups}) == len(groups)
    return {group.group_id: group for group in groups}


def tokens(group: GroupRollouts) -> dict[int, list[int]]:
    return {rollout.member: rollout.token_ids.tolist() for rollout in group.rollouts}


def teacher_forced(model: PreTrainedModel, lease: Lease, rollout: Rollout, temperature: float) -> Tensor:
    """log_softmax(logits / temperature) of the completion's tokens, from one unpadded forward pass over everything."""
    prompt = list(lease.prompt_token_ids)
    token_ids = torch.tensor([[*prompt, *rollout.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(input_ids=token_ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(-1, token_ids[0, len(prompt) :, None])[:, 0]


def as_drawn(models: dict[int, PreTrainedModel], lease: Lease, rollout: Rollout) -> np.ndarray:
    """Log-probabilities of a completion that several versions drew, the keys and values of former ones kept, by version."""
    cache, found, inputs, drawn = DynamicCache(), [], list(lease.prompt_token_ids), 0
    token_ids = rollout.token_ids.tolist()
    for version, count in zip(*np.unique(rollout.versions, return_counts=True), strict=True):
        inputs += token_ids[drawn : drawn + count - 1]
        wanted = torch.tensor(token_ids[drawn : drawn + count])
        with torch.no_grad():
            logits = models[version](
                input_ids=torch.tensor([inputs]), **{module._cache_argument(models[version]): cache}
            ).logits
        found.append(torch.log_softmax(logits[0, -count:], -1).gather(-1, wanted[:, None])[:, 0])
        inputs, drawn = [token_ids[drawn + count - 1]], drawn + count
    return torch.cat(found).numpy()


def assert_log_probs_are(
    model: PreTrainedModel, leases: Sequence[Lease], groups: dict[int, GroupRollouts], temperature: float = 1.0
) -> None:
    for lease in leases:
        for rollout in groups[lease.group_id].rollouts:
            expected = teacher_forced(model, lease, rollout, temperature)
            np.testing.assert_allclose(rollout.log_probs, expected.numpy(), atol=1e-5, rtol=0)
