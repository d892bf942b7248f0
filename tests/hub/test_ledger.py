"""The ledger's rules, each by hand; `test_ledger_interleavings.py` drives them at random."""

import numpy as np
import pytest

from echo2.errors import UserError
from echo2.hub.database import Database
from echo2.hub.group_book import LedgerRules
from echo2.hub.ledger import Ledger, MemberScore
from echo2.hub.statistics import Statistics
from echo2.protocol import BodyError, GroupRollouts, Rollout, RolloutFailure

RULES = LedgerRules(
    groups_per_batch=2,
    members=3,
    staleness_bound=1,
    total_steps=10,
    drop_zero_variance=True,
    lease_timeout_s=60.0,
    max_attempts=2,
)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def rollout(member, version=0, tokens=4):
    return Rollout(
        member,
        np.arange(1, tokens + 1, dtype=np.int32),
        np.full(tokens, -0.5, np.float32),
        np.full(tokens, version, np.int32),
        "stop",
    )


def whole_group(lease, version=0):
    return GroupRollouts(lease.group_id, lease.attempt, tuple(rollout(m, version) for m in lease.members))


def scores(*rewards):
    return [MemberScore(m, r, {"exact_match": float(r == 1)} if r is not None else {}) for m, r in enumerate(rewards)]


@pytest.fixture
def ledger(tmp_path, clock):
    database = Database(tmp_path / "ledger.db", "run-1")
    made = Ledger(database, RULES, clock)
    made.announce(0)
    yield made
    database.close()


def generate_and_score(ledger, worker="w", version=0, count=2, rewards=(0.0, 1.0, 0.5)):
    leases = ledger.lease(worker, version, count)
    for lease in leases:
        assert ledger.post(worker, whole_group(lease, version)) == "accepted"
        ledger.record_scores(lease.group_id, scores(*rewards))
    return [lease.group_id for lease in leases]


def test_admission_stops_at_version_credit(ledger):
    assert len(ledger.lease("w", 0, 100)) == (0 + 1 + 1) * 2
    assert ledger.lease("w", 0, 100) == []


def test_a_filtered_group_makes_room_for_another(ledger):
    leases = ledger.lease("w", 0, 100)
    ledger.post("w", whole_group(leases[0]))
    ledger.record_scores(leases[0].group_id, scores(1.0, 1.0, 1.0))
    assert [lease.group_id for lease in ledger.lease("w", 0, 100)] == [4]


def test_the_same_rollout_posted_twice_counts_once(ledger):
    lease = ledger.lease("w", 0, 1)[0]
    assert ledger.post("w", whole_group(lease)) == "accepted"
    assert ledger.post("w", whole_group(lease)) == "duplicate"
    assert len(ledger.rollouts_of(lease.group_id)) == 3


def test_a_late_attempt_after_another_one_won_counts_as_waste_not_as_data(ledger, clock):
    first = ledger.lease("slow", 0, 1)[0]
    clock.now += 61
    second = ledger.lease("quick", 0, 1)[0]
    assert (second.group_id, second.attempt) == (first.group_id, 2)
    assert ledger.post("quick", whole_group(second)) == "accepted"
    assert ledger.post("slow", whole_group(first)) == "late"
    assert {m.worker_id for m in ledger.rollouts_of(first.group_id)} == {"quick"}


def test_an_overdue_attempt_that_comes_before_the_next_one_is_taken(ledger, clock):
    first = ledger.lease("slow", 0, 1)[0]
    clock.now += 61
    second = ledger.lease("quick", 0, 1)[0]
    assert ledger.post("slow", whole_group(first)) == "accepted"
    assert ledger.post("quick", whole_group(second)) == "late"


def test_a_group_too_old_for_the_next_step_is_stale_and_one_just_young_enough_is_not(ledger):
    held = ledger.lease("w", 0, 2)
    generate_and_score(ledger, "v")
    ledger.batches.assign(0)
    ledger.batches.commit(0, {}, 0)
    assert ledger.post("w", whole_group(held[0], version=0)) == "accepted"  # step 1, version 0, S = 1
    ledger.announce(1)
    generate_and_score(ledger, "v", version=1, count=2)
    ledger.batches.assign(1)
    ledger.batches.commit(1, {}, 0)
    assert ledger.post("w", whole_group(held[1], version=0)) == "stale"


