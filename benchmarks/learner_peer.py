"""TRL's side of `benchmarks.learner`: run by an interpreter that has TRL, with nothing of this project.

    python learner_peer.py FOLDER

Trains the batch in FOLDER/batch.json on the model in FOLDER and prints seconds of each step, the first one's gradient norm and
the process's peak memory as JSON. Its completions come from the batch, through TRL's `rollout_func`; the clock starts there.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """CPU seconds from the moment at which the rollouts are there to the end of the step."""

    def __init__(self):
        self.began = 0.0
        self.seconds = []

    def on_step_end(self, *_, **__):
        self.seconds.append(time.process_time() - self.began)


class Replay:
    """The batch's completions instead of generation, and its rewards."""

    def __init__(self, groups, clock):
        self.groups, self.clock = groups, clock

    def rollouts(self, prompts, _trainer):
        taken = [0] * len(self.groups)
        prompt_ids, completion_ids = [], []
        for prompt in prompts:
            number = int(prompt)
            prompt_ids.append(self.groups[number]["prompt"])
            completion_ids.append(self.groups[number]["completions"][taken[number]])
            taken[number] += 1
        self.clock.began = time.process_time()
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}

    def rewards(self, prompts, completion_ids, **_):
        known = {tuple(c): r for g in self.groups for c, r in zip(g["completions"], g["rewards"], strict=True)}
        return [known[tuple(tokens)] for tokens in completion_ids]


def tokenizer_of(size):
    vocabulary = {"0" if i == 0 else f"t{i}": i for i in range(size)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="t1")


def main():
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    batch = json.loads((folder / "batch.json").read_text(encoding="utf-8"))
    groups, rows, steps = batch["groups"], batch["rows"], batch["steps"]
    members = len(groups[0]["completions"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    parts = len(groups) * members // rows
    clock = Clock()
    replay = Replay(groups, clock)
    with tempfile.TemporaryDirectory() as output:
        settings = GRPOConfig(
            output_dir=output,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=parts,
            steps_per_generation=parts,
            num_generations=members,
            max_completion_length=1024,
            learning_rate=3e-4,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            max_grad_norm=1.0,
            max_steps=steps,
            loss_type="dapo",
            epsilon=0.2,
            epsilon_high=0.28,
            beta=0.0,
            temperature=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            shuffle_dataset=False,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=replay.rewards,
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": str(number)} for number in range(len(groups))] * steps),
            processing_class=tokenizer_of(model.config.vocab_size),
            callbacks=[clock],
            rollout_func=replay.rollouts,
        )
        trainer.train()
    status = Path("/proc/self/status").read_text().splitlines()
    peak = int(next(line for line in status if line.startswith("VmHWM:")).split()[1]) * 1024
    norm = next(entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry)
    print(json.dumps({"seconds": clock.seconds, "grad_norm": float(norm), "peak_bytes": peak}))


if __name__ == "__main__":
    main()
