"""The objective against float64 loops for every combination of choices, and what must not change it."""

import dataclasses
import doctest
import math

import objective_oracle as oracle
import pytest
import torch

from echo2.config_sections import ObjectiveSection
from echo2.learning import advantages, corrections, losses
from echo2.learning.losses import kl_estimates
from echo2.learning.objective import Objective, Tokens, step_metrics

LIMIT = 9
SETTINGS = list(oracle.all_settings())


def name_of(settings):
    return "-".join(str(value) for key, value in settings.model_dump(exclude_defaults=True).items() if "clip_m" not in key)


def laid_flat(batch, rows=None):
    """The sequences `rows` of a batch as float32 tokens, of which log_probs and entropies carry gradients."""
    rows = range(len(batch["current"])) if rows is None else rows

    def flat(name):
        return torch.tensor([value for row in rows for value in batch[name][row]])

    lengths = torch.tensor([len(batch["current"][row]) for row in rows])
    return Tokens(
        log_probs=flat("current").requires_grad_(),
        behaviour_log_probs=flat("behaviour"),
        advantages=torch.tensor([batch["advantages"][row] for row in rows]).repeat_interleave(lengths),
        lengths=lengths,
        entropies=flat("entropies").requires_grad_(),
        proximal_log_probs=flat("proximal"),
        reference_log_probs=flat("reference"),
    )


def evaluated(settings, batch, parts):
    """Loss, gradients in the sequences' order, and metrics of a batch that is evaluated in `parts` (lists of rows)."""
    objective = Objective(settings, LIMIT)
    tokens = sum(map(len, batch["current"]))
    divisor = objective.divisor(tokens, len(batch["current"]))
    found, gradients, entropy_gradients = [], [], []
    for rows in parts:
        part = laid_flat(batch, rows)
        found.append(objective.evaluate(part))
        (found[-1].loss / divisor).backward()
        gradients += part.log_probs.grad.tolist()
        entropy_gradients += part.entropies.grad.tolist() if part.entropies.grad is not None else [0.0] * len(part.entropies)
    metrics = step_metrics(found, tokens, divisor)
    return metrics["loss"], gradients, entropy_gradients, metrics


@pytest.mark.parametrize("settings", SETTINGS, ids=name_of)
def test_loss_and_gradients_are_those_of_the_formulas(settings):
    batch = oracle.ragged_batch(seed=SETTINGS.index(settings))
    loss, gradients, entropy_gradients, _ = evaluated(settings, batch, [range(6)])
    assert loss == pytest.approx(oracle.oracle_loss(batch, settings, LIMIT), abs=1e-5)
    assert gradients == pytest.approx(oracle.oracle_gradient(batch, settings, LIMIT), abs=1e-5)
    assert entropy_gradients == pytest.approx(oracle.oracle_gradient(batch, settings, LIMIT, "entropies"), abs=1e-5)
    assert max(map(abs, gradients)) > 1e-3


@pytest.mark.parametrize("settings", SETTINGS, ids=name_of)
def test_neither_micro_batches_nor_ranks_change_anything(settings):
    batch = oracle.ragged_batch(seed=SETTINGS.index(settings) + 1000)
    whole = evaluated(settings, batch, [range(6)])
    for parts in ([[row] for row in range(6)], [range(2), range(2, 6)]):
        loss, gradients, entropy_gradients, metrics = evaluated(settings, batch, parts)
        assert loss == pytest.approx(whole[0], rel=1e-6, abs=1e-6)
        assert gradients == pytest.approx(whole[1], abs=1e-6)
        assert entropy_gradients == pytest.approx(whole[2], abs=1e-6)
        assert metrics == pytest.approx(whole[3], rel=1e-6, abs=1e-6)


def test_the_oracle_meets_every_clip_and_cap():
    """Else the tests above would compare less than they say."""
    metrics = {"grpo": [], "gspo": [], "decoupled_ppo": [], "cispo": []}
    for seed, settings in enumerate(SETTINGS):
        metrics[settings.loss_type].append(evaluated(settings, oracle.ragged_batch(seed), [range(6)])[3])
    for loss_type, found in metrics.items():
        assert max(values["clip_ratio/high_mean"] for values in found) > 0, loss_type
        if loss_type != "cispo":
            assert max(values["clip_ratio/low_mean"] for values in found) > 0, loss_type
            assert max(values.get("clip_ratio/dual_mean", 0.0) for values in found) > 0, loss_type