def test_failed_members_are_missing_and_not_zero(ledger):
    lease = ledger.lease("w", 0, 1)[0]
    part = GroupRollouts(lease.group_id, lease.attempt, (rollout(0), rollout(2)), (RolloutFailure(member=1, reason="engine"),))
    assert ledger.post("w", part) == "accepted"
    assert [m.rollout.member for m in ledger.rollouts_of(lease.group_id)] == [0, 2]
    ledger.record_scores(lease.group_id, [MemberScore(0, 1.0), MemberScore(2, 0.0)])
    assert ledger.batches.scored_means(0) == {"groups": 0, "filtered": 0}
    generate_and_score(ledger, count=1)
    ledger.batches.assign(0)
    assert ledger.batches.scored_means(0)["reward"] == pytest.approx((0.5 + 0.5) / 2)


def test_a_group_whose_members_all_fail_is_tried_again_and_then_given_up(ledger):
    for attempt in (1, 2):
        lease = ledger.lease("w", 0, 1)[0]
        assert (lease.group_id, lease.attempt, lease.members) == (0, attempt, (0, 1, 2))
        failures = tuple(RolloutFailure(member=m, reason="out of memory") for m in range(3))
        ledger.post("w", GroupRollouts(0, attempt, (), failures))
    assert ledger.lease("w", 0, 1)[0].group_id == 1


def test_a_score_that_failed_leaves_its_member_out(ledger):
    lease = ledger.lease("w", 0, 1)[0]
    ledger.post("w", whole_group(lease))
    ledger.record_scores(lease.group_id, [MemberScore(0, 1.0), MemberScore(1, None, reason="raised"), MemberScore(2, 0.0)])
    rewards = [m.reward for m in ledger.rollouts_of(lease.group_id)]
    assert rewards[0] == 1.0 and np.isnan(rewards[1]) and rewards[2] == 0.0


def test_handed_in_members_are_kept_and_only_the_rest_is_leased_again(ledger):
    lease = ledger.lease("w", 0, 1)[0]
    assert ledger.post("w", GroupRollouts(lease.group_id, lease.attempt, (rollout(1),))) == "part"
    assert ledger.return_leases("w", [lease.group_id]) == 1
    again = ledger.lease("v", 0, 1)[0]
    assert (again.group_id, again.members) == (lease.group_id, (0, 2))
    assert ledger.post("v", whole_group(again)) == "accepted"
    assert [m.worker_id for m in ledger.rollouts_of(lease.group_id)] == ["v", "w", "v"]
    outcomes = [r["outcome"] for r in ledger._db.rows("SELECT outcome FROM attempts ORDER BY attempt")]
    assert outcomes == ["part", "posted"]


def hand_in(ledger, worker, lease, *parts):
    return ledger.post(worker, GroupRollouts(lease.group_id, lease.attempt, parts))


def part(member, start, tokens, version=0, end=False, log_prob=-0.5):
    """Tokens that say their place."""
    return Rollout(
        member,
        np.arange(start, start + tokens, dtype=np.int32),
        np.full(tokens, log_prob, np.float32),
        np.full(tokens, version, np.int32),
        "stop" if end else None,
        start,
    )


def test_what_was_handed_in_is_gone_on_from_with_its_log_probs_and_versions(ledger):
    first = ledger.lease("w", 0, 1)[0]
    assert hand_in(ledger, "w", first, part(0, 0, 5, log_prob=-1.0), part(1, 0, 3, end=True)) == "part"
    assert hand_in(ledger, "w", first, part(0, 5, 2, log_prob=-2.0), part(2, 0, 4)) == "part"
    ledger.reopen_leases_of("w")
    ledger.announce(1)
    second = ledger.lease("v", 1, 1)[0]
    assert (second.members, second.prefixes) == ((0, 2), {0: tuple(range(7)), 2: tuple(range(4))})
    assert hand_in(ledger, "v", second, part(0, 7, 3, version=1, end=True), part(2, 4, 1, version=1, end=True)) == "accepted"
    members = {m.rollout.member: m.rollout for m in ledger.rollouts_of(first.group_id)}
    assert members[0].token_ids.tolist() == list(range(10))
    assert members[0].log_probs.tolist() == [-1.0] * 5 + [-2.0] * 2 + [-0.5] * 3
    assert members[0].versions.tolist() == [0] * 7 + [1] * 3
    assert (members[0].start, members[0].finish_reason) == (0, "stop")
    assert [len(members[m].token_ids) for m in range(3)] == [10, 3, 5]
    row = ledger._db.row("SELECT * FROM groups WHERE group_id = ?", first.group_id)
    assert (row["oldest_version"], row["tokens"]) == (0, 18)
    kept = [(r["tokens"], r["wasted_tokens"], r["outcome"]) for r in ledger._db.rows("SELECT * FROM attempts ORDER BY attempt")]
    assert kept == [(14, 0, "lost"), (4, 0, "posted")]
    assert ledger._db.value("SELECT COUNT(*) FROM parts") == 0


