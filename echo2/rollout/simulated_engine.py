"""Generation that takes its time and nothing else: for rehearsals without a model.

Invariants: leases go on side by side, and each group is yielded once its latency is over; how long a group takes depends on
(run seed, group) and what comes out on (run seed, group, member) alone; completions are made of their prompt's own tokens, so
that every one of them can be decoded and scored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from echo2.dissemination.manifest import Content
from echo2.protocol import GroupRollouts, Lease, Rollout, Sampling
from echo2.rollout.engine import Engine
from echo2.rollout.randomness import member_generator

LONGEST_NAP_S = 0.02
LATENCY_STREAM = 2**63
"""Stands where the member's number does when a group's latency is drawn; no member has it."""


class SimulatedEngine(Engine):
    """Random completions after a lognormal time of mean `group_latency_s`, coefficient of variation `latency_cv`."""

    def __init__(self, group_latency_s: float, latency_cv: float = 0.0) -> None:
        self._group_latency_s = group_latency_s
        self._log_variance = math.log1p(latency_cv * latency_cv)

    def load_weights(self, snapshot: Content, version: int) -> None:
        """Takes note of the version; the bytes may be anything."""
        self.version = version

    def generate(self, leases: Sequence[Lease], sampling: Sampling, should_stop: Callable[[], bool]) -> Iterator[GroupRollouts]:
        """As `Engine.generate`; stopped, it leaves the groups whose latency is not over.

        Raises RuntimeError before the first `load_weights`.
        """
        began_s = time.monotonic()
        if self.version is None:
            raise RuntimeError("generate was called before load_weights: there is no version to generate with")
        latencies_s = [self.latency_s(sampling.seed, lease.group_id) for lease in leases]
        for latency_s, lease in sorted(zip(latencies_s, leases, strict=True), key=lambda pair: pair[0]):
            rollouts = tuple(_rollout(lease, member, sampling, self.version) for member in lease.members)
            while (left_s := began_s + latency_s - time.monotonic()) > 0:
                if should_stop():
                    return
                time.sleep(min(left_s, LONGEST_NAP_S))
            yield GroupRollouts(lease.group_id, lease.attempt, rollouts)

    def latency_s(self, seed: int, group_id: int) -> float:
        """How long the group takes, at whichever attempt: lognormal, σ² = ln(1 + cv²), mean exp(µ + σ²/2)."""
        gauss = member_generator(seed, group_id, LATENCY_STREAM).standard_normal()
        return self._group_latency_s * math.exp(math.sqrt(self._log_variance) * gauss - self._log_variance / 2)


def _rollout(lease: Lease, member: int, sampling: Sampling, version: int) -> Rollout:
    """A completion of random length; one that is shorter than the longest ends with a stop token, if there is any."""
    generator = member_generator(sampling.seed, lease.group_id, member)
    length = int(generator.integers(1, sampling.max_completion_tokens, endpoint=True))
    token_ids = generator.choice(lease.prompt_token_ids, length).astype(np.int32)
    stops = bool(sampling.stop_token_ids) and length < sampling.max_completion_tokens
    if stops:
        token_ids[-1] = sampling.stop_token_ids[0]
    log_probs = np.full(length, -1.0, np.float32)
    return Rollout(member, token_ids, log_probs, np.full(length, version, np.int32), "stop" if stops else "length")
