"""Runs of a small model with random weights, for workers that generate with a real engine."""

import numpy as np
import torch
from patience import wait_until

from echo2.dissemination.store import SnapshotStore
from echo2.hub.database import Database
from echo2.learning.torch_learner import TorchLearner
from echo2.models.preparation import prepare_model
from echo2.tasks.tokenizer import load_tokenizer

SETTINGS = ("model.warm_start_exact_match=0", "batch.drop_zero_variance=false", "worker.cache_bytes=33554432")
LONG = (*SETTINGS, "batch.groups=4", "batch.members=8", "worker.slots=2", "sampling.max_completion_tokens=480")
LONG += ("worker.heartbeat_interval_s=0.1", "hub.heartbeat_timeout_s=2")
"""Two workers have two groups each under way, of eight members of 480 tokens."""
SHARPER = 35.0
"""Makes of logits that hardly differ such of a standard deviation of 8, beside which one of 0 is as good as never drawn."""


class Learner:
    """A learner of the run, with its snapshots."""

    def __init__(self, run, cache, endless=False):
        """Where it is `endless`, completions end at the greatest length alone."""
        config = run.config.model_copy(update={"model": run.config.model.model_copy(update={"cache_directory": cache})})
        folder = prepare_model(config, print)
        for name in ("config.json", "tokenizer.json"):
            (run.model / name).write_bytes((folder / name).read_bytes())
        self.learner = TorchLearner.create(config, folder)
        if endless:
            embeddings = self.learner.model.get_input_embeddings().weight.data
            embeddings *= SHARPER
            embeddings[load_tokenizer(run.model).eos_token_ids[0]] = 0.0
        self._store = SnapshotStore(run.snapshots, run.run_id, run.token)

    def publish(self, client, version, weights=None):
        payload = self.learner.export()
        self._store.publish(version, weights or payload, 16384, probe=self.learner.probe)
        client.announce(version)
        return payload

    def gaps(self, batch):
        """Absolute differences of all tokens' log-probabilities from those of this learner's weights."""
        found = []
        for group in batch.groups:
            for member in group.members:
                ids = torch.tensor([[*group.prompt_token_ids, *member.rollout.token_ids.tolist()]])
                with torch.no_grad():
                    logits = self.learner.model(input_ids=ids).logits[0, len(group.prompt_token_ids) - 1 : -1]
                expected = logits.log_softmax(-1).gather(-1, ids[0, len(group.prompt_token_ids) :, None])[:, 0]
                found.append(np.abs(member.rollout.log_probs - expected.numpy()))
        return np.concatenate(found)


def check_versions_change_in_flight(make_run, serve, start_worker, tmp_path, python, *settings):
    """The policy is trained while its completions grow; they carry both versions, and count as the older one's."""
    run = make_run(*LONG, "worker.update_mode=in_flight", *settings, "run.steps=2")
    learner = Learner(run, tmp_path / "cache", endless=True)
    _, client = serve(run)
    learner.publish(client, 0)
    start_worker(client, run.token, "v", python=python)
    status = wait_until(lambda: (now := client.status())["workers"] and now["workers"][0]["tokens"] > 400 and now)
    assert status["workers"][0]["slots"] == run.config.worker.slots
    with np.errstate(all="ignore"):
        for parameter in learner.learner.model.parameters():
            parameter.data *= 1.01
    # The version that the hub takes it for counts; step 0 is trained with what is under way.
    learner.publish(client, 1)
    batch = client.take_batch(0)
    assert versions(batch) == {0, 1}
    assert {group.oldest_version for group in batch.groups} == {0}
    client.commit(0, {}, 0)
    rows = look(run, "SELECT MIN(oldest_version) AS oldest, MAX(newest_version) AS newest FROM rollouts")
    assert (rows[0]["oldest"], rows[0]["newest"]) == (0, 1)


def versions(batch):
    return {v for group in batch.groups for member in group.members for v in member.rollout.versions.tolist()}


def look(run, sql):
    """Rows of the run's ledger."""
    database = Database(run.ledger, run.run_id, read_only=True)
    try:
        return [dict(row) for row in database.rows(sql)]
    finally:
        database.close()


def tokens_drawn(client, name):
    """What the worker said of itself last."""
    found = [w["tokens"] for w in client.status()["workers"] if w["worker_id"].startswith(f"{name}-")]
    return found[0] if found else 0