def test_a_part_that_is_sent_again_counts_once(ledger):
    lease = ledger.lease("w", 0, 1)[0]
    for _ in range(2):
        assert hand_in(ledger, "w", lease, part(0, 0, 5)) == "part"
    assert hand_in(ledger, "w", lease, part(0, 3, 4)) == "part"
    ledger.return_leases("w", [lease.group_id])
    assert ledger.lease("v", 0, 1)[0].prefixes == {0: tuple(range(7))}
    assert ledger._db.value("SELECT tokens FROM groups") == 7
    assert ledger._db.value("SELECT SUM(wasted_tokens) FROM attempts") == 0


def test_handing_in_keeps_the_lease(ledger, clock):
    lease = ledger.lease("w", 0, 1)[0]
    for number in range(5):
        clock.now += 50
        assert hand_in(ledger, "w", lease, part(0, number, 1)) == "part"
        assert ledger.reopen_overdue() == 0
    clock.now += 61
    assert ledger.reopen_overdue() == 1


def test_an_overtaken_attempt_adds_no_parts_but_may_bring_the_end_first(ledger, clock):
    slow = ledger.lease("slow", 0, 1)[0]
    assert hand_in(ledger, "slow", slow, part(0, 0, 4), part(1, 0, 2), part(2, 0, 2)) == "part"
    clock.now += 61
    quick = ledger.lease("quick", 0, 1)[0]
    assert hand_in(ledger, "slow", slow, part(0, 4, 3)) == "late"
    assert hand_in(ledger, "quick", quick, part(0, 4, 1)) == "part"
    # Of member 0 the newer attempt has gone on; member 1 is as the older one left it.
    assert hand_in(ledger, "slow", slow, part(0, 4, 9, end=True), part(1, 2, 9, end=True)) == "part"
    assert (
        hand_in(ledger, "quick", quick, part(0, 5, 1, end=True), part(1, 2, 3, end=True), part(2, 2, 1, end=True)) == "accepted"
    )
    assert [len(m.rollout.token_ids) for m in ledger.rollouts_of(slow.group_id)] == [6, 11, 3]
    counts = [(r["tokens"], r["wasted_tokens"]) for r in ledger._db.rows("SELECT * FROM attempts ORDER BY attempt")]
    assert counts == [(8 + 9, 3 + 9), (3, 3)]
    assert Statistics(ledger._db).wasted_tokens() == {"late": 15}


def test_a_gap_is_never_filled_with_nothing(ledger):
    lease = ledger.lease("w", 0, 1)[0]
    assert hand_in(ledger, "w", lease, part(0, 0, 2)) == "part"
    assert hand_in(ledger, "w", lease, part(0, 3, 2), part(1, 1, 2, end=True)) == "part"
    ledger.return_leases("w", [lease.group_id])
    again = ledger.lease("v", 0, 1)[0]
    assert (again.members, again.prefixes) == ((0, 1, 2), {0: (0, 1)})


def test_a_member_that_failed_leaves_its_parts_as_waste(ledger):
    lease = ledger.lease("w", 0, 1)[0]
    hand_in(ledger, "w", lease, part(0, 0, 6), part(1, 0, 2, end=True), part(2, 0, 2, end=True))
    failed = GroupRollouts(lease.group_id, lease.attempt, (), (RolloutFailure(member=0, reason="engine"),))
    assert ledger.post("w", failed) == "accepted"
    assert ledger.generated_groups() == [lease.group_id]
    row = ledger._db.row("SELECT * FROM attempts")
    assert (row["tokens"], row["wasted_tokens"]) == (4, 6)
    assert ledger._db.value("SELECT tokens FROM groups") == 4


