"""What `benchmarks.rollout` asks of vLLM, in vLLM's own environment; the last line is JSON.

python -m benchmarks.rollout_engine bare MODEL PROMPTS SLOTS MEMBERS TOKENS
python -m benchmarks.rollout_engine updates MODEL SLOTS MEMBERS UPDATES
python -m benchmarks.rollout_engine gap MODEL float32|bfloat16
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

import numpy as np
import torch
from transformers import Qwen3ForCausalLM
from vllm import LLM, SamplingParams

from echo2.config_sections import WorkerSection
from echo2.dissemination.manifest import Manifest, Probe, describe
from echo2.dissemination.receiver import ReceivedSnapshot
from echo2.learning.probe import probe_token_ids, prompt_log_probs
from echo2.models.loading import Dtype, export_weights
from echo2.protocol import Lease, Sampling
from echo2.rollout.proof import require_weights
from echo2.rollout.updates import Updates
from echo2.rollout.vllm_engine import VllmEngine

CACHE_BYTES = 256 * 1024 * 1024
PROMPT = tuple(range(5, 25))
LONGEST = 900
SPACING = 12
"""Steps before and after an update, from which the usual length of a step is taken."""
FIRST_STEPS = 3
CERTAINTY = 6.0
"""By which logits are divided for completions whose log-probabilities tell something."""


def bare(model: str, prompts: str, slots: str, members: str, tokens: str) -> dict[str, float]:
    """Tokens per second from the second set of prompts on."""
    engine = LLM(
        model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=int(slots) * int(members),
        kv_cache_memory_bytes=CACHE_BYTES,
        logprobs_mode="processed_logprobs",
    )
    params = SamplingParams(temperature=1.0, max_tokens=int(tokens), ignore_eos=True, logprobs=0, detokenize=False, seed=1)
    wanted = [{"prompt_token_ids": ids} for ids in json.loads(Path(prompts).read_text()) for _ in range(int(members))]
    first = int(slots) * int(members)
    engine.generate(wanted[:first], params, use_tqdm=False)
    began_s = time.monotonic()
    outputs = engine.generate(wanted[first:], params, use_tqdm=False)
    return {"tokens_per_s": sum(len(o.outputs[0].token_ids) for o in outputs) / (time.monotonic() - began_s)}


class _Arrivals:
    """Snapshots that lie in memory, as the worker's follower gives them."""

    def __init__(self) -> None:
        self.snapshot: ReceivedSnapshot | None = None

    @property
    def has_arrival(self) -> bool:
        return self.snapshot is not None

    def take(self) -> ReceivedSnapshot | None:
        snapshot, self.snapshot = self.snapshot, None
        return snapshot


def updates(model: str, slots: str, members: str, count: str) -> dict[str, dict[str, float]]:
    """By `worker.update_mode`, seconds that a load takes, that it costs of generation, and that generation stands still."""
    return {mode: _updates(model, mode, int(slots), int(members), int(count)) for mode in ("drain", "in_flight")}


def _updates(model: str, mode: Literal["drain", "in_flight"], slots: int, members: int, count: int) -> dict[str, float]:
    """Medians over the updates."""
    engine, policy = _engine(model, "float32", slots, members, mode)
    snapshots = [_snapshot(policy, version) for version in (0, 1)]
    engine.load_weights(snapshots[0].weights, 0)
    leases = _leases(slots, members)
    measured = [
        _drain(engine, leases, snapshots[number % 2]) if mode == "drain" else _in_flight(engine, leases, snapshots[number % 2])
        for number in range(count + 1)
    ]
    loads_s, losses_s, pauses_s = zip(*measured[1:], strict=True)
    return {"load_s": median(loads_s), "loss_s": median(losses_s), "pause_s": median(pauses_s)}


def _drain(engine: VllmEngine, leases: list[Lease], snapshot: ReceivedSnapshot) -> tuple[float, float, float]:
    """Seconds of a load between two sets, how much later the second one has its first tokens, and the pause: the load."""
    usual_s = [_first_tokens_s(engine, leases)]
    engine.drop_all()
    began_s = time.monotonic()
    engine.load_weights(snapshot.weights, snapshot.manifest.version)
    require_weights(engine, snapshot.manifest, "float32")
    load_s = time.monotonic() - began_s
    _begin(engine, leases, steps=FIRST_STEPS)
    taken_s = time.monotonic() - began_s
    usual_s.append(_first_tokens_s(engine, leases))
    return load_s, taken_s - mean(usual_s), load_s


