"""Engines of the real vLLM with small random models."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from drawn import teacher_forced
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from echo2.config_sections import WorkerSection
from echo2.dissemination.manifest import Manifest, Probe, describe
from echo2.learning.probe import probe_token_ids, prompt_log_probs
from echo2.models.loading import Dtype, export_weights
from echo2.protocol import GroupRollouts, Lease
from echo2.rollout.vllm_engine import VllmEngine

VOCABULARY = 54
LARGEST_GAP = {"float32": 1e-4, "bfloat16": 2e-2}
"""Mean absolute difference of log-probabilities."""
KINDS = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def make_model(seed: int, tied: bool, positions: int = 64) -> Qwen3ForCausalLM:
    """Norms differ from 1 and from each other, so that one in the wrong place shows."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        initializer_range=0.15,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).eval()
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight += 0.1 * torch.randn_like(weight)
    return model


def make_gpt2(seed: int) -> GPT2LMHeadModel:
    """A model whose weights vLLM renames and whose positions are learned."""
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=64, n_layer=2, n_head=2, initializer_range=0.15)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config).eval()


def snapshot(model: PreTrainedModel) -> bytes:
    return export_weights(model, "float32")


def proven(model: PreTrainedModel, version: int) -> Manifest:
    """The manifest that a learner would publish with the weights of `model`."""
    token_ids = probe_token_ids(VOCABULARY)
    with torch.no_grad():
        probe = Probe(token_ids=tuple(token_ids), log_probs=tuple(prompt_log_probs(model, token_ids).tolist()))
    return describe(snapshot(model), "run", version, 1024, probe)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., VllmEngine]]:
    """Starts an engine for models like one; all are kept, since the first that goes takes with it what they share."""
    kept = []

    def make(model: PreTrainedModel, dtype: Dtype = "float32", **changes: Any) -> VllmEngine:
        folder = tmp_path_factory.mktemp("model")
        model.config.save_pretrained(folder)
        settings = WorkerSection(**{"slots": 4, "cache_bytes": 2**24} | changes)
        kept.append(VllmEngine(folder, dtype, settings, members=8, longest_tokens=64))
        return kept[-1]

    yield make


@pytest.fixture(scope="module")
def engines(start: Callable[..., VllmEngine]) -> dict[bool, VllmEngine]:
    """A running engine for tied and for untied embeddings."""
    return {tied: start(make_model(0, tied)) for tied in (True, False)}


@pytest.fixture(scope="module")
def flying(start: Callable[..., VllmEngine]) -> dict[bool, VllmEngine]:
    """As `engines`, but updated in flight."""
    return {tied: start(make_model(0, tied), update_mode="in_flight") for tied in (True, False)}


def gaps(model: PreTrainedModel, leases: list[Lease], groups: dict[int, GroupRollouts], temperature: float = 1.0) -> Tensor:
    """Absolute differences, [tokens], of the log-probabilities of all tokens from those that transformers gives."""
    found = [
        torch.from_numpy(rollout.log_probs) - teacher_forced(model, lease, rollout, temperature)
        for lease in leases
        for rollout in groups[lease.group_id].rollouts
    ]
    assert len(found) == sum(len(lease.members) for lease in leases)
    return torch.cat(found).abs()
