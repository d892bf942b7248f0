"""The objective against TRL's GRPOTrainer on the same tensors: what trl 1.16.0 gave, and trl itself where it is installed.

GOLDEN is written by `python tests/learning/trl_losses.py`.
"""

import pytest
import torch
from test_objective import laid_flat
from trl_losses import BATCH, CASES, LIMIT, trl_loss

from echo2.config_sections import ObjectiveSection
from echo2.learning.objective import Objective, step_metrics

GOLDEN = {
    "cispo": (0.3356937, 0.205516, 0.0805311),
    "dr_grpo": (0.238501, 0.2853881, 0.0182535),
    "dual_clip": (0.3418707, 0.1435713, 0.0358443),
    "entropy": (0.4439253, 0.5707762, 0.0730141),
    "gspo": (0.135585, 0.1923506, 0.0378188),
    "kl": (0.494843, 0.5574044, 0.0762957),
    "seq_mean_token_mean": (0.2713139, 0.3131231, 0.0598555),
    "seq_mean_token_sum": (2.1465092, 2.568493, 1.4785348),
    "token_mask": (0.4990903, 0.5228537, 0.0507636),
    "token_mean": (0.477002, 0.5707762, 0.0730141),
    "token_truncate": (0.375784, 0.2977335, 0.068875),
}
"""Loss, sum of its gradients and sum of their squares; rounded to 7 places."""


def evaluated(settings):
    objective, tokens = Objective(ObjectiveSection(**settings), LIMIT), laid_flat(BATCH)
    divisor = objective.divisor(len(tokens.log_probs), len(tokens.lengths))
    figures = objective.evaluate(tokens)
    (figures.loss / divisor).backward()
    return step_metrics([figures], len(tokens.log_probs), divisor), tokens.log_probs.grad


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_that_trl_gave(case):
    metrics, gradients = evaluated(CASES[case][0])
    found = (metrics["loss"], gradients.sum().item(), gradients.square().sum().item())
    assert found == pytest.approx(GOLDEN[case], abs=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_clip_ratios_are_those_of_trl(case):
    pytest.importorskip("trl")
    settings, arguments = CASES[case]
    metrics, gradients = evaluated(settings)
    loss, trl_gradients, trl_metrics = trl_loss(arguments)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
    assert torch.allclose(gradients, torch.tensor(trl_gradients), atol=1e-6)
    if case == "gspo":  # TRL counts sequences, the learner tokens
        return
    assert {name: metrics[name] for name in trl_metrics} == pytest.approx(trl_metrics, abs=1e-6)
