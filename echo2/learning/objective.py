"""What the learner minimises, from a batch's members to one number and the figures that are watched beside it.

Invariants: everything is a sum or an extreme over tokens, so micro-batches and ranks add up to exactly what the whole batch
gives once the sum is divided by the divisor of the whole batch; data of an older policy is corrected once, either by the ratio
against the behaviour policy that the loss clips, or by weights from the behaviour to the proximal policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from echo2.config import Config
from echo2.config_sections import ObjectiveSection, SamplingSection
from echo2.learning.advantages import batch_advantages, soft_overlong_penalties
from echo2.learning.corrections import at_tokens, exp_log_ratio, importance_weights, sequence_log_ratio, sequence_means
from echo2.learning.losses import TokenLosses, batch_divisor, cispo_losses, clipped_losses, kl_estimates, token_weights
from echo2.protocol import Batch, Rollout, TrainingGroup

RATIO, DIFFERENCE = "sampling/importance_sampling_ratio", "sampling/sampling_logp_difference"


@dataclass(frozen=True, slots=True)
class Tokens:
    """N ≥ 1 completion tokens, laid flat sequence after sequence; float32, each [N] unless said otherwise."""

    log_probs: Tensor
    """Of the policy that is trained; carries a gradient."""
    behaviour_log_probs: Tensor
    """When the tokens were sampled."""
    advantages: Tensor
    lengths: Tensor
    """[M] int64: tokens of each of the M sequences, 1 at least; they add up to N."""
    entropies: Tensor
    """Of the policy's distributions; carries a gradient where the entropy bonus is on."""
    proximal_log_probs: Tensor | None = None
    """Of the policy at the start of the step; None where the step is a single update, so that it is the current one."""
    reference_log_probs: Tensor | None = None
    """Of the frozen reference policy; needed where β > 0."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What N tokens add to a step's metrics: scalar tensors by the metric's name, of which only `loss` carries a gradient."""

    loss: Tensor
    """Weighted sum over tokens, to be divided by the divisor of the whole batch."""
    sums: Mapping[str, Tensor]
    """To be divided by the tokens of the whole batch."""
    smallest: Mapping[str, Tensor]
    largest: Mapping[str, Tensor]

    def without_weight(self) -> Figures:
        """The figures of tokens that count elsewhere: they add nothing to any sum, nor to a gradient."""
        return replace(self, loss=self.loss * 0.0, sums={name: value * 0.0 for name, value in self.sums.items()})


@dataclass(frozen=True, slots=True)
class Objective:
    """The objective that `settings` choose; completions have up to `max_completion_tokens` tokens."""

    settings: ObjectiveSection
    max_completion_tokens: int

    @classmethod
    def of(cls, config: Config) -> Objective:
        return cls(config.objective, config.sampling.max_completion_tokens)

    @property
    def needs_reference(self) -> bool:
        return self.settings.beta > 0.0

    def trained_members(self, batch: Batch) -> Iterator[tuple[TrainingGroup, Rollout, float]]:
        """Members to train, each with its group and its advantage, in the batch's order.

        Advantages come from all members, those that `overlong` = `mask` then leaves out included. Raises ValueError for a
        reward that is not finite.
        """
        advantages = batch_advantages([self._rewards(group) for group in batch.groups], self.settings.adv_estimator)
        for group, values in zip(batch.groups, advantages, strict=True):
            for member, advantage in zip(group.members, values, strict=True):
                if self.settings.overlong != "mask" or member.rollout.finish_reason != "length":
                    yield group, member.rollout, float(advantage)

    def divisor(self, tokens: int, sequences: int) -> int:
        """What the losses of the whole batch, over all its micro-batches and ranks, are divided by."""
        return batch_divisor(tokens, sequences, self.max_completion_tokens, self.settings.loss_agg_mode)

    def evaluate(self, tokens: Tokens) -> Figures:
        """Loss and figures of some sequences of a batch; each sequence must be there as a whole.

        Per token: w·policy loss + β·KL − entropy_coef·entropy, weighted as `loss_agg_mode` says. Raises ValueError where the
        reference's log-probabilities or the entropies' gradient are needed and missing.
        """
        settings = self.settings
        proximal = tokens.log_probs.detach() if tokens.proximal_log_probs is None else tokens.proximal_log_probs
        policy = self._policy_losses(tokens, proximal)
        losses, watched = policy.loss, {}
        if settings.clip_ratio_c > 0.0:
            watched["clip_ratio/dual_mean"] = policy.clipped_dual
        if settings.importance_sampling_mode != "off":
            weights = self._importance_weights(tokens, proximal)
            losses = losses * weights
            watched["sampling/importance_sampling_weight/mean"] = weights
        if self.needs_reference:
            if tokens.reference_log_probs is None:
                raise ValueError(f"beta = {settings.beta:g} needs the log-probabilities of the reference policy")
            kl = kl_estimates(tokens.log_probs, tokens.reference_log_probs, settings.kl_estimator)
            losses = losses + settings.beta * kl
            watched["kl_loss"] = kl.detach()
        if settings.entropy_coef > 0.0:
            if tokens.log_probs.requires_grad and not tokens.entropies.requires_grad:
                raise ValueError(f"entropy_coef = {settings.entropy_coef:g} needs entropies that carry a gradient")
            losses = losses - settings.entropy_coef * tokens.entropies
        counts = at_tokens(token_weights(tokens.lengths, settings.loss_agg_mode), tokens.lengths, len(losses))
        return _figures((losses * counts).sum(), tokens, policy, proximal, watched)

    def _policy_losses(self, tokens: Tokens, proximal: Tensor) -> TokenLosses:
        settings, advantages = self.settings, tokens.advantages
        old = proximal if settings.loss_type == "decoupled_ppo" else tokens.behaviour_log_probs
        log_ratio = tokens.log_probs - old
        if settings.loss_type == "cispo":
            return cispo_losses(tokens.log_probs, log_ratio, advantages, settings.clip_ratio_high)
        if settings.loss_type == "gspo":
            log_ratio = sequence_log_ratio(log_ratio, tokens.lengths)
        low, high, c = settings.clip_ratio_low, settings.clip_ratio_high, settings.clip_ratio_c
        return clipped_losses(log_ratio, advantages, low, high, c)

    def _importance_weights(self, tokens: Tokens, proximal: Tensor) -> Tensor:
        mode, lengths = self.settings.importance_sampling_mode, tokens.lengths
        low, high = self.settings.importance_sampling_clip_min, self.settings.importance_sampling_clip_max
        return importance_weights(proximal, tokens.behaviour_log_probs, lengths, mode, low, high)

    def _rewards(self, group: TrainingGroup) -> Sequence[float]:
        rewards = [member.reward for member in group.members]
        if self.settings.overlong != "soft":
            return rewards
        lengths = [len(member.rollout.token_ids) for member in group.members]
        buffer_tokens, factor = self.settings.overlong_buffer_tokens, self.settings.overlong_penalty_factor
        penalties = soft_overlong_penalties(lengths, self.max_completion_tokens, buffer_tokens, factor)
        return (np.asarray(rewards, np.float64) + penalties).tolist()


