"""Choices that do not fit are refused in one sentence; those that fit reach the learner's step."""

import copy

import pytest
import torch
from learning_batches import group, random_batch, rollout
from test_learner_step import UNCLIPPED, gradients_of_step

from echo2.config import dump_toml, load_config
from echo2.errors import ConfigError
from echo2.learning.learner import LearnerError
from echo2.protocol import Batch

GSPO = ["objective.loss_type=gspo", "objective.loss_agg_mode=seq_mean_token_mean"]
DECOUPLED = ["objective.loss_type=decoupled_ppo", "objective.importance_sampling_mode=sequence_mask"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["objective.loss_type=gspo"], "set objective.loss_agg_mode=seq_mean_token_mean"),
        (["objective.loss_type=cispo", "objective.clip_ratio_c=3.0"], "'cispo', whose weights are bounded already"),
        (["objective.clip_ratio_c=1.2"], r"must exceed 1 \+ objective.clip_ratio_high = 1.28"),
        (["objective.loss_type=decoupled_ppo"], "set objective.importance_sampling_mode=token_truncate"),
        (["objective.importance_sampling_mode=token_mask"], "corrects twice"),
        ([*GSPO, "objective.importance_sampling_mode=sequence_mask"], "corrects twice"),
        ([*DECOUPLED, "objective.importance_sampling_clip_min=2.0"], "clip_min = 2 is not below"),
        (["objective.overlong=soft", "objective.overlong_buffer_tokens=9"], "exceeds sampling.max_completion_tokens = 8"),
        (["objective.beta=-1.0"], "objective.beta = -1"),
        (["objective.adv_estimator=none"], "objective.adv_estimator = 'none'"),
    ],
)
def test_choices_that_do_not_fit_are_refused_in_one_sentence(settings, said):
    with pytest.raises(ConfigError, match=said) as refusal:
        load_config([], settings)
    assert ";" not in str(refusal.value)


@pytest.mark.parametrize("settings", [[], GSPO, DECOUPLED, ["objective.clip_ratio_c=3.0"]])
def test_choices_that_fit_survive_being_written(settings, tmp_path):
    config = load_config([], settings)
    (tmp_path / "run.toml").write_text(dump_toml(config))
    assert load_config([tmp_path / "run.toml"]) == config


@pytest.mark.parametrize(
    "settings",
    [
        GSPO,
        DECOUPLED,
        ["objective.loss_type=cispo", "objective.adv_estimator=rloo", "objective.loss_agg_mode=seq_mean_token_sum"],
        ["objective.loss_agg_mode=dr_grpo", "objective.adv_estimator=mean_only", "objective.beta=0.1"],
        ["objective.adv_estimator=batch", "objective.overlong=mask"],
    ],
)
def test_gradients_do_not_depend_on_micro_batches_whatever_the_objective(make_learner, settings):
    whole = make_learner(UNCLIPPED, *settings)
    single = make_learner(UNCLIPPED, "learner.micro_batch_tokens=1", *settings)
    batch = random_batch(whole.model, 0, seed=3, noise=0.3)
    one, metrics = gradients_of_step(whole, batch)
    many, metrics_of_many = gradients_of_step(single, batch)
    assert max(gradient.abs().max().item() for gradient in one.values()) > 1e-3
    for name, gradient in one.items():
        assert torch.allclose(gradient, many[name], rtol=0.0, atol=1e-6), name
    assert metrics == pytest.approx(metrics_of_many, abs=1e-5)


def test_the_reference_is_the_first_policy_and_stays_so(make_learner):
    learner = make_learner("objective.beta=0.1", "learner.warmup_steps=0")
    before = copy.deepcopy(learner.model.state_dict())
    first, second = (learner.train_step(random_batch(learner.model, step, seed=4)) for step in range(2))
    assert first["kl_loss"] == pytest.approx(0.0, abs=1e-9)
    assert second["kl_loss"] > 1e-6
    assert not any(weight.requires_grad for weight in learner._reference.model.parameters())
    kept = learner._reference.model.state_dict()
    assert all(torch.equal(kept[name], weight) for name, weight in before.items())


def test_the_entropy_bonus_reaches_the_weights(make_learner):
    """On a batch without advantages, the gradient is that of the mean entropy of the model's full logits."""
    learner = make_learner(UNCLIPPED, "objective.entropy_coef=0.3", "sampling.temperature=0.7")
    logits = learner.model(input_ids=torch.tensor([[5, 4, 9], [5, 4, 10]])).logits[:, 1:] / 0.7
    loss = -0.3 * torch.distributions.Categorical(logits=logits.flatten(0, 1)).entropy().mean()
    weights = dict(learner.model.named_parameters())
    wanted = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    found, metrics = gradients_of_step(learner, equal_rewards(0))
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert max(gradient.abs().max().item() for gradient in found.values()) > 1e-4
    for name, gradient in found.items():
        assert torch.allclose(gradient, wanted[name], rtol=0.0, atol=1e-6), name


def equal_rewards(step):
    return Batch(step, (group(0, [5, 4], [(rollout(i, [9 + i, 2], [-4.0, -4.0]), 1.0) for i in range(2)]),))


def test_a_group_of_equal_rewards_has_the_gradient_of_its_divergence_alone(make_learner):
    """Without a KL term such a group moves nothing; with one it is drawn towards the reference."""
    plain, drawn = make_learner(), make_learner("objective.beta=0.1", "learner.warmup_steps=0")
    assert plain.train_step(equal_rewards(0))["grad_norm"] == 0.0
    drawn.train_step(random_batch(drawn.model, 0, seed=4))
    before = drawn.train_step(equal_rewards(1))
    assert before["loss"] == pytest.approx(0.1 * before["kl_loss"])
    assert before["grad_norm"] > 0.0


def test_a_batch_that_is_masked_as_a_whole_takes_no_step(make_learner):
    learner = make_learner("objective.overlong=mask")
    pairs = [(rollout(i, [9] * 8, [-4.0] * 8, reason="length"), float(i)) for i in range(2)]
    with pytest.raises(LearnerError, match=r"step 0: .* no tokens"):
        learner.train_step(Batch(0, (group(0, [5], pairs),)))
    assert learner.version == 0
