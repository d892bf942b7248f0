"""Admission: when a worker may be given a new lease, so that nothing is generated to be thrown away.

Invariants: pure integer arithmetic, one rule for the hub and for every simulation of it. If leases are given by this rule, if
every group is scored at once and if the learner takes the oldest version first, no group is ever stale; a slower group is
stale only when it outlasts the slack that was left.
"""

from __future__ import annotations


def live_group_limit(worker_version: int, bound: int, groups_per_batch: int, total_steps: int) -> int:
    """Live groups up to which a worker that holds `worker_version` may add one: min(v + S + 1, total steps) · B.

    A live group is one that was ever leased in the run and not dropped (filtered, expired or failed); trained groups stay live.

    Version 3 may still serve steps 3 to 5 when S = 2, so all groups of steps 0 to 5 may be live:

    >>> live_group_limit(worker_version=3, bound=2, groups_per_batch=32, total_steps=100)
    192

    The run's last step bounds it too:

    >>> live_group_limit(worker_version=99, bound=2, groups_per_batch=32, total_steps=100)
    3200
    """
    return min(worker_version + bound + 1, total_steps) * groups_per_batch


def admissible_groups(live_groups: int, worker_version: int, bound: int, groups_per_batch: int, total_steps: int) -> int:
    """New leases (≥ 0) that a worker holding `worker_version` may be given while `live_groups` are live.

    >>> admissible_groups(live_groups=190, worker_version=3, bound=2, groups_per_batch=32, total_steps=100)
    2
    >>> admissible_groups(live_groups=192, worker_version=2, bound=2, groups_per_batch=32, total_steps=100)
    0
    """
    return max(0, live_group_limit(worker_version, bound, groups_per_batch, total_steps) - live_groups)


def oldest_trainable_version(step: int, bound: int) -> int:
    """Oldest version whose groups `step` may train: t − S; negative while every version is young enough.

    >>> oldest_trainable_version(step=5, bound=2)
    3
    """
    return step - bound


def is_stale(version: int, step: int, bound: int) -> bool:
    """Whether a group whose oldest token is of `version` is too old for `step`: t − v > S.

    >>> is_stale(version=3, step=5, bound=2), is_stale(version=2, step=5, bound=2)
    (False, True)
    """
    return version < oldest_trainable_version(step, bound)