def _first_tokens_s(engine: VllmEngine, leases: list[Lease]) -> float:
    engine.drop_all()
    began_s = time.monotonic()
    _begin(engine, leases, steps=FIRST_STEPS)
    return time.monotonic() - began_s


def _in_flight(engine: VllmEngine, leases: list[Lease], snapshot: ReceivedSnapshot) -> tuple[float, float, float]:
    """Seconds from a snapshot's arrival to its proof, those of them that usual steps would not have taken, and the pause."""
    if not engine.under_way:
        _begin(engine, leases, steps=SPACING)
    arrivals: Any = _Arrivals()
    arrivals.snapshot = snapshot
    due, staging = Updates(arrivals, engine, "in_flight", lambda: None), 0
    usual_s = [_step_s(engine) for _ in range(SPACING)]
    began_s = time.monotonic()
    while due.due() is None:
        engine.step()
        staging += 1
    exchange_began_s = time.monotonic()
    engine.load_weights(snapshot.weights, snapshot.manifest.version)
    pause_s = time.monotonic() - exchange_began_s
    # The proof takes a step, in which all else goes on.
    require_weights(engine, snapshot.manifest, "float32")
    taken_s = time.monotonic() - began_s
    usual_s += [_step_s(engine) for _ in range(SPACING)]
    return taken_s, taken_s - (staging + 1) * median(usual_s), pause_s


def gap(model: str, dtype: Dtype) -> dict[str, float]:
    """Mean absolute difference of sampled tokens' log-probabilities from transformers', after ten updates."""
    engine, policy = _engine(model, dtype, 4, 8, "in_flight")
    # The benchmark's model is all but certain of each token.
    policy.get_input_embeddings().weight.data /= CERTAINTY
    random = torch.Generator().manual_seed(0)
    for version in range(10):
        for weight in policy.parameters():
            weight.data += 1e-3 * weight.std() * torch.randn(weight.shape, generator=random)
        weights = export_weights(policy, dtype)
        engine.load_weights(weights, version)
    policy = policy.to(getattr(torch, dtype))
    sampling = Sampling(temperature=1.0, max_completion_tokens=64, stop_token_ids=(), seed=1)
    gaps = []
    for group in engine.generate(_leases(4, 8), sampling, lambda: False):
        for rollout in group.rollouts:
            ids = torch.tensor([[*PROMPT, *rollout.token_ids.tolist()]])
            with torch.no_grad():
                logits = policy(input_ids=ids).logits[0, len(PROMPT) - 1 : -1].float()
            expected = torch.log_softmax(logits, -1).gather(-1, ids[0, len(PROMPT) :, None])[:, 0]
            gaps.append(np.abs(rollout.log_probs - expected.numpy()))
    return {"gap": float(np.concatenate(gaps).mean())}


def _engine(model: str, dtype: Dtype, slots: int, members: int, mode: Literal["drain", "in_flight"]) -> tuple[VllmEngine, Any]:
    policy = Qwen3ForCausalLM.from_pretrained(model).eval()
    settings = WorkerSection(slots=slots, update_mode=mode, cache_bytes=CACHE_BYTES)
    return VllmEngine(Path(model), dtype, settings, members, longest_tokens=LONGEST), policy


def _snapshot(policy: Any, version: int) -> ReceivedSnapshot:
    token_ids = probe_token_ids(policy.config.vocab_size)
    with torch.no_grad():
        probe = Probe(token_ids=tuple(token_ids), log_probs=tuple(prompt_log_probs(policy, token_ids).tolist()))
    weights = export_weights(policy, "float32")
    manifest: Manifest = describe(weights, "run", version, 1024 * 1024, probe)
    return ReceivedSnapshot(manifest, weights, 0.0, len(weights))


def _leases(groups: int, members: int) -> list[Lease]:
    numbers = tuple(range(members))
    return [Lease(group_id=g, attempt=1, members=numbers, prompt_token_ids=PROMPT, timeout_s=1.0) for g in range(groups)]


def _begin(engine: VllmEngine, leases: list[Lease], steps: int) -> None:
    sampling = Sampling(temperature=1.0, max_completion_tokens=LONGEST, stop_token_ids=(), seed=1)
    for lease in leases:
        engine.begin(lease, sampling)
    for _ in range(steps):
        engine.step()


def _step_s(engine: VllmEngine) -> float:
    began_s = time.monotonic()
    engine.step()
    return time.monotonic() - began_s


if __name__ == "__main__":
    answer = {"bare": bare, "updates": updates, "gap": gap}[sys.argv[1]](*sys.argv[2:])
    print(json.dumps(answer))
