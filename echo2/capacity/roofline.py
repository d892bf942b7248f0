"""Roofline: what throughput to expect of a model on a GPU that nobody has measured yet.

Invariants: pure functions of frozen dataclasses; every estimate says that it is one; a model that does not fit is a UserError,
never a throughput of 0.

**Model.** A GPU moves β bytes and computes φ floating-point operations per second, both times an efficiency. With n sequences
of mean context c in flight, one decode step reads all weights once and the key-value cache of every sequence, and computes
2 operations per parameter and token and 4·heads·head_dim per layer for each token that it attends to. It takes the longer of

    (W + n·c·k)/β        and        n·(2·N + 4·layers·heads·head_dim·c)/φ

with W bytes of weights, N parameters, k bytes of cache per token. Prompts are computed at φ. The slots n are what the memory
left by the weights holds at full length. In steady state every slot turns over once while a sequence lives, so its life takes
completion_tokens decode steps and the prefill of n prompts, and n/life sequences end per second.

**What it leaves out.** Completions are all of mean length; the members of a group share no cache of their prompt; tensor
parallelism divides all work evenly and its communication is free; activations take memory from the share that is not usable.
The efficiency stands for all the rest: kernels, sampling, scheduling.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from echo2.errors import UserError

EFFICIENCY = 0.6
"""Share of the datasheet's bandwidth and bf16 rate that serving engines commonly get; a guess until measured."""

USABLE_MEMORY_SHARE = 0.9
"""Share of a GPU's memory for weights and key-value cache; activations, kernels and fragments take the rest."""

GIB = 2**30

COUNTABLE_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose parameters can be counted from their configuration."""

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as its maker describes it. Raises UserError for numbers that cannot be."""

    name: str
    memory_gib: float
    memory_bandwidth_gb_per_s: float
    """β: 10⁹ bytes per second."""
    bf16_dense_tflops: float
    """φ: 10¹² floating-point operations per second of the tensor cores, without sparsity."""
    source: str
    """The document that the figures are from."""

    def __post_init__(self) -> None:
        for name in ("memory_gib", "memory_bandwidth_gb_per_s", "bf16_dense_tflops"):
            _check_positive(f"{name} of GPU {self.name}", getattr(self, name))


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the roofline needs to know of a dense decoder. Raises UserError for numbers that cannot be."""

    parameters: int
    """N."""
    layers: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    weight_bytes: float = 2.0
    """Bytes per parameter: 2 for bfloat16."""
    kv_element_bytes: float = 2.0
    """Bytes per key or value element."""

    def __post_init__(self) -> None:
        for name in ("parameters", "layers", "attention_heads", "kv_heads", "head_dim"):
            _check_count(f"{name} of the model", getattr(self, name))
        for name in ("weight_bytes", "kv_element_bytes"):
            _check_positive(f"{name} of the model", getattr(self, name))

    @property
    def weights_bytes(self) -> float:
        """W: all weights."""
        return self.parameters * self.weight_bytes

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        parameters: int | None = None,
        weight_bytes: float = 2.0,
        kv_element_bytes: float = 2.0,
    ) -> ModelShape:
        """The shape of a model from the content of its Hugging Face config.json.

        The parameters are counted for `llama`, `mistral`, `qwen2` and `qwen3`; other dense decoders need `parameters`. Raises
        UserError for mixtures of experts, for other types without `parameters`, and for keys that are missing.

        >>> shape = ModelShape.from_config({
        ...     "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128,
        ...     "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": True})
        >>> shape.parameters
        596049920
        """
        if any(config.get(key) for key in EXPERT_KEYS):
            raise UserError(
                f"model_type = {config.get('model_type')!r} is a mixture of experts, which the roofline does not cover: "
                "measure its throughput instead"
            )
        heads = _entry(config, "num_attention_heads")
        return cls(
            parameters=_count_parameters(config) if parameters is None else parameters,
            layers=_entry(config, "num_hidden_layers"),
            attention_heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=_head_dim(config),
            weight_bytes=weight_bytes,
            kv_element_bytes=kv_element_bytes,
        )


@dataclass(frozen=True, slots=True)
class ThroughputEstimate:
    """What one worker with these GPUs may complete."""

    groups_per_s: float
    """A worker's share of μ."""
    tokens_per_s: float
    """Completion tokens per second, all slots together."""
    slots: int
    """Sequences in flight: as many as the key-value cache holds at full length, and the engine takes."""
    group_latency_s: float
    """From the start of a group to its last member; in waves where the slots are fewer than the members."""
    decode_step_s: float
    """One token for every slot."""
    prefill_s: float
    """One prompt."""
    bound: Literal["memory", "compute"]
    """Which of the two makes the decode step as long as it is."""
    weights_gib: float
    kv_cache_gib: float
    """Memory that the weights leave for the key-value cache, all GPUs together."""
    source: Literal["estimate"] = "estimate"


