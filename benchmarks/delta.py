"""What a new version of the weights costs to send: lossless deltas, their share of the full bytes and their speed on one core.

    python -m benchmarks.delta [--quick] [--json FILE]

A causal language model of 59 M parameters, float32 with its library's own initial weights, takes steps of AdamW at a learning
rate of 1e-6 with the project's default betas and Gaussian gradients, and is exported in bfloat16 as the learner does it. Deltas
span 1, 4, and 16 steps: from the initial weights, where Adam's first step moves every weight by the whole learning rate, the
worst there is; and after 50 steps, where its averages have settled and most of the noise cancels.

Beside ECHO-2's delta stand zstd at level 1 of the full bytes and zstd at level 1 of the new weights XOR the old ones. All three
are read back into new memory of the same kind, checked by the blake3 of the result, and compared bit for bit. Speeds are bytes
of weights per second in one thread, the best of several tries; digests of base and target are known beforehand, as they are
from the manifests.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from transformers import AutoModelForCausalLM, Qwen2Config
from zstandard import ZstdCompressor, ZstdDecompressor

from echo2.config_learner import LearnerSection
from echo2.dissemination.delta import apply_delta, encode_delta
from echo2.models.loading import export_weights

LEARNING_RATE = 1e-6
SPANS_STEPS = (1, 4, 16)
GRADIENT_RMS = 1e-4


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the measurement is."""

    hidden: int
    layers: int
    vocabulary: int
    settling_steps: int
    tries: int


FULL = Scale(hidden=512, layers=12, vocabulary=16384, settling_steps=50, tries=7)
QUICK = Scale(hidden=256, layers=4, vocabulary=4096, settling_steps=16, tries=3)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two versions of the weights."""

    phase: str
    steps: int
    base: bytes
    target: bytes

    @property
    def changed_share(self) -> float:
        """Share of the 16-bit words that differ."""
        return float(np.mean(_words(self.base) != _words(self.target)))


@dataclass(frozen=True, slots=True)
class Result:
    """One way of sending one pair."""

    share_of_full: float
    encode_gb_per_s: float
    decode_gb_per_s: float


def pairs(scale: Scale) -> Iterator[Pair]:
    """Both phases, each with every span, from one run."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, optimizer = _start(scale)
    for phase, settling_steps in (("fresh", 0), ("steady", scale.settling_steps - max(SPANS_STEPS))):
        _advance(optimizer, settling_steps)
        base = export_weights(model, "bfloat16")
        taken = 0
        for span in SPANS_STEPS:
            _advance(optimizer, span - taken)
            taken = span
            yield Pair(phase, span, base, export_weights(model, "bfloat16"))


def ways(pair: Pair, tries: int) -> dict[str, Result]:
    """Every way of sending the pair, each proved to arrive bit for bit."""
    base, target = pair.base, pair.target
    target_digest = blake3(target).hexdigest()
    compress = ZstdCompressor(level=1).compress

    def inflate(pieces: list[bytes], held: bytes | None = None) -> memoryview:
        content = np.empty(len(target), np.uint8)
        ZstdDecompressor().stream_reader(pieces[0]).readinto(content)
        if held is not None:
            np.bitwise_xor(content, np.frombuffer(held, np.uint8), out=content)
        if blake3(content.data).hexdigest() != target_digest:
            raise AssertionError(f"{pair.phase}, {pair.steps} steps: the weights that arrived are not those sent")
        return content.data

    return {
        "delta": delta_of(pair, tries),
        "XOR + zstd-1": _measure(
            lambda: [compress(_words(base) ^ _words(target))],
            lambda pieces: inflate(pieces, base),
            target,
            max(2, tries // 2),
        ),
        "zstd-1": _measure(lambda: [compress(target)], inflate, target, 2),
    }


def delta_of(pair: Pair, tries: int) -> Result:
    """ECHO-2's delta of the pair, proved to arrive bit for bit."""
    base, target = pair.base, pair.target
    base_digest, target_digest = blake3(base).hexdigest(), blake3(target).hexdigest()
    return _measure(
        lambda: list(encode_delta(base, target, base_digest=base_digest, target_digest=target_digest)),
        lambda pieces: apply_delta(base, pieces, target_digest, base_digest=base_digest),
        target,
        tries,
    )


def model_of(scale: Scale) -> Qwen2Config:
    """The model whose weights are measured."""
    return Qwen2Config(
        vocab_size=scale.vocabulary,
        hidden_size=scale.hidden,
        intermediate_size=4 * scale.hidden,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.hidden // 64,
        num_key_value_heads=scale.hidden // 64,
        tie_word_embeddings=True,
    )


def _start(scale: Scale) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = AutoModelForCausalLM.from_config(model_of(scale), dtype=torch.float32)
    settings = LearnerSection()
    betas = (settings.beta1, settings.beta2)
    return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=betas, weight_decay=settings.weight_decay)


