"""Packed rows against padded ones, over several architectures: same values, same gradients, no leak."""

import logging
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from learning_batches import random_batch
from torch.nn.utils import parameters_to_vector
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from echo2.learning import packing, torch_learner
from echo2.learning.batch import rank_share
from echo2.learning.log_probs import completion_log_probs
from echo2.learning.packing import enable_packing, layout, packed_hidden

CPU = torch.device("cpu")
SIZES = {"vocab_size": 54, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
PACKABLE = {
    "qwen3": Qwen3Config(head_dim=16, **SIZES),
    "llama": LlamaConfig(**SIZES),
    "tied llama": LlamaConfig(tie_word_embeddings=True, **SIZES),
    "sliding window": MistralConfig(sliding_window=4, **SIZES),
    "window in one layer": Qwen2Config(use_sliding_window=True, sliding_window=4, max_window_layers=1, **SIZES),
    "windows and full layers": Gemma3TextConfig(head_dim=8, sliding_window=4, **SIZES),
    "learned positions": GPT2Config(
        vocab_size=54, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=2
    ),
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
UNPACKABLE = {
    "soft cap": (Gemma2Config(head_dim=8, **SIZES), "softcap"),
    "attention of its own": (BloomConfig(vocab_size=54, hidden_size=32, n_layer=2, n_head=4), "does not let its attention"),
    "window too long to probe": (MistralConfig(sliding_window=10_000, **SIZES | {"max_position_embeddings": 20_000}), "10000"),
    "linear attention": (Qwen3NextConfig(**SIZES, **EXPERTS), "layers of the kind linear_attention"),
}


def make_model(settings):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(settings).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def values_and_gradients(model, parts):
    """Log-probabilities in the batch's order, and the gradient of a weighted sum of them."""
    found = [completion_log_probs(model, part, 0.8)[0] for part in parts]
    weights = torch.cat([part.behaviour_log_probs for part in parts])
    model.zero_grad()
    (torch.cat(found) * weights).mean().backward()
    gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in model.parameters()]
    sequences = torch.cat(found).detach().split([length for part in parts for length in part.lengths.tolist()])
    origins = torch.cat([part.origins for part in parts])
    return torch.cat([sequences[i] for i in origins.argsort()]), parameters_to_vector(gradients)


@pytest.mark.parametrize("name", PACKABLE)
@pytest.mark.parametrize("limit", [30, 10_000])
def test_packed_is_padded(name, limit):
    model = make_model(PACKABLE[name])
    batch = random_batch(model, 0, seed=11)
    padded, wanted = values_and_gradients(model, rank_share(batch, 10_000, CPU).parts)
    assert enable_packing(model) is None
    parts = rank_share(batch, limit, CPU, packed=True).parts
    assert (len(parts) > 1) == (limit == 30)
    packed, found = values_and_gradients(model, parts)
    assert torch.allclose(packed, padded, rtol=0.0, atol=1e-5)
    assert wanted.abs().max() > 1e-2
    assert torch.allclose(found, wanted, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("name", PACKABLE)
@pytest.mark.parametrize("shared", [0, 1, 5])
def test_a_change_to_one_sequence_changes_no_other_and_one_to_what_is_shared_changes_those_that_share(name, shared):
    model = make_model(PACKABLE[name])
    assert enable_packing(model) is None
    lengths = [3, 7, 7, 12, 1, 20]
    sharing = {1, 2, 3} if shared else set()
    ends = np.cumsum([shared, *(length - shared * (i in sharing) for i, length in enumerate(lengths))])
    own = [np.arange(begin, end) for begin, end in pairwise(ends)]
    common = np.arange(shared)
    packed = layout([np.concatenate([common, part]) if i in sharing else part for i, part in enumerate(own)], CPU)
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 54, (1, int(ends[-1])), generator=draw)
    with torch.no_grad():
        before = packed_hidden(model, tokens, packed)
        for touched, sharers in [*((part, []) for part in own), (common, own[1:4])]:
            changed = tokens.clone()
            changed[0, touched] = (tokens[0, touched] + 1) % 54
            differs = (before != packed_hidden(model, changed, packed)).any(-1)[0].nonzero().flatten().tolist()
            assert set(differs) <= {*touched, *(place for part in sharers for place in part)}
            # A window may end before the sequence does.
            assert set(differs) >= {*touched, *(part[0] for part in sharers if len(touched))}


@pytest.mark.parametrize("name", UNPACKABLE)
def test_a_model_that_would_leak_is_left_as_it_was_and_the_reason_given(name):
    settings, reason = UNPACKABLE[name]
    model = make_model(settings)
    ids = torch.arange(20)[None]
    before = model(input_ids=ids, use_cache=False).logits
    assert reason in enable_packing(model)
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)


