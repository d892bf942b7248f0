"""The hub's status in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest


def render_metrics(status: Mapping[str, Any]) -> tuple[bytes, str]:
    """Body and media type for a scrape; `status` is what `/v1/status` gives."""
    registry = CollectorRegistry()

    def gauge(name: str, meaning: str, value: float) -> None:
        Gauge(f"echo2_{name}", meaning, registry=registry).set(value)

    gauge("step", "Learner step that is being gathered or trained", status["step"])
    gauge("version", "Newest version announced", status["version"])
    gauge("workers_live", "Workers that send heartbeats", status["workers_live"])
    gauge("rollouts_per_second", "Members scored per second over the last half minute", status["rollouts_per_s"])
    gauge("cost_usd", "Money spent on workers so far", status["cost_usd"])
    groups = Gauge("echo2_groups", "Groups by state", ["state"], registry=registry)
    for state, count in status["groups"].items():
        groups.labels(state).set(count)
    wasted = Gauge("echo2_wasted_tokens", "Tokens generated and not trained, by cause", ["cause"], registry=registry)
    for cause, tokens in status["wasted_tokens"].items():
        wasted.labels(cause).set(tokens)
    learner = Gauge("echo2_learner", "Metrics of the last learner step", ["name"], registry=registry)
    for name, value in status["last_step"].items():
        learner.labels(name).set(value)
    return generate_latest(registry), CONTENT_TYPE_LATEST