def _advance(optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.empty_like(parameter).normal_(std=GRADIENT_RMS)
        optimizer.step()


def _measure(encode: Callable[[], Any], decode: Callable[[Any], Any], target: bytes, tries: int) -> Result:
    encode_s, pieces = _best_s(encode, tries)
    decode_s, arrived = _best_s(lambda: decode(pieces), tries)
    if arrived != target:
        raise AssertionError("the weights that arrived are not those sent")
    gigabytes = len(target) / 1e9
    return Result(sum(map(len, pieces)) / len(target), gigabytes / encode_s, gigabytes / decode_s)


def _best_s(work: Callable[[], Any], tries: int) -> tuple[float, Any]:
    best_s, result = float("inf"), None
    for _ in range(tries):
        result = None
        begin = time.perf_counter()
        result = work()
        best_s = min(best_s, time.perf_counter() - begin)
    return best_s, result


def _words(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint16)


def figures_of(worst: Result) -> dict[str, float]:
    """What a delta costs where it is dearest: after the first step from fresh weights."""
    return {
        "delta_share_of_full": worst.share_of_full,
        "delta_encode_gb_per_s": worst.encode_gb_per_s,
        "delta_decode_gb_per_s": worst.decode_gb_per_s,
    }


def measure(scale: Scale) -> dict[str, float]:
    """All figures; prints the table as it goes."""
    results = {}
    print(f"{'from':<8}{'steps':>6}{'changed':>9}  {'sent as':<14}{'of full':>9}{'ratio':>8}{'encode':>8}{'decode':>8}  GB/s")
    for pair in pairs(scale):
        changed = pair.changed_share
        for name, result in ways(pair, scale.tries).items():
            results[pair.phase, pair.steps, name] = result
            print(
                f"{pair.phase:<8}{pair.steps:>6}{changed:>9.2%}  {name:<14}{result.share_of_full:>9.3%}"
                f"{1 / result.share_of_full:>7.1f}×{result.encode_gb_per_s:>8.2f}{result.decode_gb_per_s:>8.2f}",
                flush=True,
            )
    worst, usual = results["fresh", 1, "delta"], results["steady", 1, "delta"]
    return figures_of(worst) | {
        "delta_steady_share_of_full": usual.share_of_full,
        "delta_steady_encode_gb_per_s": usual.encode_gb_per_s,
        "delta_steady_decode_gb_per_s": usual.decode_gb_per_s,
        "xor_zstd_share_of_full": results["fresh", 1, "XOR + zstd-1"].share_of_full,
        "xor_zstd_steady_share_of_full": results["steady", 1, "XOR + zstd-1"].share_of_full,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.delta", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a model of 5 M parameters and fewer tries")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    figures = measure(QUICK if arguments.quick else FULL)
    if arguments.json:
        arguments.json.write_text(json.dumps({"figures": figures}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