def test_a_single_update_takes_its_own_start_for_the_proximal_policy():
    settings = ObjectiveSection(loss_type="decoupled_ppo", importance_sampling_mode="token_truncate")
    tokens = dataclasses.replace(laid_flat(oracle.ragged_batch(1)), proximal_log_probs=None)
    figures = Objective(settings, LIMIT).evaluate(tokens)
    figures.loss.backward()
    weights = (tokens.log_probs.detach() - tokens.behaviour_log_probs).exp().clamp(max=2.0)
    assert torch.allclose(tokens.log_probs.grad, -weights * tokens.advantages, atol=1e-6)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_importance_weights_carry_no_gradient(mode):
    proximal = torch.tensor([-1.0, -2.0], requires_grad=True)
    weights = corrections.importance_weights(proximal, torch.tensor([-1.2, -1.9]), torch.tensor([2]), mode, 0.0, 2.0)
    assert not weights.requires_grad


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradients_of_the_divergence_are_those_of_finite_differences(estimator):
    current = torch.tensor([-0.3, -1.0, -4.0, -2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.5, -1.0, -1.0, -5.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda values: kl_estimates(values, reference, estimator), current)
    kl_estimates(current, reference, estimator).sum().backward()
    difference = reference - current.detach()
    expected = {"k1": torch.ones(4), "k2": -difference, "k3": 1 - difference.exp()}[estimator]
    assert current.grad.tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_estimates_mean_the_divergence(estimator):
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    mean = (policy * kl_estimates(policy.log(), reference.log(), estimator)).sum()
    assert mean.item() == pytest.approx((policy * (policy / reference).log()).sum().item(), abs=1e-6)


def tokens_with_gap(lengths, gap):
    total = sum(lengths)
    values = torch.full((total,), -1.0)
    return Tokens(
        log_probs=(values + gap).requires_grad_(),
        behaviour_log_probs=values,
        advantages=torch.ones(total),
        lengths=torch.tensor(lengths),
        entropies=torch.zeros(total, requires_grad=True),
        reference_log_probs=values,
    )


def test_a_sequences_ratio_does_not_grow_with_its_length():
    objective = Objective(ObjectiveSection(loss_type="gspo", loss_agg_mode="seq_mean_token_mean"), 2000)
    short, long = (objective.evaluate(tokens_with_gap([length], 0.001)).loss.item() for length in (1, 2000))
    assert short == pytest.approx(-math.exp(0.001), abs=1e-5)
    assert long == pytest.approx(short, abs=1e-5)


@pytest.mark.parametrize("gap", [1e4, -1e4])
@pytest.mark.parametrize("settings", SETTINGS, ids=name_of)
def test_huge_ratios_stay_finite(settings, gap):
    tokens = tokens_with_gap([3, 2], gap)
    figures = Objective(settings, LIMIT).evaluate(tokens)
    figures.loss.backward()
    assert math.isfinite(figures.loss.item())
    assert tokens.log_probs.grad.isfinite().all()


@pytest.mark.parametrize("settings", SETTINGS, ids=name_of)
def test_a_log_probability_that_is_no_number_is_never_masked_away(settings):
    tokens = laid_flat(oracle.ragged_batch(0))
    tokens.behaviour_log_probs[2] = math.nan
    assert math.isnan(Objective(settings, LIMIT).evaluate(tokens).loss.item())


def test_terms_without_what_they_need_are_refused():
    tokens = dataclasses.replace(laid_flat(oracle.ragged_batch(0)), reference_log_probs=None)
    with pytest.raises(ValueError, match=r"beta = 0\.1 needs the log-probabilities of the reference"):
        Objective(ObjectiveSection(beta=0.1), LIMIT).evaluate(tokens)
    tokens = dataclasses.replace(tokens, entropies=tokens.entropies.detach())
    with pytest.raises(ValueError, match=r"entropy_coef = 0\.01 needs entropies that carry a gradient"):
        Objective(ObjectiveSection(entropy_coef=0.01), LIMIT).evaluate(tokens)


def test_metrics_of_two_sequences_by_hand():
    behaviour = torch.tensor([0.5, 0.5, 0.25]).log()
    tokens = Tokens(
        log_probs=torch.tensor([0.75, 0.25, 0.25]).log().requires_grad_(),
        behaviour_log_probs=behaviour,
        advantages=torch.tensor([1.0, 1.0, -1.0]),
        lengths=torch.tensor([2, 1]),
        entropies=torch.tensor([1.0, 2.0, 3.0]),
    )
    metrics = step_metrics([Objective(ObjectiveSection(), LIMIT).evaluate(tokens)], 3, 3)
    assert metrics == pytest.approx(
        {
            "loss": (-1.28 - 0.5 + 1.0) / 3,
            "entropy": 2.0,
            "kl": ((0.5 - math.log(1.5)) + (-0.5 - math.log(0.5))) / 3,
            "clip_ratio/low_mean": 0.0,
            "clip_ratio/low_min": 0.0,
            "clip_ratio/high_mean": 1 / 3,
            "clip_ratio/high_max": 0.5,
            "clip_ratio/region_mean": 1 / 3,
            "sampling/importance_sampling_ratio/min": 0.5,
            "sampling/importance_sampling_ratio/mean": 1.0,
            "sampling/importance_sampling_ratio/max": 1.5,
            "sampling/sampling_logp_difference/mean": (math.log(1.5) + math.log(2.0)) / 3,
            "sampling/sampling_logp_difference/max": math.log(2.0),
        },
        abs=1e-6,
    )


@pytest.mark.parametrize("module", [advantages, corrections, losses], ids=lambda module: module.__name__)
def test_examples_in_docstrings_are_right(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
