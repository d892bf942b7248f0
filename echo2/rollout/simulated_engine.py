"""Generation that takes its time and nothing else: for rehearsals without a model.

Invariants: every group takes the configured latency, all leases side by side; what comes out depends on (run seed, group,
member) alone; completions are made of their prompt's own tokens, so that every one of them can be decoded and scored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from echo2.protocol import GroupRollouts, Lease, Rollout, Sampling
from echo2.rollout.engine import Engine
from echo2.rollout.randomness import member_generator

LONGEST_NAP_S = 0.02


class SimulatedEngine(Engine):
    """Random completions after `group_latency_s`; any snapshot will do."""

    def __init__(self, group_latency_s: float) -> None:
        self._group_latency_s = group_latency_s

    def load_weights(self, snapshot: bytes, version: int) -> None:
        """Takes note of the version; the bytes may be anything."""
        self.version = version

    def generate(self, leases: Sequence[Lease], sampling: Sampling, should_stop: Callable[[], bool]) -> Iterator[GroupRollouts]:
        """As `Engine.generate`; stopped before the latency is over, it leaves all groups.

        Raises RuntimeError before the first `load_weights`.
        """
        if self.version is None:
            raise RuntimeError("generate was called before load_weights: there is no version to generate with")
        end_s = time.monotonic() + self._group_latency_s
        while (left_s := end_s - time.monotonic()) > 0:
            if should_stop():
                return
            time.sleep(min(left_s, LONGEST_NAP_S))
        for lease in leases:
            rollouts = tuple(_rollout(lease, member, sampling, self.version) for member in lease.members)
            yield GroupRollouts(lease.group_id, lease.attempt, rollouts)


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