@cache
def known_gpus() -> Mapping[str, Gpu]:
    """GPUs whose figures are on file, by name."""
    text = resources.files("echo2.capacity").joinpath("gpus.toml").read_text(encoding="utf-8")
    return {entry["name"]: Gpu(**entry) for entry in tomllib.loads(text)["gpu"]}


def find_gpu(name: str) -> Gpu:
    """The GPU called `name`; raises UserError, with all names, where there is none.

    >>> find_gpu("H100 SXM").memory_bandwidth_gb_per_s
    3350
    """
    if name not in known_gpus():
        raise UserError(f"GPU {name!r} is not on file: take one of {', '.join(known_gpus())}, or give the figures of a Gpu")
    return known_gpus()[name]


def estimate_throughput(
    gpu: Gpu,
    model: ModelShape,
    prompt_tokens: int,
    completion_tokens: int,
    members: int,
    tensor_parallel: int = 1,
    efficiency: float = EFFICIENCY,
    most_slots: int | None = None,
) -> ThroughputEstimate:
    """Throughput of one worker whose engine spans `tensor_parallel` GPUs; lengths are means, `members` is G.

    `most_slots` are the sequences that the engine takes at a time at most; None for as many as the memory holds.

    Raises UserError where the weights and one sequence do not fit, and for numbers that cannot be.

    W = 2 GB and k = 2·10 layers·10 heads·50·2 bytes = 20 kB. Of 4 GiB, 90 % = 3.865 GB are usable, so 1.865 GB hold 186
    sequences of 500 tokens, 10 MB each. A step reads 2 GB + 186·300·20 kB = 3.116 GB at 1000·0.5 GB/s; its 186·2.006 GFLOP at
    100 TFLOPS would take 3.73 ms. A prompt takes 200.1 GFLOP. A life is 400·6.232 ms + 186·2.001 ms = 2.865 s.

    >>> gpu = Gpu("example", memory_gib=4, memory_bandwidth_gb_per_s=1000, bf16_dense_tflops=200, source="none")
    >>> model = ModelShape(10**9, layers=10, attention_heads=10, kv_heads=10, head_dim=50)
    >>> found = estimate_throughput(gpu, model, prompt_tokens=100, completion_tokens=400, members=8, efficiency=0.5)
    >>> found.slots, found.bound, round(found.decode_step_s * 1000, 3), round(found.prefill_s * 1000, 3)
    (186, 'memory', 6.232, 2.001)
    >>> round(found.group_latency_s, 3), round(found.groups_per_s, 3), round(found.tokens_per_s), found.source
    (2.865, 8.115, 25969, 'estimate')
    """
    for name, count in (("prompt_tokens", prompt_tokens), ("completion_tokens", completion_tokens), ("members", members)):
        _check_count(name, count)
    _check_count("tensor_parallel", tensor_parallel)
    if not 0 < efficiency <= 1:
        raise UserError(f"efficiency = {efficiency!r} is not above 0 and at most 1: give the share of the datasheet's rates")
    token_bytes = _cache_bytes_per_token(model, tensor_parallel)
    slots = _slots(gpu, model, (prompt_tokens + completion_tokens) * token_bytes, tensor_parallel)
    if most_slots is not None:
        _check_count("most_slots", most_slots)
        slots = min(slots, most_slots)
    bytes_per_s = gpu.memory_bandwidth_gb_per_s * 1e9 * tensor_parallel * efficiency
    flops_per_s = gpu.bf16_dense_tflops * 1e12 * tensor_parallel * efficiency
    context_tokens = prompt_tokens + completion_tokens / 2
    read_s = (model.weights_bytes + slots * context_tokens * token_bytes) / bytes_per_s
    compute_s = slots * _token_flops(model, context_tokens) / flops_per_s
    decode_step_s = max(read_s, compute_s)
    prefill_s = prompt_tokens * _token_flops(model, prompt_tokens / 2) / flops_per_s
    life_s = completion_tokens * decode_step_s + slots * prefill_s
    return ThroughputEstimate(
        groups_per_s=slots / life_s / members,
        tokens_per_s=slots / life_s * completion_tokens,
        slots=slots,
        group_latency_s=life_s * -(-members // slots),
        decode_step_s=decode_step_s,
        prefill_s=prefill_s,
        bound="memory" if read_s >= compute_s else "compute",
        weights_gib=model.weights_bytes / GIB,
        kv_cache_gib=_usable_bytes(gpu, tensor_parallel) / GIB - model.weights_bytes / GIB,
    )


def _slots(gpu: Gpu, model: ModelShape, sequence_bytes: float, tensor_parallel: int) -> int:
    usable_bytes = _usable_bytes(gpu, tensor_parallel)
    slots = math.floor((usable_bytes - model.weights_bytes) / sequence_bytes)
    if slots < 1:
        raise UserError(
            f"the model does not fit on {tensor_parallel} × {gpu.name}: {model.weights_bytes / GIB:.2f} GiB of weights and "
            f"{sequence_bytes / GIB:.2f} GiB of key-value cache for one sequence exceed {usable_bytes / GIB:.2f} GiB, the "
            f"usable {USABLE_MEMORY_SHARE:.0%} of its memory: raise tensor_parallel, take a GPU with more, or shorter sequences"
        )
    return slots


def _usable_bytes(gpu: Gpu, tensor_parallel: int) -> float:
    return gpu.memory_gib * GIB * tensor_parallel * USABLE_MEMORY_SHARE


def _cache_bytes_per_token(model: ModelShape, tensor_parallel: int) -> float:
    """k, all GPUs together: a key and a value per layer and head; GPUs beyond the number of heads hold copies."""
    held_heads = -(-model.kv_heads // tensor_parallel) * tensor_parallel
    return 2 * model.layers * held_heads * model.head_dim * model.kv_element_bytes


def _token_flops(model: ModelShape, context_tokens: float) -> float:
    """Operations for one token that attends to `context_tokens`: one multiplication and one addition per number read."""
    return 2 * model.parameters + 4 * model.layers * model.attention_heads * model.head_dim * context_tokens


def _count_parameters(config: Mapping[str, Any]) -> int:
    kind = config.get("model_type")
    if kind not in COUNTABLE_TYPES:
        known = ", ".join(COUNTABLE_TYPES)
        raise UserError(f"model_type = {kind!r} is none of {known}, whose parameters can be counted: give `parameters`")
    hidden, inner, heads = (_entry(config, key) for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    queries, keys = heads * _head_dim(config), (config.get("num_key_value_heads") or heads) * _head_dim(config)
    layer = 2 * hidden * (queries + keys) + 3 * hidden * inner + 2 * hidden
    if kind == "qwen2":
        layer += queries + 2 * keys
    if kind == "qwen3":
        layer += 2 * _head_dim(config)
    if kind in ("llama", "qwen3") and config.get("attention_bias"):
        layer += queries + 2 * keys + hidden
    if kind == "llama" and config.get("mlp_bias"):
        layer += 2 * inner + hidden
    embeddings = 1 if config.get("tie_word_embeddings") else 2
    return embeddings * _entry(config, "vocab_size") * hidden + _entry(config, "num_hidden_layers") * layer + hidden


def _head_dim(config: Mapping[str, Any]) -> int:
    if config.get("head_dim") or config.get("model_type") == "qwen3":
        return _entry(config, "head_dim")
    return _entry(config, "hidden_size") // _entry(config, "num_attention_heads")


def _entry(config: Mapping[str, Any], key: str) -> int:
    if key not in config:
        raise UserError(f"the model's configuration has no {key}: give the config.json of a Hugging Face causal language model")
    return config[key]


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{name} = {value!r} is not a finite number above 0: give the datasheet's or the model's own")


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise UserError(f"{name} = {value!r} is not a whole number from 1 up: give how many there are")
