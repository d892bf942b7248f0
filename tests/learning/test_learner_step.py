"""One learner step: what it changes, what it must not, and what it reports."""

import math

import numpy as np
import pytest
import torch
from learning_batches import group, oracle_log_probs, random_batch, rollout

from echo2.learning.learner import LearnerError
from echo2.models.loading import export_weights, load_weights
from echo2.protocol import Batch

UNCLIPPED = "learner.max_grad_norm=1e9"


def gradients_of_step(learner, batch):
    """Gradients that the optimizer was given, and the step's metrics."""
    found = {}

    def keep(optimizer, args, kwargs):
        found.update({name: weight.grad.clone() for name, weight in learner.model.named_parameters()})

    handle = learner.optimizer.register_step_pre_hook(keep)
    metrics = learner.train_step(batch)
    handle.remove()
    return found, metrics


def test_gradients_do_not_depend_on_micro_batches(make_learner):
    whole, single = make_learner(UNCLIPPED), make_learner(UNCLIPPED, "learner.micro_batch_tokens=1")
    batch = random_batch(whole.model, 0, seed=3, noise=0.3)
    one, metrics = gradients_of_step(whole, batch)
    many, metrics_of_many = gradients_of_step(single, batch)
    assert max(gradient.abs().max().item() for gradient in one.values()) > 1e-2
    for name, gradient in one.items():
        assert torch.allclose(gradient, many[name], rtol=0.0, atol=1e-6), name
    assert metrics == pytest.approx(metrics_of_many, abs=1e-5)


def test_the_gradient_is_that_of_the_token_mean_over_the_whole_batch(make_learner):
    learner = make_learner(UNCLIPPED)
    pairs = [(rollout(0, [9, 2], [-4.0, -4.0]), 1.0), (rollout(1, [8, 7, 6, 2], [-4.0] * 4), 0.0)]
    batch = Batch(0, (group(0, [5, 4], pairs),))
    advantage = 0.5 / (math.sqrt(0.5) + 1e-4)
    model, loss = learner.model, 0.0
    for (member, _), value in zip(pairs, (advantage, -advantage), strict=True):
        ids = torch.tensor([[5, 4, *member.token_ids.tolist()]])
        log_probs = model(input_ids=ids).logits[0, 1:-1].log_softmax(-1).gather(-1, ids[0, 2:, None])[:, 0]
        ratio = (log_probs + 4.0).exp()
        loss = loss - torch.minimum(ratio * value, ratio.clamp(0.8, 1.28) * value).sum() / 6
    wanted = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))
    found, metrics = gradients_of_step(learner, batch)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    for name, gradient in found.items():
        assert torch.allclose(gradient, wanted[name], rtol=0.0, atol=1e-6), name


def test_a_step_makes_rewarded_completions_likelier(make_learner):
    learner = make_learner("learner.warmup_steps=0")
    prompt, good, bad = [5, 4], [9, 2], [8, 2]
    before = {name: oracle_log_probs(learner.model, prompt, tokens) for name, tokens in (("good", good), ("bad", bad))}
    learner.train_step(
        Batch(0, (group(0, prompt, [(rollout(0, good, before["good"]), 1.0), (rollout(1, bad, before["bad"]), 0.0)]),))
    )
    assert oracle_log_probs(learner.model, prompt, good)[0] > before["good"][0] + 1e-3
    assert oracle_log_probs(learner.model, prompt, bad)[0] < before["bad"][0] - 1e-3
    assert learner.version == 1


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_on_policy_ratios_are_one_at_every_temperature(make_learner, temperature):
    learner = make_learner(f"sampling.temperature={temperature}")
    metrics = learner.train_step(random_batch(learner.model, 0, seed=4, temperature=temperature))
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_ratio/region_mean"] == 0.0


def test_another_temperature_than_the_samplers_shows_in_the_ratios(make_learner):
    learner = make_learner("sampling.temperature=1.5")
    metrics = learner.train_step(random_batch(learner.model, 0, seed=4, temperature=0.7))
    assert metrics["kl"] > 1e-3


def state(learner):
    return export_weights(learner.model, "float32"), learner.version, learner.optimizer.state_dict()["state"]


def poisoned(batch, reward=None, log_prob=None):
    """The batch with one value replaced in its first member."""
    first, *others = batch.groups[0].members
    token_ids = first.rollout.token_ids.tolist()
    log_probs = first.rollout.log_probs.copy() if log_prob is None else np.full(len(token_ids), log_prob)
    pairs = [(m.rollout, m.reward) for m in others]
    pairs.append((rollout(99, token_ids, log_probs), first.reward if reward is None else reward))
    return Batch(batch.step, (group(0, batch.groups[0].prompt_token_ids, pairs), *batch.groups[1:]))


def test_a_loss_that_is_not_finite_leaves_the_learner_as_it_was(make_learner):
    learner, untouched = make_learner(), make_learner()
    batch = random_batch(learner.model, 0, seed=5)
    before = state(learner)
    with pytest.raises(LearnerError, match="step 0: loss nan"):
        learner.train_step(poisoned(batch, log_prob=math.nan))
    assert state(learner) == before
    assert learner.train_step(batch) == untouched.train_step(batch)
    assert state(learner)[0] == state(untouched)[0]