def test_attention_that_sees_a_neighbour_is_found_by_the_probe(monkeypatch):
    honest = layout

    def one_sequence(sequences, device):
        return replace(honest(sequences, device), runs=((1, sum(map(len, sequences))),))

    monkeypatch.setattr(packing, "layout", one_sequence)
    assert "differ by" in enable_packing(make_model(PACKABLE["llama"]))


@pytest.mark.parametrize("name", ["llama", "sliding window"])
def test_a_model_ready_for_packing_is_an_ordinary_model_otherwise(name):
    model = make_model(PACKABLE[name])
    ids, mask = torch.arange(3, 23).view(2, 10), torch.ones(2, 10, dtype=torch.int64)
    mask[0, :4] = 0
    before = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    assert enable_packing(model) is None
    assert torch.equal(model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()], before)


def test_what_is_shared_is_not_taken_for_a_sequence_of_its_own_by_the_probe(monkeypatch):
    honest = layout

    def unshared(sequences, device):
        made = honest(sequences, device)
        return replace(made, places=made.places.clamp(max=0) if made.places is not None else None)

    monkeypatch.setattr(packing, "layout", unshared)
    assert "differ by" in enable_packing(make_model(PACKABLE["llama"]))


def test_a_layout_gives_equally_long_neighbours_in_one_run():
    made = layout([np.arange(0, 2), np.arange(2, 5), np.arange(5, 8), np.arange(8, 9)], CPU)
    assert made.runs == ((1, 2), (2, 3), (1, 1))
    assert made.position_ids.tolist() == [[0, 1, 0, 1, 2, 0, 1, 2, 0]]
    assert made.bounds.tolist() == [0, 2, 5, 8, 9]
    assert made.longest == 3
    assert made.places is made.firsts is None


def test_a_layout_says_where_shared_tokens_lie():
    made = layout([np.array([0, 1, 2]), np.array([0, 1, 3]), np.array([4, 5])], CPU)
    assert made.runs == ((2, 3), (1, 2))
    assert made.position_ids.tolist() == [[0, 1, 2, 2, 0, 1]]
    assert made.bounds.tolist() == [0, 3, 6, 8]
    assert made.places.tolist() == [0, 1, 2, 0, 1, 3, 4, 5]
    assert made.firsts.tolist() == [0, 1, 2, 5, 6, 7]


def test_packed_micro_batches_keep_to_the_limit_and_hold_a_prompt_once(make_learner):
    batch = random_batch(make_learner().model, 0, seed=2, groups=6)
    prompts = [len(group.prompt_token_ids) for group in batch.groups]
    completions = [len(member.rollout.token_ids) - 1 for group in batch.groups for member in group.members]
    alone = [len(g.prompt_token_ids) + len(m.rollout.token_ids) - 1 for g in batch.groups for m in g.members]
    for limit in (1, 40, 100, 10_000):
        parts = rank_share(batch, limit, CPU, packed=True).parts
        assert all(part.token_ids.numel() <= limit or len(part.lengths) == 1 for part in parts)
        assert sum(part.token_ids.numel() for part in parts) <= sum(alone)
    assert len(parts) == 1
    assert parts[0].token_ids.numel() == sum(prompts) + sum(completions) < sum(alone)


def test_a_learner_trains_a_model_that_cannot_be_packed_with_padding_and_says_so(make_learner, monkeypatch, caplog):
    monkeypatch.setattr(torch_learner, "enable_packing", lambda model: "it is made of glass")
    with caplog.at_level(logging.WARNING):
        learner = make_learner()
    assert [record.message for record in caplog.records] == [
        "Qwen3ForCausalLM cannot be packed, so its sequences are padded: it is made of glass"
    ]
    batch = random_batch(learner.model, 0, seed=4)
    monkeypatch.undo()
    assert learner.train_step(batch) == pytest.approx(make_learner().train_step(batch), abs=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["qwen3", "sliding window"])
def test_flash_attention_on_cuda_packs_in_bfloat16(name):
    settings = PACKABLE[name].to_dict() | {"head_dim": 32}
    model = make_model(type(PACKABLE[name]).from_dict(settings)).to("cuda", torch.bfloat16)
    assert enable_packing(model) is None
