"""TRL's side of `benchmarks.parity`: run in the repository by an interpreter that has TRL.

    python -m benchmarks.parity_peer ROWS CONFIGURATION MODEL_FOLDER [SETTING …]

Trains the model in MODEL_FOLDER as the configuration says, ROWS sequences in a forward pass, and prints each step's figures as
JSON. Of this project it uses what reads configurations and what makes prompts and scores completions, all without torch.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from echo2.config import load_config
from echo2.tasks import checked_score
from echo2.tasks.catalog import make_task
from echo2.tasks.tokenizer import load_tokenizer


class Clock(TrainerCallback):
    """When the first step began and when each step ended, in seconds since the epoch."""

    def __init__(self):
        self.began_s = None
        self.ends_s = []

    def on_step_begin(self, *_, **__):
        # Generation is part of the step.
        self.began_s = self.began_s or time.time()

    def on_step_end(self, *_, **__):
        self.ends_s.append(time.time())


class Judge:
    """The task's scores, as the hub makes them of token ids."""

    __name__ = "judge"

    def __init__(self, task, tokenizer):
        self.task, self.tokenizer = task, tokenizer

    def __call__(self, completion_ids, index, log_metric, **_):
        scores = [self.score(number, tokens) for number, tokens in zip(index, completion_ids, strict=True)]
        log_metric("exact_match", sum(score.metrics["exact_match"] for score in scores) / len(scores))
        return [score.reward for score in scores]

    def score(self, number, tokens):
        ends = self.tokenizer.eos_token_ids
        text = self.tokenizer.decode([token for token in tokens if token not in ends])
        return checked_score(self.task, number, text, tokens[-1] in ends)


def settings_of(config, rows, output):
    """The configuration in TRL's words."""
    parts = config.batch.groups * config.batch.members // rows
    return GRPOConfig(
        output_dir=output,
        seed=config.run.seed,
        max_steps=config.run.steps,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=parts,
        steps_per_generation=parts,
        num_generations=config.batch.members,
        max_completion_length=config.sampling.max_completion_tokens,
        temperature=config.sampling.temperature,
        learning_rate=config.learner.learning_rate,
        adam_beta1=config.learner.beta1,
        adam_beta2=config.learner.beta2,
        weight_decay=config.learner.weight_decay,
        max_grad_norm=config.learner.max_grad_norm,
        loss_type="dapo",
        scale_rewards="group",
        epsilon=config.objective.clip_ratio_low,
        epsilon_high=config.objective.clip_ratio_high,
        beta=config.objective.beta,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def main():
    rows, configuration, folder, *overrides = sys.argv[1:]
    config = load_config([Path(configuration)], overrides)
    task, clock = make_task(config.task, config.run.seed), Clock()
    indexes = range(config.run.steps * config.batch.groups)
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="sdpa"),
            reward_funcs=Judge(task, load_tokenizer(Path(folder))),
            args=settings_of(config, int(rows), output),
            train_dataset=Dataset.from_list([{"prompt": task.prompt(index), "index": index} for index in indexes]),
            processing_class=AutoTokenizer.from_pretrained(folder),
            callbacks=[clock],
        )
        # Its own schedules begin with a step of rate 0.
        warmup_steps = max(1, config.learner.warmup_steps)
        trainer.lr_scheduler = LambdaLR(trainer.create_optimizer(), lambda step: min(1.0, (step + 1) / warmup_steps))
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    steps = [
        {"reward": entry["reward"], "exact_match": entry["exact_match"], "end_s": end_s - clock.began_s}
        for entry, end_s in zip(logged, clock.ends_s, strict=True)
    ]
    print(json.dumps(steps))


if __name__ == "__main__":
    main()
