"""The learner's objective once more, in float64 loops over plain lists, sharing no code with the learner.

Gradients are central differences of the loss, with what carries no gradient held fixed.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics

from echo2.config_sections import ObjectiveSection

STEP = 1e-5
LOSSES = [
    *itertools.product(["grpo"], ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "dr_grpo"], [0.0, 1.5], ["off"]),
    *itertools.product(["gspo"], ["seq_mean_token_mean"], [0.0, 1.5], ["off"]),
    *itertools.product(["cispo"], ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "dr_grpo"], [0.0], ["off"]),
    *itertools.product(
        ["decoupled_ppo"],
        ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "dr_grpo"],
        [0.0, 1.5],
        ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    ),
]
"""Every (loss_type, loss_agg_mode, clip_ratio_c, importance_sampling_mode) that makes sense."""


def all_settings():
    """Every combination of choices of the loss, with its KL term and entropy bonus on and off."""
    for loss_type, mode, dual, sampling in LOSSES:
        for estimator, beta, entropy_coef in [("k3", 0.0, 0.0), ("k1", 0.1, 0.0), ("k2", 0.1, 0.02), ("k3", 0.1, 0.02)]:
            yield ObjectiveSection(
                loss_type=loss_type,
                loss_agg_mode=mode,
                clip_ratio_c=dual,
                importance_sampling_mode=sampling,
                importance_sampling_clip_min=0.6 if sampling != "off" else 0.0,
                importance_sampling_clip_max=1.6,
                beta=beta,
                kl_estimator=estimator,
                entropy_coef=entropy_coef,
            )


def ragged_batch(seed, sequences=6, longest=7):
    """{name: sequences of token values}: a policy near the behaviour policy and its proximal one, but not always."""
    draw = random.Random(seed)
    batch = {name: [] for name in ("current", "proximal", "behaviour", "reference", "entropies", "advantages")}
    for _ in range(sequences):
        length = draw.randint(1, longest)
        behaviour = [-draw.expovariate(0.5) - 0.01 for _ in range(length)]
        batch["behaviour"].append(behaviour)
        shift = draw.gauss(0.0, 0.5)
        for name, spread in (("proximal", 0.4), ("current", 0.6), ("reference", 0.5)):
            batch[name].append([value + shift + draw.gauss(0.0, spread) for value in behaviour])
        batch["entropies"].append([draw.uniform(0.0, 3.0) for _ in range(length)])
        batch["advantages"].append(draw.choice([-1.0, 1.0]) * draw.uniform(0.2, 2.0))
    return batch


def oracle_loss(batch, settings, max_completion_tokens, fixed=None):
    """The objective of a batch; `fixed` is the current policy where no gradient flows, by default the current one itself."""
    fixed = batch["current"] if fixed is None else fixed
    sequences = len(batch["current"])
    tokens = sum(len(sequence) for sequence in batch["current"])
    total = 0.0
    for s in range(sequences):
        losses = [oracle_token_loss(batch, s, i, settings, fixed) for i in range(len(batch["current"][s]))]
        if settings.loss_agg_mode == "token_mean":
            total += sum(losses) / tokens
        elif settings.loss_agg_mode == "seq_mean_token_mean":
            total += sum(losses) / len(losses) / sequences
        elif settings.loss_agg_mode == "seq_mean_token_sum":
            total += sum(losses) / sequences
        else:
            total += sum(losses) / (sequences * max_completion_tokens)
    return total


def oracle_token_loss(batch, s, i, settings, fixed):
    current, proximal, behaviour = batch["current"][s], batch["proximal"][s], batch["behaviour"][s]
    advantage = batch["advantages"][s]
    low, high = 1 - settings.clip_ratio_low, 1 + settings.clip_ratio_high
    if settings.loss_type == "cispo":
        loss = -min(math.exp(fixed[s][i] - behaviour[i]), high) * advantage * current[i]
    else:
        if settings.loss_type == "grpo":
            ratio = math.exp(current[i] - behaviour[i])
        elif settings.loss_type == "gspo":
            ratio = math.prod(math.exp(c - b) for c, b in zip(current, behaviour, strict=True)) ** (1 / len(current))
        else:
            ratio = math.exp(current[i] - proximal[i])
        gain = min(ratio * advantage, max(low, min(high, ratio)) * advantage)
        if settings.clip_ratio_c and advantage < 0:
            gain = max(gain, settings.clip_ratio_c * advantage)
        loss = -gain
    if settings.importance_sampling_mode != "off":
        loss *= oracle_weight(proximal, behaviour, i, settings)
    if settings.beta:
        d = batch["reference"][s][i] - current[i]
        loss += settings.beta * {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[settings.kl_estimator]
    return loss - settings.entropy_coef * batch["entropies"][s][i]


def oracle_weight(proximal, behaviour, i, settings):
    level, way = settings.importance_sampling_mode.split("_")
    ratios = [math.exp(p - b) for p, b in zip(proximal, behaviour, strict=True)]
    weight = ratios[i] if level == "token" else statistics.geometric_mean(ratios)
    low, high = settings.importance_sampling_clip_min, settings.importance_sampling_clip_max
    if way == "truncate":
        return max(low, min(high, weight))
    return weight if low <= weight <= high else 0.0


def oracle_gradient(batch, settings, max_completion_tokens, name="current"):
    """d loss / d batch[name], token after token, by central differences."""
    fixed = [list(sequence) for sequence in batch["current"]]
    found = []
    for sequence in batch[name]:
        for i, value in enumerate(sequence):
            ends = []
            for moved in (value + STEP, value - STEP):
                sequence[i] = moved
                ends.append(oracle_loss(batch, settings, max_completion_tokens, fixed))
            sequence[i] = value
            found.append((ends[0] - ends[1]) / (2 * STEP))
    return found


def oracle_advantages(rewards, estimator):
    """Advantages of a batch, group by group and member by member."""
    every = [reward for group in rewards for reward in group]
    found = []
    for group in rewards:
        row = []
        for i, reward in enumerate(group):
            if len(set(group)) == 1:
                row.append(0.0)
            elif estimator == "rloo":
                row.append(reward - statistics.mean(group[:i] + group[i + 1 :]))
            else:
                scale = {
                    "grpo": lambda group=group: statistics.stdev(group) + 1e-4,
                    "mean_only": lambda: 1.0,
                    "batch": lambda: statistics.stdev(every) + 1e-4,
                }[estimator]()
                row.append((reward - statistics.mean(group)) / scale)
        found.append(row)
    return found
