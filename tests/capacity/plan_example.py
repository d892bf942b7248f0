"""The configuration that tests of plans and of their plots start from."""

from __future__ import annotations

from echo2.config import Config, load_config

SETTINGS = (
    "batch.groups=32",
    "staleness.bound=4",
    "staleness.publish_interval=2",
    "fleet.workers=26",
    "capacity.learner_step_s=1.0",
    "capacity.group_latency_s=0.8",
    "capacity.group_latency_cv=0.0",
    "capacity.worker_groups_per_s=1.25",
    "capacity.accepted_share=1.0",
    "capacity.transfer_s=2.0",
    "capacity.dissemination_fixed_s=0.0",
)


def example(*overrides: str) -> Config:
    """T = 1, B = 32, L = 0.8, S = 4, κ = 2, D = 2, α = 1, with one slot (1.25 groups/s) for each of 26 workers."""
    return load_config([], [*SETTINGS, *overrides])
