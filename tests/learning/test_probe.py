"""What the learner publishes for an engine to prove its weights by."""

import numpy as np
import pytest
import torch
from learning_batches import oracle_log_probs, random_batch

from echo2.learning.learner import LearnerError
from echo2.learning.probe import TOKENS


def expected(learner):
    first, *rest = learner.probe.token_ids
    with torch.no_grad():
        return oracle_log_probs(learner.model, [first], rest)


def test_the_probe_is_what_the_exported_version_gives(make_learner):
    learner = make_learner("learner.warmup_steps=0")
    assert learner.probe is None
    learner.export()
    before = learner.probe
    np.testing.assert_allclose(before.log_probs, expected(learner), atol=1e-5, rtol=0)
    learner.train_step(random_batch(learner.model, 0, seed=3, noise=0.3))
    assert learner.probe == before
    learner.export()
    np.testing.assert_allclose(learner.probe.log_probs, expected(learner), atol=1e-5, rtol=0)
    assert learner.probe.token_ids == before.token_ids
    assert np.abs(np.subtract(learner.probe.log_probs, before.log_probs)).mean() > 1e-3


def test_the_probe_is_of_the_weights_with_their_adapters(make_learner):
    plain, adapted = make_learner(), make_learner("learner.lora.rank=4")
    plain.export()
    adapted.export()
    assert adapted.probe == plain.probe
    adapted.train_step(random_batch(adapted.model, 0, seed=3, noise=0.3))
    adapted.export()
    assert adapted.probe != plain.probe


def test_a_probe_goes_through_the_vocabulary(make_learner):
    learner = make_learner()
    learner.export()
    token_ids, size = learner.probe.token_ids, learner.model.config.vocab_size
    assert len(set(token_ids)) == len(token_ids) == TOKENS
    assert 0 <= min(token_ids) < size / 4 < 3 * size / 4 < max(token_ids) < size


def test_weights_whose_probe_is_not_finite_are_not_exported(make_learner):
    learner = make_learner()
    with torch.no_grad():
        learner.model.model.norm.weight.fill_(3e38)
    with pytest.raises(LearnerError, match="version 0"):
        learner.export()
