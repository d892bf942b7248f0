"""Training as an algorithm alone, without hub, worker, staleness or Prefect: what whole runs are held against."""

from echo2.learning.torch_learner import TorchLearner
from echo2.models.preparation import prepare_model
from echo2.protocol import Batch, Lease, Sampling, ScoredRollout, TrainingGroup
from echo2.rollout.transformers_engine import TransformersEngine
from echo2.tasks.catalog import make_task
from echo2.tasks.tokenizer import load_tokenizer


def plain_synchronous_losses(config, steps):
    """Generate, score, drop, train; the loss of each step."""
    folder = prepare_model(config, print)
    task, tokenizer = make_task(config.task, config.run.seed), load_tokenizer(folder)
    learner = TorchLearner.create(config, folder)
    engine = TransformersEngine(folder, "float32", "cpu", threads=1)
    sampling = Sampling(
        temperature=config.sampling.temperature,
        max_completion_tokens=config.sampling.max_completion_tokens,
        stop_token_ids=tokenizer.eos_token_ids,
        seed=config.run.seed,
    )
    group_id, found = 0, []
    for step in range(steps):
        engine.load_weights(learner.export(), step)
        groups = []
        while len(groups) < config.batch.groups:
            prompt = tuple(tokenizer.encode(task.prompt(group_id)))
            members = tuple(range(config.batch.members))
            lease = Lease(group_id=group_id, attempt=1, members=members, prompt_token_ids=prompt, timeout_s=60)
            (made,) = engine.generate([lease], sampling, lambda: False)
            scored = tuple(ScoredRollout(r, reward_of(task, tokenizer, group_id, r), "w") for r in made.rollouts)
            if len({s.reward for s in scored}) > 1:
                groups.append(TrainingGroup(group_id, prompt, scored))
            group_id += 1
        found.append(learner.train_step(Batch(step, tuple(groups)))["loss"])
    return found


def reward_of(task, tokenizer, group_id, rollout):
    text = tokenizer.decode([t for t in rollout.token_ids.tolist() if t not in tokenizer.eos_token_ids])
    return task.score(group_id, text, rollout.finish_reason == "stop").reward
