"""Differences between sampled and recomputed log-probabilities, with real weights, and what is made of them."""

import numpy as np
import pytest
import torch
from learning_batches import group, oracle_log_probs, random_batch, rollout
from safetensors.torch import load, save

from echo2.hub.mismatch import mismatches
from echo2.protocol import Batch, Lease, Sampling, ScoredRollout, TrainingGroup
from echo2.rollout.transformers_engine import TransformersEngine

WORKERS = ("a", "b", "c")
STEPS, GROUPS, MEMBERS = 12, 15, 4


def made_by(pairs, worker_id):
    return tuple(ScoredRollout(r, reward, worker_id) for r, reward in pairs)


def test_each_worker_answers_for_the_tokens_that_it_made(make_learner):
    learner = make_learner("learner.micro_batch_tokens=12")
    prompt, tokens = [5, 6, 7], ([8, 9, 10], [11, 12], [13])
    rollouts = []
    for member, (completion, shift) in enumerate(zip(tokens, (0.5, 0.25, 0.0), strict=True)):
        log_probs = oracle_log_probs(learner.model, prompt, completion)
        log_probs[0] -= shift
        rollouts.append(rollout(member, completion, log_probs, version=0))
    own, helped = made_by([(rollouts[0], 1.0)], "a"), made_by([(rollouts[1], 0.0), (rollouts[2], 0.5)], "b")
    alone = group(4, prompt, [(rollouts[0], 1.0), (rollouts[2], 0.0)])
    learner.train_step(Batch(0, (TrainingGroup(3, tuple(prompt), own + helped), alone)))
    found = {(d.group_id, d.worker_id): (d.tokens, d.mean, d.max) for d in learner.differences}
    wanted = {(3, "a"): (3, 0.5 / 3, 0.5), (3, "b"): (3, 0.25 / 3, 0.25), (4, "worker-1"): (4, 0.5 / 4, 0.5)}
    assert found.keys() == wanted.keys()
    for place, figures in wanted.items():
        assert found[place] == pytest.approx(figures, abs=1e-4), place


def test_the_metric_is_that_of_the_worker_farthest_away(make_learner):
    learner = make_learner()
    batch = random_batch(learner.model, 0, seed=3, noise=0.2)
    groups = []
    for number, made in enumerate(batch.groups):
        members = made_by([(m.rollout, m.reward) for m in made.members], f"w{number % 2}")
        groups.append(TrainingGroup(made.group_id, made.prompt_token_ids, members))
    metrics = learner.train_step(Batch(0, tuple(groups)))
    means = []
    for worker_id in ("w0", "w1"):
        own = [d for d in learner.differences if d.worker_id == worker_id]
        means.append(np.average([d.mean for d in own], weights=[d.tokens for d in own]))
    assert metrics["sampling/sampling_logp_difference/worker_max"] == pytest.approx(max(means))
    assert min(means) < metrics["sampling/sampling_logp_difference/mean"] < max(means)


class Pool:
    """Workers that share one engine; each may have a say in the weights that it loads."""

    def __init__(self, learner, folder, liars=()):
        self.engine = TransformersEngine(folder, "float32", "cpu", threads=1)
        self.learner = learner
        self.random = np.random.default_rng(0)
        self.snapshots = [learner.export()]
        self.liars = dict(liars)
        self.group_id = 0

    def generate(self, worker_id, version, max_completion_tokens):
        weights = self.liars.get(worker_id, lambda snapshots, version: snapshots[version])(self.snapshots, version)
        self.engine.load_weights(weights, version)
        prompt = tuple(self.random.integers(4, 54, self.random.integers(2, 12)).tolist())
        lease = Lease(group_id=self.group_id, attempt=1, members=range(MEMBERS), prompt_token_ids=prompt, timeout_s=1.0)
        sampling = Sampling(temperature=1.0, max_completion_tokens=max_completion_tokens, stop_token_ids=(2,), seed=0)
        (made,) = self.engine.generate([lease], sampling, lambda: False)
        self.group_id += 1
        pairs = [(r, float(self.random.random())) for r in made.rollouts]
        return TrainingGroup(lease.group_id, prompt, made_by(pairs, worker_id))

    def run(self):
        """Differences of `STEPS` steps of groups with random lengths and staleness; whoever is accused on the way."""
        found, accused = [], set()
        for step in range(STEPS):
            groups = [
                self.generate(
                    WORKERS[number % len(WORKERS)],
                    version=max(0, step - int(self.random.integers(0, 3))),
                    max_completion_tokens=int(self.random.integers(4, 40)),
                )
                for number in range(GROUPS)
            ]
            self.learner.train_step(Batch(step, tuple(groups)))
            self.snapshots.append(self.learner.export())
            found += [(step, d) for d in self.learner.differences]
            accused |= {worker.worker_id for worker in mismatches(found) if worker.stands_out}
        return found, accused


def test_honest_rollouts_of_any_length_and_staleness_never_accuse(make_learner, random_model_folder):
    pool = Pool(make_learner("learner.learning_rate=3e-3"), random_model_folder)
    found, accused = pool.run()
    assert pool.group_id * MEMBERS >= 200 and accused == set()
    stale = [d.mean for step, d in found if step - d.oldest_version == 2]
    fresh = [d.mean for step, d in found if step == d.oldest_version]
    assert max(fresh) < 1e-4 < np.mean(stale), "versions differ, so that staleness shows"


def perturbed(snapshots, version):
    noise = torch.Generator().manual_seed(0)
    weights = load(snapshots[version])
    return save({name: w + 0.3 * w.std() * torch.randn(w.shape, generator=noise) for name, w in weights.items()})


def stuck(snapshots, version):
    return snapshots[0]


@pytest.mark.parametrize("lie", [perturbed, stuck])
def test_a_worker_with_other_weights_than_it_says_is_accused_and_nobody_else(make_learner, random_model_folder, lie):
    pool = Pool(make_learner("learner.learning_rate=3e-3"), random_model_folder, {"b": lie})
    assert pool.run()[1] == {"b"}
