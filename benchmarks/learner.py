"""The learner's step against TRL's GRPOTrainer, and packed against padded.

    python -m benchmarks.learner [--quick] [--json FILE] [--peer-python PROGRAM]

A batch of groups of 8 members, completions of 32 to 1,024 tokens (lognormal) after prompts of 16 to 64, is trained by this
learner and by TRL, on the same randomly initialised Qwen3-architecture model: float32, one thread, AdamW, clipped loss, token
mean, no KL term, on policy. Both sides have the same number of positions in a forward pass: TRL 8 sequences at a time (its
default), padded to the longest of the batch, this learner as many tokens as that makes. A step is forward, backward, clipping
and AdamW, and what prepares tensors for them; generation is left out. Two models:

- `speed`: 4 groups, 4 layers, vocabulary 4,096, which puts a quarter of the products into the head, as in a model of 0.5 B;
- `memory`: 2 groups, 2 layers, vocabulary 151,936, for the peak of the process's memory (VmHWM).

The sides take turns, each time in a process of its own. Times are CPU seconds, which other programs disturb less than they do
the clock, and the best of all steps. Gradient norms of the first step are printed beside them: equal norms show that all sides
did the same work.

TRL lives in an environment of its own, made on first use under ~/.cache/echo2/peers, unless `--peer-python` names one. Where it
cannot be made, its figures are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peer_environment import peer_python

PEER = "trl-1.16.0"
MEMBERS = 8
PEER_ROWS = 8
SIDES = ("packed", "padded", "trl")


@dataclass(frozen=True, slots=True)
class Case:
    """A model, by its sizes."""

    name: str
    groups: int
    vocabulary: int
    hidden: int
    layers: int
    steps: int

    def model_config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // 64,
            "num_key_value_heads": max(1, self.hidden // 128),
            "head_dim": 64,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": None,
        }


def make_batch(case: Case, seed: int) -> dict[str, Any]:
    """Prompts, completions, rewards; lengths are lognormal with median 180 and shape 0.8, cut to 32 … 1,024."""
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(2, case.vocabulary) for _ in range(count)]

    def length() -> int:
        return min(1024, max(32, round(draw.lognormvariate(math.log(180), 0.8))))

    groups = [
        {
            "prompt": tokens(draw.randint(16, 64)),
            "completions": [tokens(length()) for _ in range(MEMBERS)],
            "rewards": [round(draw.random(), 3) for _ in range(MEMBERS)],
        }
        for _ in range(case.groups)
    ]
    return {"groups": groups, "rows": PEER_ROWS, "steps": case.steps}


def prepare(case: Case, folder: Path) -> None:
    """Write the model and the batch, with the log-probabilities of the model itself as those of the sampler."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from echo2.learning.fused import head_log_probs

    disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    (folder / "config.json").write_text(json.dumps(case.model_config()), encoding="utf-8")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="sdpa").eval()
    model.save_pretrained(folder)
    batch = make_batch(case, seed=0)
    for group in batch["groups"]:
        group["log_probs"] = []
        for completion in group["completions"]:
            with torch.no_grad():
                ids = torch.tensor([group["prompt"] + completion[:-1]])
                hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, len(group["prompt"]) - 1 :]
                found, _ = head_log_probs(hidden, model.get_output_embeddings().weight, torch.tensor(completion), 1.0)
            group["log_probs"].append(found.tolist())
    (folder / "batch.json").write_text(json.dumps(batch), encoding="utf-8")


def train(folder: Path, *, packing: bool) -> dict[str, Any]:
    """Seconds of each step, the first one's gradient norm and the peak memory of this process."""
    import numpy as np

    from echo2.config import load_config
    from echo2.learning.torch_learner import TorchLearner
    from echo2.protocol import Batch, Rollout, ScoredRollout, TrainingGroup

    made = json.loads((folder / "batch.json").read_text(encoding="utf-8"))
    groups = []
    for number, group in enumerate(made["groups"]):
        members = []
        for member, tokens in enumerate(group["completions"]):
            ids, log_probs = np.array(tokens, np.int32), np.array(group["log_probs"][member], np.float32)
            rollout = Rollout(member, ids, log_probs, np.zeros(len(ids), np.int32), "stop")
            members.append(ScoredRollout(rollout, group["rewards"][member], "worker-1"))
        groups.append(TrainingGroup(number, tuple(group["prompt"]), tuple(members)))
    longest = max(len(group["prompt"]) for group in made["groups"]) + max(
        len(tokens) for group in made["groups"] for tokens in group["completions"]
    )
    settings = [f"learner.packing={str(packing).lower()}", f"learner.micro_batch_tokens={made['rows'] * longest}"]
    learner = TorchLearner.create(load_config([], ["learner.device=cpu", "learner.warmup_steps=0", *settings]), folder)
    seconds, norms = [], []
    for step in range(made["steps"]):
        began = time.process_time()
        norms.append(learner.train_step(Batch(step, tuple(groups)))["grad_norm"])
        seconds.append(time.process_time() - began)
    return {"seconds": seconds, "grad_norm": norms[0], "peak_bytes": peak_bytes()}


