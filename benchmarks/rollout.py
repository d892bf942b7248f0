"""A vLLM worker beside vLLM alone, and what a weight update costs it.

    python -m benchmarks.rollout [--quick] [--json FILE] [--engine-python PROGRAM]

A random Qwen3 of 28 million parameters in float32, one thread, completions that all grow to their full length.

- `worker_over_engine`: tokens per second of a worker that gets its groups by leases over HTTP from a hub and hands them in
  there, over those of `vllm.LLM` on the same prompts with the same settings. Both are measured from the second set of groups
  on, by turns, each time in a process of its own; the best of each counts.
- `drain_loss_over_load_time`, `in_flight_loss_over_load_time`: generation lost to one update, in seconds of generation at the
  undisturbed rate, over the time that it takes to load the version, the proof included, where nothing else goes on. An update
  begins when its snapshot is whole in the worker's memory. In `drain` it falls between two sets of groups of equal length, and
  what counts is how much later the second set has its first tokens; where lengths differ, the wait for the longest comes on
  top, which is the workload's and not the load's. In `in_flight` it falls amidst a set, and what counts is how much longer the
  steps take during which the version is staged, exchanged and proved than those before and after. Medians over the updates.
- `in_flight_pause_over_load_time`: the exchange alone, for which generation stands still. The rest of what is lost in flight is
  the processor's, which stages beside generation and computes the proof's prompt; a GPU hardly notices either.
- `logprob_gap_fp32`, `logprob_gap_bf16`: mean absolute difference of sampled tokens' log-probabilities from those of
  transformers with the same weights, after ten updates in a running engine.

vLLM is in an environment of its own, `.venv-vllm` (`make test-vllm` sets it up), unless `--engine-python` names another.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from echo2.config import load_config
from echo2.dissemination.store import SnapshotStore
from echo2.hub.address import listen
from echo2.hub.client import HubClient
from echo2.hub.database import Database
from echo2.hub.process import HubProcess
from echo2.hub.prompts import Prompts
from echo2.models.loading import export_weights
from echo2.run_directory import RunDirectory, create_run
from echo2.tasks.tokenizer import character_tokenizer

REPOSITORY = Path(__file__).parent.parent
ENGINE_PYTHON = REPOSITORY / ".venv-vllm" / "bin" / "python"
SHARPER = 16.0
"""Makes of logits that hardly differ such beside which the end token's, which is 0, is as good as never drawn."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is generated and how often it is measured."""

    slots: int
    members: int
    tokens: int
    sets: int
    """Sets of groups that fill the slots; the first one warms up."""
    rounds: int
    updates: int


SIZE = Size(slots=4, members=8, tokens=256, sets=3, rounds=2, updates=16)
QUICK = Size(slots=4, members=8, tokens=48, sets=2, rounds=1, updates=3)


def measure(size: Size, python: Path) -> dict[str, float]:
    """All figures; prints them as they come."""
    with tempfile.TemporaryDirectory(prefix="echo2-rollout-") as folder:
        model = Path(folder) / "model"
        make_model(model)
        rates: dict[str, list[float]] = {"worker": [], "engine": []}
        for number in range(size.rounds):
            run = make_run(Path(folder), model, size, number)
            rates["worker"].append(worker_rate(run, model, size, python))
            rates["engine"].append(engine_rate(run, model, size, python))
            print(", ".join(f"{side} {values[-1]:.0f} tokens/s" for side, values in rates.items()), flush=True)
        figures = {"worker_over_engine": max(rates["worker"]) / max(rates["engine"])}
        updates = ask(python, "updates", model, size.slots, size.members, size.updates)
        drain, in_flight, load_s = updates["drain"], updates["in_flight"], updates["drain"]["load_s"]
        print(
            f"load {load_s:.3f} s; lost in drain {drain['loss_s']:.3f} s, in flight {in_flight['loss_s']:.4f} s "
            f"(within {in_flight['load_s']:.3f} s)",
            flush=True,
        )
        figures["drain_loss_over_load_time"] = drain["loss_s"] / load_s
        figures["in_flight_loss_over_load_time"] = in_flight["loss_s"] / load_s
        figures["in_flight_pause_over_load_time"] = in_flight["pause_s"] / load_s
        with ThreadPoolExecutor() as at_once:
            gaps = at_once.map(lambda dtype: ask(python, "gap", model, dtype)["gap"], ("float32", "bfloat16"))
        figures["logprob_gap_fp32"], figures["logprob_gap_bf16"] = gaps
    return figures


