"""The simulated engine's time and completions, and the choice of an engine."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from echo2.config import Config
from echo2.config_sections import WorkerSection
from echo2.errors import ConfigError
from echo2.protocol import GroupRollouts, Lease, Sampling, decode_group, encode_group
from echo2.rollout.engines import make_engine
from echo2.rollout.simulated_engine import SimulatedEngine

LEASES = [
    Lease(group_id=group, attempt=1, members=(0, 1, 2, 5), prompt_token_ids=(10, 11, 12 + group), timeout_s=10)
    for group in range(6)
]
SAMPLING = Sampling(temperature=1.0, max_completion_tokens=8, stop_token_ids=(2,), seed=1)


def make_simulated(group_latency_s: float, latency_cv: float = 0.0) -> SimulatedEngine:
    engine = SimulatedEngine(group_latency_s, latency_cv)
    engine.load_weights(b"anything", 3)
    return engine


def simulate(engine: SimulatedEngine, sampling: Sampling = SAMPLING) -> list[GroupRollouts]:
    return list(engine.generate(LEASES, sampling, lambda: False))


def tokens(groups: list[GroupRollouts]) -> list[list[int]]:
    return [rollout.token_ids.tolist() for group in groups for rollout in group.rollouts]


def test_all_leases_take_the_latency_side_by_side() -> None:
    start_s = time.monotonic()
    groups = simulate(make_simulated(0.5))
    assert 0.5 <= time.monotonic() - start_s < 0.5 * len(LEASES)
    assert [group.group_id for group in groups] == [0, 1, 2, 3, 4, 5]


def test_stopping_ends_the_wait_and_leaves_all_groups() -> None:
    start_s = time.monotonic()
    stopped = list(make_simulated(60.0).generate(LEASES, SAMPLING, lambda: time.monotonic() - start_s > 0.1))
    assert stopped == []
    assert time.monotonic() - start_s < 30.0


def test_each_group_is_yielded_when_its_own_latency_is_over() -> None:
    engine = make_simulated(0.2, latency_cv=0.8)
    start_s = time.monotonic()
    ends_s = {group.group_id: time.monotonic() - start_s for group in engine.generate(LEASES, SAMPLING, lambda: False)}
    latencies_s = {group_id: engine.latency_s(SAMPLING.seed, group_id) for group_id in ends_s}
    assert list(ends_s) == sorted(latencies_s, key=latencies_s.__getitem__) != sorted(latencies_s)
    assert all(latencies_s[group_id] <= end_s < latencies_s[group_id] + 0.2 for group_id, end_s in ends_s.items())


def test_stopping_leaves_only_the_groups_whose_latency_is_not_over() -> None:
    engine = make_simulated(0.2, latency_cv=0.8)
    latencies_s = sorted(engine.latency_s(SAMPLING.seed, lease.group_id) for lease in LEASES)
    middle_s = (latencies_s[2] + latencies_s[3]) / 2
    start_s = time.monotonic()
    finished = list(engine.generate(LEASES, SAMPLING, lambda: time.monotonic() - start_s > middle_s))
    assert len(finished) == 3


def test_latencies_are_lognormal_and_depend_on_seed_and_group_alone() -> None:
    engine = SimulatedEngine(2.0, latency_cv=0.5)
    draws_s = np.array([engine.latency_s(1, group_id) for group_id in range(20_000)])
    assert draws_s.mean() == pytest.approx(2.0, rel=0.02)
    assert draws_s.std() / draws_s.mean() == pytest.approx(0.5, rel=0.03)
    assert np.median(draws_s) == pytest.approx(2.0 / 1.25**0.5, rel=0.02)
    assert SimulatedEngine(2.0, latency_cv=0.5).latency_s(1, 7) == draws_s[7] != engine.latency_s(2, 7)
    assert {SimulatedEngine(2.0).latency_s(1, group_id) for group_id in range(5)} == {2.0}


def test_completions_are_plausible_and_cross_the_wire() -> None:
    groups = [decode_group(encode_group(group)) for group in simulate(make_simulated(0.0))]
    reasons = set()
    for lease, group in zip(LEASES, groups, strict=True):
        assert [rollout.member for rollout in group.rollouts] == [0, 1, 2, 5]
        for rollout in group.rollouts:
            reasons.add(rollout.finish_reason)
            body = rollout.token_ids[:-1] if rollout.finish_reason == "stop" else rollout.token_ids
            assert set(body.tolist()) <= set(lease.prompt_token_ids)
            assert (rollout.token_ids[-1] == 2) == (rollout.finish_reason == "stop")
            assert 1 <= len(rollout.token_ids) <= 8
            assert set(rollout.versions.tolist()) == {3}
            assert set(rollout.log_probs.tolist()) == {-1.0}
    assert reasons == {"stop", "length"}


def test_completions_depend_on_seed_group_and_member_alone() -> None:
    groups = simulate(make_simulated(0.0))
    assert tokens(groups) == tokens(simulate(make_simulated(0.1)))
    assert tokens(groups) != tokens(simulate(make_simulated(0.0), SAMPLING.model_copy(update={"seed": 2})))
    assert len({tuple(completion) for completion in tokens(groups)}) > 12


def test_generating_before_the_first_load_is_refused() -> None:
    with pytest.raises(RuntimeError, match="load_weights"):
        simulate(SimulatedEngine(0.0))


def test_the_configured_engine_is_made() -> None:
    config = Config(worker=WorkerSection(engine="simulated", simulated_group_latency_s=0.01, simulated_latency_cv=0.3))
    engine = make_engine(config, None)
    assert engine.latency_s(0, 1) != engine.latency_s(0, 2)
    engine.load_weights(b"anything", 0)
    assert len(list(engine.generate(LEASES, SAMPLING, lambda: False))) == 6


def test_an_engine_that_needs_a_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'transformers' needs a model folder"):
        make_engine(Config(), None)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        make_engine(Config(), tmp_path)


def test_simulating_needs_no_torch() -> None:
    program = (
        "import sys; from echo2.config import Config, WorkerSection; from echo2.rollout.engines import make_engine; "
        "make_engine(Config(worker=WorkerSection(engine='simulated')), None); "
        "import echo2.dissemination.receiver, echo2.dissemination.store; "
        "sys.exit('torch' in sys.modules or 'httpx' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