def test_a_gradient_that_is_not_finite_leaves_the_learner_as_it_was(make_learner):
    learner = make_learner()
    before = state(learner)
    handle = learner.model.model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    batch = random_batch(learner.model, 0, seed=5)
    with pytest.raises(LearnerError, match=r"step 0: .* gradient norm (nan|inf) is not finite"):
        learner.train_step(batch)
    assert state(learner) == before
    handle.remove()
    learner.train_step(batch)
    assert learner.version == 1


def test_a_step_that_is_not_finite_is_skipped_where_that_is_allowed(make_learner, caplog):
    learner = make_learner("learner.max_skipped_steps=1")
    weights = state(learner)[0]
    metrics = learner.train_step(poisoned(random_batch(learner.model, 0, seed=5), log_prob=math.nan))
    assert (state(learner)[0], learner.version) == (weights, 1)
    assert learner.optimizer.state_dict()["state"] == {}
    assert metrics["learner/skipped"] == 1.0 and "loss" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())
    assert "step 0: loss nan" in caplog.text
    assert learner.train_step(random_batch(learner.model, 1, seed=6))["learner/skipped"] == 0.0
    assert state(learner)[0] != weights


def test_too_many_skipped_steps_in_a_row_end_the_run(make_learner):
    learner = make_learner("learner.max_skipped_steps=2")
    bad = [poisoned(random_batch(learner.model, step, seed=step), log_prob=math.nan) for step in range(6)]
    learner.train_step(bad[0])
    learner.train_step(random_batch(learner.model, 1, seed=1))
    learner.train_step(bad[2])
    learner.train_step(bad[3])
    before = state(learner)
    with pytest.raises(LearnerError, match="step 4: loss nan"):
        learner.train_step(bad[4])
    assert state(learner)[:2] == before[:2]


def test_a_reward_that_is_not_finite_leaves_the_learner_as_it_was(make_learner):
    learner = make_learner()
    before = state(learner)
    with pytest.raises(ValueError, match="not all finite"):
        learner.train_step(poisoned(random_batch(learner.model, 0, seed=5), reward=math.nan))
    assert state(learner) == before


@pytest.mark.parametrize("groups", [(), (group(0, [4], []),)], ids=["no groups", "no members"])
def test_a_batch_without_tokens_is_refused(make_learner, groups):
    learner = make_learner()
    before = state(learner)
    with pytest.raises(LearnerError, match=r"step 0: .* no tokens"):
        learner.train_step(Batch(0, groups))
    assert state(learner) == before


def test_a_batch_of_another_step_is_refused(make_learner):
    learner = make_learner()
    with pytest.raises(LearnerError, match="batch is for step 3 but the learner is at step 0"):
        learner.train_step(random_batch(learner.model, 3, seed=6))


def test_the_learning_rate_rises_over_the_warm_up(make_learner):
    learner = make_learner("learner.warmup_steps=4", "learner.learning_rate=4e-4")
    rates = [learner.train_step(random_batch(learner.model, step, seed=step))["learning_rate"] for step in range(6)]
    assert rates == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4, 4e-4, 4e-4])


def test_metrics_describe_the_batch(make_learner):
    learner = make_learner()
    for step in range(3):
        learner.train_step(random_batch(learner.model, step, seed=step))
    fresh = group(0, [4], [(rollout(0, [5, 2], [-4, -4], version=3), 1.0), (rollout(1, [6], [-4], 3, "length"), 0.0)])
    mixed = rollout(0, [7, 7, 2], [-4] * 3, version=3)
    mixed.versions[0] = 1
    stale = group(1, [4], [(mixed, 0.5), (rollout(1, [2, 2], [-4, -4], version=2), 0.5)])
    metrics = learner.train_step(Batch(3, (fresh, stale)))
    expected = {
        "tokens": 8.0,
        "reward": 0.5,
        "reward_std": math.sqrt(0.5) / 2,
        "completions/mean_length": 2.0,
        "completions/clipped_ratio": 0.25,
        "staleness/mean": 1.0,
        "staleness/max": 2.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert 0.0 < metrics["entropy"] <= math.log(54)
    low_and_high = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
    assert metrics["clip_ratio/region_mean"] == pytest.approx(low_and_high)
    assert {"loss", "grad_norm", "kl", "sampling/importance_sampling_ratio/mean"} <= metrics.keys()
    assert all(type(value) is float for value in metrics.values())


def test_gradients_are_scaled_down_to_the_set_norm(make_learner):
    learner = make_learner("learner.max_grad_norm=0.5")
    gradients, metrics = gradients_of_step(learner, random_batch(learner.model, 0, seed=7))
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    assert metrics["grad_norm"] > 0.5
    assert norm == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exported_snapshot_makes_a_worker_equal_to_the_learner(make_learner, dtype):
    learner, worker = make_learner(f"model.dtype={dtype}"), make_learner()
    learner.train_step(random_batch(learner.model, 0, seed=8))
    snapshot = learner.export()
    load_weights(worker.model, snapshot)
    found = oracle_log_probs(worker.model, [4, 5], [6, 7, 2])
    wanted = oracle_log_probs(learner.model, [4, 5], [6, 7, 2])
    assert found == pytest.approx(wanted, abs=0.0 if dtype == "float32" else 0.05)
    assert {weight.dtype for weight in learner.model.parameters()} == {torch.float32}


def test_weights_that_are_not_finite_are_never_exported(make_learner):
    learner = make_learner()
    with torch.no_grad():
        learner.model.model.norm.weight[3] = math.nan
    with pytest.raises(LearnerError, match=r"version 0: weight model\.norm\.weight is not finite"):
        learner.export()
