"""Log-probabilities of the learner against models whose values are known."""

import math

import numpy as np
import pytest
import torch
from learning_batches import group, oracle_log_probs, random_batch, rollout
from torch import nn
from transformers import CohereConfig, CohereForCausalLM

from echo2.errors import ConfigError
from echo2.learning import fused
from echo2.learning.batch import rank_share
from echo2.learning.log_probs import check_head, completion_log_probs
from echo2.protocol import Batch

CPU = torch.device("cpu")


class Bigram(nn.Module):
    """A language model whose next token depends on the last one alone: `table[last]` are its logits."""

    def __init__(self, table):
        super().__init__()
        vocabulary = len(table)
        self.embedding = nn.Embedding.from_pretrained(torch.eye(vocabulary))
        self.head = nn.Linear(vocabulary, vocabulary, bias=False)
        self.head.weight = nn.Parameter(table.T.contiguous())

    def base_model(self, input_ids, use_cache):
        return type("Output", (), {"last_hidden_state": self.embedding(input_ids)})

    def get_output_embeddings(self):
        return self.head


def one_batch(*sequences):
    """One micro-batch of (prompt, completion) pairs."""
    groups = [
        group(i, prompt, [(rollout(0, tokens, [-1.0] * len(tokens)), 1.0)]) for i, (prompt, tokens) in enumerate(sequences)
    ]
    (part,) = rank_share(Batch(0, tuple(groups)), 10_000, CPU).parts
    return part


def test_a_uniform_model_gives_every_token_the_same_log_probability():
    part = one_batch(([3], [1, 4, 2]), ([0, 1, 2], [3]))
    found, entropies = completion_log_probs(Bigram(torch.zeros(5, 5)), part, 1.0)
    assert found.tolist() == pytest.approx([-math.log(5)] * 4)
    assert entropies.tolist() == pytest.approx([math.log(5)] * 4)


def test_a_bigram_model_predicts_each_token_from_the_one_before():
    table = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    part = one_batch(([5, 3], [1, 4]), ([2], [0, 0, 5]))
    found, entropies = completion_log_probs(Bigram(table), part, 1.0)
    known = table.log_softmax(-1).numpy()
    assert part.targets.tolist() == [1, 4, 0, 0, 5]
    assert found.tolist() == pytest.approx([known[3, 1], known[1, 4], known[2, 0], known[0, 0], known[0, 5]], abs=1e-6)
    distribution = torch.distributions.Categorical(logits=table[torch.tensor([3, 1, 2, 0, 0])])
    assert entropies.tolist() == pytest.approx(distribution.entropy().tolist(), abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_ragged_batch_agrees_with_each_sequence_alone(make_learner, temperature):
    model = make_learner().model
    batch = random_batch(model, 0, seed=1, temperature=temperature)
    (part,) = rank_share(batch, 10_000, CPU).parts
    found, _ = completion_log_probs(model, part, temperature)
    assert len(found) == sum(len(m.rollout.token_ids) for g in batch.groups for m in g.members)
    assert found.detach().numpy() == pytest.approx(part.behaviour_log_probs.numpy(), abs=1e-5)


def test_padding_changes_nothing(make_learner):
    model = make_learner().model
    short, long = ([7, 8], [9, 2]), ([4] * 20, [5] * 8)
    alone, _ = completion_log_probs(model, one_batch(short), 1.0)
    padded, _ = completion_log_probs(model, one_batch(short, long), 1.0)
    assert padded[:2].tolist() == pytest.approx(alone.tolist(), abs=1e-5)
    assert alone.detach().numpy() == pytest.approx(oracle_log_probs(model, *short), abs=1e-5)


@pytest.mark.parametrize("tile_logits", [1, 54 * 3, 1 << 22])
def test_tiles_change_neither_values_nor_gradients(make_learner, monkeypatch, tile_logits):
    model = make_learner().model.double()
    part = one_batch(([7, 8], [9, 2, 4, 4]), ([6], [5, 3, 2]))
    weights = torch.linspace(-1.0, 1.0, 7, dtype=torch.float64)

    hidden = model.model(input_ids=part.token_ids, use_cache=False).last_hidden_state.flatten(0, 1)[part.places]
    expected = (model.lm_head(hidden) / 0.7).log_softmax(-1).gather(-1, part.targets[:, None])[:, 0]
    wanted = torch.autograd.grad((expected * weights).sum(), list(model.parameters()))

    monkeypatch.setattr(fused, "TILE_LOGITS", tile_logits)
    found, _ = completion_log_probs(model, part, 0.7)
    gradients = torch.autograd.grad((found * weights).sum(), list(model.parameters()))
    assert torch.allclose(found, expected, rtol=0.0, atol=1e-12)
    for gradient, one in zip(gradients, wanted, strict=True):
        assert torch.allclose(gradient, one, rtol=0.0, atol=1e-12)


def test_micro_batches_keep_to_the_limit_and_hold_every_token_once(make_learner):
    batch = random_batch(make_learner().model, 0, seed=2, groups=6)
    for limit in (1, 40, 100, 10_000):
        parts = rank_share(batch, limit, CPU).parts
        assert all(part.token_ids.numel() <= limit or len(part.token_ids) == 1 for part in parts)
        rollouts = [member.rollout for g in batch.groups for member in g.members]
        tokens = np.sort(np.concatenate([part.targets.numpy() for part in parts]))
        assert tokens.tolist() == np.sort(np.concatenate([r.token_ids for r in rollouts])).tolist()
    assert len(rank_share(batch, 1, CPU).parts) == 24


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="group 0 has an empty prompt"):
        one_batch(([], [1, 2]))


def test_a_model_that_changes_its_logits_after_the_head_is_refused(make_learner):
    check_head(make_learner().model)
    settings = CohereConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, logit_scale=0.5
    )
    with pytest.raises(ConfigError, match="CohereForCausalLM"):
        check_head(CohereForCausalLM(settings).eval())
