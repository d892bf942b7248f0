"""Losses of TRL's GRPOTrainer on hand-made tensors.

Where trl 1.16.0 is installed, `python tests/learning/trl_losses.py` prints GOLDEN of test_objective_against_trl.py.
"""

from __future__ import annotations

from collections import defaultdict
from pprint import pprint
from types import SimpleNamespace

import torch
from objective_oracle import ragged_batch
from torch.nn.utils.rnn import pad_sequence

LIMIT = 9
BATCH = ragged_batch(seed=0)
DECOUPLED = {"loss_type": "decoupled_ppo", "importance_sampling_clip_max": 1.6}
CASES = {
    "token_mean": ({}, {"loss_type": "bnpo"}),
    "seq_mean_token_mean": ({"loss_agg_mode": "seq_mean_token_mean"}, {"loss_type": "grpo"}),
    "seq_mean_token_sum": ({"loss_agg_mode": "seq_mean_token_sum"}, {"loss_type": "luspo"}),
    "dr_grpo": ({"loss_agg_mode": "dr_grpo"}, {"loss_type": "dr_grpo"}),
    "dual_clip": ({"clip_ratio_c": 1.5}, {"loss_type": "bnpo", "delta": 1.5}),
    "kl": ({"beta": 0.1}, {"loss_type": "bnpo", "beta": 0.1}),
    "entropy": ({"entropy_coef": 0.02}, {"loss_type": "bnpo", "entropy_coef": 0.02}),
    "gspo": (
        {"loss_type": "gspo", "loss_agg_mode": "seq_mean_token_mean"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
    "cispo": ({"loss_type": "cispo"}, {"loss_type": "cispo", "epsilon_high": 1.28}),
    "token_truncate": (
        DECOUPLED | {"importance_sampling_mode": "token_truncate"},
        {"loss_type": "bnpo", "old": "proximal", "vllm_importance_sampling_mode": "token_truncate"},
    ),
    "token_mask": (
        DECOUPLED | {"importance_sampling_mode": "token_mask"},
        {"loss_type": "bnpo", "old": "proximal", "vllm_importance_sampling_mode": "token_mask"},
    ),
}
"""Name: (settings of the objective, TRL's arguments with the policy that it takes for the old one)."""


def padded(name):
    return pad_sequence([torch.tensor(sequence) for sequence in BATCH[name]], batch_first=True)


def trl_loss(arguments):
    """TRL's loss, its gradients token after token, and the shares of clipped tokens."""
    from trl import GRPOTrainer

    arguments = {"old": "behaviour", "beta": 0.0, "entropy_coef": 0.0, "delta": None, "epsilon_high": 0.28, **arguments}
    mask = pad_sequence([torch.ones(len(sequence)) for sequence in BATCH["current"]], batch_first=True)
    log_probs = padded("current").requires_grad_()
    mode = arguments.get("vllm_importance_sampling_mode")
    trainer = SimpleNamespace(
        **{"importance_sampling_level": "token", "epsilon_low": 0.2, "max_completion_length": LIMIT, **arguments},
        args=SimpleNamespace(delta=arguments["delta"], use_bias_correction_kl=False),
        use_vllm=mode is not None,
        vllm_importance_sampling_correction=True,
        top_entropy_quantile=1.0,
        aux_loss_enabled=False,
        off_policy_mask_threshold=None,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=arguments["entropy_coef"] > 0,
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics={"eval": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, padded("entropies"), None),
    )
    empty = torch.zeros(len(mask), 0)
    inputs = {"prompt_ids": empty, "prompt_mask": empty, "completion_ids": mask, "completion_mask": mask}
    inputs |= {"advantages": torch.tensor(BATCH["advantages"]), "num_items_in_batch": mask.sum()}
    inputs |= {"old_per_token_logps": padded(arguments["old"]), "ref_per_token_logps": padded("reference")}
    ratio = (padded("proximal") - padded("behaviour")).exp()
    inputs["importance_sampling_ratio"] = ratio.clamp(max=1.6) if mode == "token_truncate" else ratio * (ratio <= 1.6)
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    metrics = {name: values[0] for name, values in trainer._metrics["eval"].items() if name.startswith("clip_ratio/")}
    return loss.item(), log_probs.grad[mask.bool()].tolist(), metrics


if __name__ == "__main__":
    golden = {}
    for name, (_, arguments) in CASES.items():
        loss, gradients, _ = trl_loss(arguments)
        golden[name] = (round(loss, 7), round(sum(gradients), 7), round(sum(gradient**2 for gradient in gradients), 7))
    pprint(golden)