def test_a_prefix_that_grew_too_old_takes_its_group_along(ledger):
    held = ledger.lease("w", 0, 1)[0]
    hand_in(ledger, "w", held, part(0, 0, 6, version=0))
    for step in range(2):
        ledger.announce(step)
        generate_and_score(ledger, "v", version=step)
        ledger.batches.assign(step)
        ledger.batches.commit(step, {}, 0)
    assert hand_in(ledger, "w", held, part(0, 6, 2, version=1)) == "stale"
    assert Statistics(ledger._db).wasted_tokens() == {"stale": 2, "expired": 6}
    assert ledger._db.value("SELECT COUNT(*) FROM parts") == 0


def test_returned_leases_do_not_count_against_the_group(ledger):
    for _ in range(5):
        lease = ledger.lease("w", 0, 1)[0]
        assert lease.group_id == 0
        assert ledger.return_leases("w", [0]) == 1


@pytest.mark.parametrize(
    "change",
    [{"member": 3}, {"version": 1}],
    ids=["member out of range", "version that was never announced"],
)
def test_impossible_posts_are_refused_and_change_nothing(ledger, change):
    lease = ledger.lease("w", 0, 1)[0]
    bad = rollout(change.get("member", 0), change.get("version", 0))
    with pytest.raises(BodyError):
        ledger.post("w", GroupRollouts(lease.group_id, lease.attempt, (bad,)))
    with pytest.raises(BodyError, match="never leased"):
        ledger.post("someone else", whole_group(lease))
    assert ledger.post("w", whole_group(lease)) == "accepted"


def test_a_batch_is_assigned_once_and_asked_for_again_is_the_same(ledger):
    generate_and_score(ledger, count=4)
    assert ledger.batches.assign(0) == ledger.batches.assign(0) == [0, 1]


def test_the_oldest_version_is_taken_first(ledger):
    early = ledger.lease("w", 0, 2)
    generate_and_score(ledger, "v", count=2)
    ledger.batches.assign(0)
    ledger.batches.commit(0, {}, 0)
    ledger.announce(1)
    young = generate_and_score(ledger, "v", version=1, count=1)
    for lease in early:
        ledger.post("w", whole_group(lease))
        ledger.record_scores(lease.group_id, scores(0.0, 1.0, 0.0))
    assert ledger.batches.assign(1) == [lease.group_id for lease in early]
    assert young[0] not in ledger.batches.assign(1)


def test_resume_gives_the_replayed_steps_the_same_batches(ledger):
    batches = []
    for step in range(3):
        ledger.announce(step)
        generate_and_score(ledger, version=step, count=2)
        batches.append(ledger.batches.assign(step))
        ledger.batches.commit(step, {}, oldest_checkpoint=1)
    assert ledger.batches.resume(1) == 2
    assert ledger.current_step == 1
    for step in (1, 2):
        assert ledger.batches.assign(step) == batches[step]
        assert all(len(ledger.rollouts_of(g)) == 3 for g in batches[step])
        ledger.batches.commit(step, {}, oldest_checkpoint=1)


def test_resume_before_the_oldest_kept_checkpoint_is_refused(ledger):
    for step in range(3):
        ledger.announce(step)
        generate_and_score(ledger, version=step, count=2)
        ledger.batches.assign(step)
        ledger.batches.commit(step, {}, oldest_checkpoint=step)
    with pytest.raises(UserError, match="no longer kept"):
        ledger.batches.resume(0)
    with pytest.raises(UserError, match="only knows 3 steps"):
        ledger.batches.resume(4)


def test_no_more_groups_are_live_than_the_run_has_steps_for(tmp_path, clock):
    rules = LedgerRules(2, 3, staleness_bound=6, total_steps=1, drop_zero_variance=True, lease_timeout_s=60.0, max_attempts=2)
    ledger = Ledger(Database(tmp_path / "short.db", "run-1"), rules, clock)
    ledger.announce(0)
    assert len(ledger.lease("w", 0, 100)) == 2


def test_a_ledger_of_another_run_is_refused(tmp_path):
    Database(tmp_path / "ledger.db", "run-1").close()
    with pytest.raises(UserError, match="belongs to run run-1"):
        Database(tmp_path / "ledger.db", "run-2")
