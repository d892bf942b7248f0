"""The admission rule, alone and in a small pipeline that obeys it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.capacity.admission import admissible_groups, is_stale, live_group_limit, oldest_trainable_version

seeded = settings(derandomize=True, deadline=None)


def test_limit_counts_the_batches_that_a_version_may_still_serve() -> None:
    assert live_group_limit(worker_version=0, bound=0, groups_per_batch=8, total_steps=10) == 8
    assert live_group_limit(worker_version=4, bound=2, groups_per_batch=8, total_steps=10) == 56


def test_limit_ends_with_the_run() -> None:
    assert live_group_limit(worker_version=9, bound=5, groups_per_batch=8, total_steps=10) == 80


def test_a_worker_whose_version_lags_gets_nothing_until_it_has_a_newer_one() -> None:
    assert admissible_groups(live_groups=24, worker_version=0, bound=2, groups_per_batch=8, total_steps=10) == 0
    assert admissible_groups(live_groups=24, worker_version=1, bound=2, groups_per_batch=8, total_steps=10) == 8


def test_more_live_groups_than_the_limit_admit_none_rather_than_a_negative_number() -> None:
    assert admissible_groups(live_groups=40, worker_version=0, bound=2, groups_per_batch=8, total_steps=10) == 0


@pytest.mark.parametrize(("version", "stale"), [(2, True), (3, False), (4, False), (5, False)])
def test_a_group_is_stale_below_the_oldest_trainable_version(version: int, stale: bool) -> None:
    assert oldest_trainable_version(step=5, bound=2) == 3
    assert is_stale(version, step=5, bound=2) is stale


@seeded
@given(
    seed=st.integers(0, 2**32 - 1),
    bound=st.integers(0, 5),
    groups_per_batch=st.integers(1, 6),
    total_steps=st.integers(1, 12),
)
def test_groups_scored_at_once_are_never_stale_and_the_run_ends_with_none_left(
    seed: int, bound: int, groups_per_batch: int, total_steps: int
) -> None:
    """Workers lag behind the learner as they like and a third of the groups is dropped; only admission holds them back."""
    rng = random.Random(seed)
    step, live, ready = 0, 0, []
    while step < total_steps:
        worker_version = rng.randint(max(0, step - bound), step)
        room = admissible_groups(live, worker_version, bound, groups_per_batch, total_steps)
        for _ in range(rng.randint(0, room)):
            live += 1
            if rng.random() < 1 / 3:
                live -= 1
            else:
                ready.append(worker_version)
        ready.sort()
        if len(ready) >= groups_per_batch and rng.random() < 0.5:
            batch, ready = ready[:groups_per_batch], ready[groups_per_batch:]
            assert not any(is_stale(version, step, bound) for version in batch)
            step += 1
    assert ready == []
