"""Batches made by hand for the learner's tests, and an oracle for log-probabilities that shares no code with the learner."""

import numpy as np
import torch

from echo2.protocol import Batch, Rollout, ScoredRollout, TrainingGroup


def oracle_log_probs(model, prompt, tokens, temperature=1.0):
    """Log-probabilities of `tokens` after `prompt`, one sequence at a time from the model's full logits."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0] / temperature
    return torch.stack([logits[len(prompt) + i - 1].log_softmax(-1)[token] for i, token in enumerate(tokens)]).numpy()


def rollout(member, tokens, log_probs, version=0, reason="stop"):
    versions = np.full(len(tokens), version, np.int32)
    return Rollout(member, np.array(tokens, np.int32), np.array(log_probs, np.float32), versions, reason)


def group(group_id, prompt, members):
    """A group from (rollout, reward) pairs."""
    return TrainingGroup(group_id, tuple(prompt), tuple(ScoredRollout(r, reward, "worker-1") for r, reward in members))


def random_batch(model, step, seed, groups=4, members=4, temperature=1.0, noise=0.0):
    """Ragged groups of random tokens, sampled as if by `model` itself, with `noise` added to their log-probabilities."""
    random = np.random.default_rng(seed)
    made = []
    for group_id in range(groups):
        prompt = random.integers(4, 54, random.integers(1, 12)).tolist()
        pairs = []
        for member in range(members):
            tokens = random.integers(2, 54, random.integers(1, 9)).tolist()
            log_probs = oracle_log_probs(model, prompt, tokens, temperature) + noise * random.normal(size=len(tokens))
            pairs.append((rollout(member, tokens, np.minimum(log_probs, 0.0), step), float(random.random())))
        made.append(group(group_id, prompt, pairs))
    return Batch(step, tuple(made))