def make_model(folder: Path) -> None:
    """A model folder that hub, worker and vLLM take."""
    tokenizer = character_tokenizer()
    end = tokenizer.eos_token_ids[0]
    config = Qwen3Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    embeddings = model.get_input_embeddings().weight.data
    embeddings *= SHARPER
    embeddings[end] = 0.0
    model.save_pretrained(folder)
    tokenizer.save(folder / "tokenizer.json")


def make_run(folder: Path, model: Path, size: Size, number: int) -> RunDirectory:
    """A run whose only step takes all groups."""
    settings = {
        "run.directory": folder / "runs",
        "run.name": f"round{number}",
        "run.steps": 1,
        "run.seed": number,
        "batch.groups": size.slots * size.sets,
        "batch.members": size.members,
        "batch.drop_zero_variance": "false",
        "sampling.max_completion_tokens": size.tokens,
        "worker.engine": "vllm",
        "worker.slots": size.slots,
        "worker.spool_directory": folder / "spool",
    }
    run = create_run(load_config([], [f"{key}={value}" for key, value in settings.items()]), resume=False)
    for name in ("config.json", "tokenizer.json"):
        run.model.mkdir(exist_ok=True)
        (run.model / name).write_bytes((model / name).read_bytes())
    return run


def worker_rate(run: RunDirectory, model: Path, size: Size, python: Path) -> float:
    """Tokens per second through hub and leases, from the lease of the second set's first group on."""
    with ExitStack() as stack:
        listener = stack.enter_context(closing(listen("127.0.0.1", 0)))
        hub = HubProcess(run, listener)
        hub.start()
        stack.callback(hub.stop)
        hub.wait_ready()
        client = stack.enter_context(closing(HubClient(hub.url, run.token)))
        weights = export_weights(Qwen3ForCausalLM.from_pretrained(model), "float32")
        SnapshotStore(run.snapshots, run.run_id, run.token).publish(0, weights, 1024 * 1024)
        client.announce(0)
        log = stack.enter_context((run.logs / "worker.log").open("wb"))
        command = [str(python), "-m", "echo2", "worker", "--hub", hub.url, "--name", "worker"]
        worker = subprocess.Popen(
            command, env=environment() | {"ECHO2_TOKEN": run.token}, cwd=REPOSITORY, stdout=log, stderr=log
        )
        stack.callback(worker.wait)
        stack.callback(worker.terminate)

        def keep_waiting() -> None:
            if worker.poll() is not None:
                raise SystemExit(f"the worker ended: {(run.logs / 'worker.log').read_text()[-2000:]}")

        client.take_batch(0, keep_waiting)
    return rate_of(run, size)


def rate_of(run: RunDirectory, size: Size) -> float:
    """What the ledger says of it."""
    database = Database(run.ledger, run.run_id, read_only=True)
    try:
        row = database.row(
            "SELECT SUM(tokens) AS tokens, MIN(leased_at_s) AS began_s, MAX(ended_at_s) AS ended_s FROM attempts"
            " WHERE group_id >= ?",
            size.slots,
        )
    finally:
        database.close()
    if row is None:
        raise SystemExit("the worker made nothing")
    return row["tokens"] / (row["ended_s"] - row["began_s"])


def engine_rate(run: RunDirectory, model: Path, size: Size, python: Path) -> float:
    """Tokens per second of vLLM alone."""
    prompts = Prompts(run)
    wanted = run.path / "prompts.json"
    wanted.write_text(json.dumps([prompts.token_ids_of(group_id) for group_id in range(size.slots * size.sets)]))
    return ask(python, "bare", model, wanted, size.slots, size.members, size.tokens)["tokens_per_s"]


def ask(python: Path, *arguments: Any) -> dict[str, Any]:
    """What `benchmarks.rollout_engine` answers. Raises SystemExit if it does not end well."""
    command = [str(python), "-m", "benchmarks.rollout_engine", *map(str, arguments)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def environment() -> dict[str, str]:
    """One thread, and vLLM in the process that asks it, as in a worker."""
    vllm = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    return os.environ | vllm | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter completions, fewer of them, fewer updates")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument(
        "--engine-python", type=Path, metavar="PROGRAM", default=ENGINE_PYTHON, help="an interpreter that has vLLM"
    )
    chosen = parser.parse_args()
    if not chosen.engine_python.exists():
        raise SystemExit(
            f"{chosen.engine_python} is not there: set it up with make test-vllm, or name another with --engine-python"
        )
    figures = measure(QUICK if chosen.quick else SIZE, chosen.engine_python)
    print()
    for name, value in figures.items():
        print(f"{name:<32}{value:>10.3g}")
    if chosen.json:
        chosen.json.write_text(json.dumps({"figures": figures}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