DEFAULT_OBJECTIVE = Objective(ObjectiveSection(), SamplingSection().max_completion_tokens)


def step_metrics(
    parts: Sequence[Figures], tokens: int, divisor: float, gathered: Callable[[Tensor], Tensor] | None = None
) -> dict[str, float]:
    """The metrics of the whole batch, of `tokens` tokens, from those of its parts; fetched from the device at once.

    `gathered` makes of this rank's row of figures [n] the rows of all ranks [ranks, n], where there are several.
    """
    rows = [[part.loss.detach(), *part.sums.values(), *part.smallest.values(), *part.largest.values()] for part in parts]
    widths = [1, *map(len, (parts[0].sums, parts[0].smallest, parts[0].largest))]
    table = torch.stack([torch.stack([value.double() for value in row]) for row in rows])
    if gathered is not None:
        loss, sums, smallest, largest = table.split(widths, dim=1)
        table = gathered(torch.cat([loss.sum(0), sums.sum(0), smallest.amin(0), largest.amax(0)]))
    loss, sums, smallest, largest = table.cpu().split(widths, dim=1)
    metrics = {"loss": loss.sum().item() / divisor}
    metrics |= zip(parts[0].sums, (sums.sum(0) / tokens).tolist(), strict=True)
    metrics |= zip(parts[0].smallest, smallest.amin(0).tolist(), strict=True)
    metrics |= zip(parts[0].largest, largest.amax(0).tolist(), strict=True)
    return metrics


@torch.no_grad()
def _figures(loss: Tensor, tokens: Tokens, policy: TokenLosses, proximal: Tensor, watched: Mapping[str, Tensor]) -> Figures:
    low, high = policy.clipped_low.float(), policy.clipped_high.float()
    difference = proximal - tokens.behaviour_log_probs
    ratio, distance = exp_log_ratio(difference), difference.abs()
    values = {
        "entropy": tokens.entropies,
        "kl": kl_estimates(tokens.behaviour_log_probs, tokens.log_probs, "k3"),
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
        f"{RATIO}/mean": ratio,
        f"{DIFFERENCE}/mean": distance,
    }
    return Figures(
        loss=loss,
        sums={name: value.sum() for name, value in {**values, **watched}.items()},
        smallest={f"{RATIO}/min": ratio.min(), "clip_ratio/low_min": sequence_means(low, tokens.lengths).min()},
        largest={
            f"{RATIO}/max": ratio.max(),
            f"{DIFFERENCE}/max": distance.max(),
            "clip_ratio/high_max": sequence_means(high, tokens.lengths).max(),
        },
    )