def peak_bytes() -> int:
    """The most memory that this process ever held at a time."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def peer_needs() -> list[str]:
    """What this side runs on too, and what configuration and tasks need."""
    return [f"{name}=={version(name).split('+')[0]}" for name in ("transformers", "torch", "blake3", "tomli-w")]


def run_side(side: str, folder: Path, peer: str | None) -> dict[str, Any]:
    """One turn of a side in a process of its own."""
    if side == "trl":
        command = [str(peer), str(Path(__file__).with_name("learner_peer.py")), str(folder)]
    else:
        command = [sys.executable, "-m", "benchmarks.learner", "--side", side, "--folder", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"side {side} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(case: Case, rounds: int, peer: str | None) -> dict[str, dict[str, float]]:
    """For every side its best tokens per second, its least peak memory in bytes, and its gradient norm; prints a table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(case, folder)
        groups = json.loads((folder / "batch.json").read_text(encoding="utf-8"))["groups"]
        lengths = [len(tokens) for group in groups for tokens in group["completions"]]
        sides = [side for side in SIDES if side != "trl" or peer]
        turns: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for _ in range(rounds):
            for side in sides:
                turns[side].append(run_side(side, folder, peer))
    print(f"\n{case.name}: {case.layers} layers of {case.hidden}, vocabulary {case.vocabulary:,}; {len(lengths)} completions,")
    print(f"{sum(lengths):,} tokens, shortest {min(lengths)}, longest {max(lengths)}\n")
    print(f"{'side':<8}{'step s':>10}{'tokens/s':>12}{'peak GB':>10}{'gradient norm':>16}")
    results = {}
    for side, made in turns.items():
        best_s = min(seconds for turn in made for seconds in turn["seconds"])
        peak = min(turn["peak_bytes"] for turn in made)
        results[side] = {"tokens_per_s": sum(lengths) / best_s, "peak_bytes": peak, "grad_norm": made[0]["grad_norm"]}
        print(f"{side:<8}{best_s:>10.2f}{sum(lengths) / best_s:>12,.0f}{peak / 1e9:>10.2f}{made[0]['grad_norm']:>16.6f}")
    return results


def measure(quick: bool, peer: str | None) -> dict[str, float]:
    """All figures; prints the tables as it goes."""
    speed = compare(Case("speed", 2 if quick else 4, 4096, 256, 4, steps=2), 1 if quick else 2, peer)
    memory = compare(Case("memory", 1 if quick else 2, 151_936, 128, 2, steps=2), 1, peer)
    figures = {"packed_over_padded": speed["packed"]["tokens_per_s"] / speed["padded"]["tokens_per_s"]}
    if peer:
        figures["tokens_per_s_over_trl"] = speed["packed"]["tokens_per_s"] / speed["trl"]["tokens_per_s"]
        figures["peak_memory_over_trl"] = memory["packed"]["peak_bytes"] / memory["trl"]["peak_bytes"]
    print()
    for name, value in figures.items():
        print(f"{name:<28}{value:>8.2f}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learner", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="half the groups, and one turn of each side")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--peer-python", metavar="PROGRAM", help="an interpreter that has TRL")
    parser.add_argument("--side", choices=SIDES[:2], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.side:
        print(json.dumps(train(chosen.folder, packing=chosen.side == "packed")))
        return
    figures = measure(chosen.quick, chosen.peer_python or peer_python(PEER, peer_needs()))
    if chosen.json:
        chosen.json.write_text(json.dumps({"figures": figures}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
