"""Leases with a temperature of their own, beside others in one batch."""

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from test_transformers_engine import STOP, VOCABULARY, make_leases, make_model, make_sampling, teacher_forced, tokens

from echo2.models.loading import export_weights
from echo2.rollout.transformers_engine import TransformersEngine


@pytest.fixture(scope="module")
def model():
    return make_model(0, tied=True)


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    engine = TransformersEngine(folder, "float32", "cpu", threads=1)
    engine.load_weights(export_weights(model, "float32"), 5)
    return engine


def generate(engine, leases, **changes):
    return {group.group_id: group for group in engine.generate(leases, make_sampling(**changes), lambda: False)}


def with_temperature(lease, temperature):
    return lease.model_copy(update={"temperature": temperature})


def most_probable(model, prompt, length):
    """Greedy decoding, one forward pass over everything a token."""
    found = []
    for _ in range(length):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *found]]), use_cache=False).logits[0, -1]
        found.append(int(logits.argmax()))
        if found[-1] in (STOP, 3, 4):
            break
    return found


def test_temperature_0_takes_the_most_probable_token_with_certainty(engine, model):
    leases = [with_temperature(lease, 0.0) for lease in make_leases(members=(0, 1))]
    for group_id, group in generate(engine, leases).items():
        expected = most_probable(model, leases[group_id - 100].prompt_token_ids, 12)
        assert tokens(group) == {0: expected, 1: expected}
        assert all((rollout.log_probs == 0.0).all() for rollout in group.rollouts)


def test_a_lease_comes_out_the_same_beside_others_of_any_temperature(engine, model):
    leases = make_leases((5, 9, 1, 7))
    alone = generate(engine, leases)
    mixed = generate(engine, [leases[0], with_temperature(leases[1], 0.0), leases[2], with_temperature(leases[3], 1.6)])
    for place in (0, 2):
        assert tokens(mixed[100 + place]) == tokens(alone[100 + place])
    hot = generate(engine, leases, temperature=1.6)
    assert tokens(mixed[103]) == tokens(hot[103]) != tokens(alone[103])
    for rollout in mixed[103].rollouts:
        expected = teacher_forced(model, leases[3], rollout, 1.6)
        np.testing.assert_allclose(rollout.log_probs, expected.numpy(), atol=1e-5, rtol=0)
    assert max(max(row) for row in tokens(mixed[101]).values()) < VOCABULARY


def test_bad_weights_are_reported_whatever_the_temperature(model, tmp_path):
    model.save_pretrained(tmp_path)
    broken = TransformersEngine(tmp_path, "float32", "cpu", threads=1)
    broken.load_weights(save({name: w * torch.nan for name, w in load(export_weights(model, "float32")).items()}), 5)
    leases = make_leases((5, 9))
    for group in generate(broken, [with_temperature(leases[0], 0.0), leases[1]]).values():
        assert group.rollouts == () and all("version 5 has bad weights" in failure.reason for failure in group.failures)
        assert len(group.failures) == len(leases[0].members)
