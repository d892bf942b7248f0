"""Random interleavings of lease, post, hand-in, repeat, expiry, evaluation, crash and resume keep the ledger's rules."""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_ledger import Clock

from echo2.capacity.admission import live_group_limit
from echo2.config_evaluation import EvaluationSection
from echo2.hub.database import Database
from echo2.hub.evaluation_groups import FIRST_EVALUATION_GROUP
from echo2.hub.group_book import LedgerRules
from echo2.hub.ledger import Ledger, MemberScore
from echo2.protocol import GroupRollouts, Rollout, decode_rollout

MEMBERS = 2
TOTAL_STEPS = 8
WORKERS = ("a", "b", "c")


def drawn(member, attempt, start, tokens, version, end):
    """Tokens that say which attempt drew them, and their place."""
    return Rollout(
        member,
        np.arange(start, start + tokens, dtype=np.int32) + 1000 * attempt,
        np.full(tokens, -attempt, np.float32),
        np.full(tokens, version, np.int32),
        "length" if end else None,
        start,
    )


class LedgerMachine(RuleBasedStateMachine):
    """A run as the hub sees it; `acknowledged` and `checkpoints` are what the outside world relies on."""

    @initialize(bound=st.integers(0, 3), batch=st.integers(1, 3), every_steps=st.sampled_from([0, 1, 2]))
    def open(self, bound, batch, every_steps):
        self.folder = Path(tempfile.mkdtemp())
        self.clock = Clock()
        evaluation = EvaluationSection(every_steps=every_steps, prompts=2, samples=MEMBERS, temperature=1.0)
        self.rules_of_run = LedgerRules(
            batch, MEMBERS, bound, TOTAL_STEPS, True, lease_timeout_s=60.0, max_attempts=3, evaluation=evaluation
        )
        self.held = {worker: [] for worker in WORKERS}
        self.version_of = dict.fromkeys(WORKERS, 0)
        self.sent = []
        self.handed_in = {}
        self.begun = {}
        self.acknowledged = {}
        self.batches = {}
        self.checkpoints = [0]
        self.reopen()
        self.ledger.announce(0)

    def reopen(self):
        self.database = Database(self.folder / "ledger.db", "run")
        self.ledger = Ledger(self.database, self.rules_of_run, self.clock)

    def teardown(self):
        if hasattr(self, "database"):
            self.database.close()
            shutil.rmtree(self.folder)

    @rule(worker=st.sampled_from(WORKERS), limit=st.integers(1, 4))
    def lease(self, worker, limit):
        version = self.version_of[worker]
        leases = self.ledger.lease(worker, version, limit)
        self.held[worker] += [(lease, version) for lease in leases]
        for lease in leases:
            for member in lease.members:
                prefix = lease.prefixes.get(member, ())
                assert [token % 1000 for token in prefix] == list(range(len(prefix)))
                self.begun[lease.group_id, member, lease.attempt] = len(prefix)
        rules = self.rules_of_run
        limit_of_version = live_group_limit(version, rules.staleness_bound, rules.groups_per_batch, TOTAL_STEPS)
        assert not leases or self.ledger.live_groups() <= limit_of_version

    @rule(worker=st.sampled_from(WORKERS), which=st.integers(0, 9), part=st.booleans())
    def post(self, worker, which, part):
        if not self.held[worker]:
            return
        lease, version = self.held[worker].pop(which % len(self.held[worker]))
        members = lease.members[:1] if part else lease.members
        self._send(worker, self._draw(lease, members, version, tokens=4, end=True))
        if part:
            self.ledger.return_leases(worker, [lease.group_id])

    @rule(worker=st.sampled_from(WORKERS), which=st.integers(0, 9), part=st.booleans(), tokens=st.integers(1, 3))
    def hand_in_what_was_drawn(self, worker, which, part, tokens):
        """The worker goes on, perhaps with a newer version."""
        if self.held[worker]:
            which %= len(self.held[worker])
            lease, version = self.held[worker][which]
            version = max(version, self.version_of[worker])
            self.held[worker][which] = (lease, version)
            self._send(worker, self._draw(lease, lease.members[:1] if part else lease.members, version, tokens, end=False))

    def _draw(self, lease, members, version, tokens, end):
        """What the worker has drawn of these members since it last handed in; of those that it has finished, nothing."""
        rollouts = []
        for member in members:
            place = (lease.group_id, member, lease.attempt)
            start = self.handed_in.get(place, self.begun[place])
            if start is not None:
                rollouts.append(drawn(member, lease.attempt, start, tokens, version, end))
                self.handed_in[place] = None if end else start + tokens
        return GroupRollouts(lease.group_id, lease.attempt, tuple(rollouts))

    @rule(which=st.integers(0, 30))
    def post_again(self, which):
        if self.sent:
            self._send(*self.sent[which % len(self.sent)])

    def _send(self, worker, group):
        self.sent.append((worker, group))
        if self.ledger.post(worker, group) == "accepted" and group.group_id < FIRST_EVALUATION_GROUP:
            assert group.group_id not in self.acknowledged, "a group was accepted twice"
            self.acknowledged[group.group_id] = worker

    @rule(worker=st.sampled_from(WORKERS), which=st.integers(0, 9))
    def hand_back(self, worker, which):
        if self.held[worker]:
            lease, _ = self.held[worker].pop(which % len(self.held[worker]))
            self.ledger.return_leases(worker, [lease.group_id])

    @rule(rewards=st.lists(st.sampled_from([0.0, 1.0, None]), min_size=MEMBERS, max_size=MEMBERS))
    def score(self, rewards):
        for group_id in self.ledger.generated_groups()[:1]:
            self.ledger.record_scores(group_id, [MemberScore(m, r, reason="x") for m, r in enumerate(rewards)])
        self.ledger.evaluations.settle()

    @rule()
    def train(self):
        step = self.ledger.current_step
        if step == TOTAL_STEPS:
            return
        batch = self.ledger.batches.assign(step)
        if batch is None:
            return
        assert len(set(batch)) == self.rules_of_run.groups_per_batch
        assert max(batch) < FIRST_EVALUATION_GROUP, "an evaluation is trained"
        assert self.batches.setdefault(step, batch) == batch, "a replayed step was given another batch"
        for group_id in batch:
            members = self.ledger.rollouts_of(group_id)
            oldest = min(int(m.rollout.versions.min()) for m in members)
            assert 0 <= step - oldest <= self.rules_of_run.staleness_bound
        self.ledger.batches.commit(step, {}, self.checkpoints[0])
        self.ledger.announce(step + 1)

    @rule(worker=st.sampled_from(WORKERS))
    def load_newest(self, worker):
        self.version_of[worker] = self.ledger.current_step

    @rule()
    def save_checkpoint(self):
        self.checkpoints = sorted({*self.checkpoints, self.ledger.current_step})[-2:]

    @rule(seconds=st.sampled_from([1.0, 61.0]))
    def time_passes(self, seconds):
        self.clock.now += seconds
        self.ledger.reopen_overdue()

    @rule(worker=st.sampled_from(WORKERS), other=st.sampled_from(WORKERS), part=st.booleans())
    def overtake(self, worker, other, part):
        """What `worker` holds is overdue and goes to `other`, who hands in of it; `worker` goes on all the same."""
        self.clock.now += 61.0
        self.ledger.reopen_overdue()
        self.lease(other, limit=4)
        for which in range(len(self.held[other])):
            self.hand_in_what_was_drawn(other, which, part, tokens=1)

    @rule(worker=st.sampled_from(WORKERS))
    def lose_worker(self, worker):
        self.ledger.reopen_leases_of(worker)

    @rule()
    def crash_of_the_hub(self):
        """kill −9 drops the connection without closing it; the file is all that is left."""
        abandoned = self.database
        self.reopen()
        abandoned.close()

    @precondition(lambda self: hasattr(self, "ledger"))
    @rule(newest=st.booleans())
    def crash_of_the_learner(self, newest):
        version = self.checkpoints[-1] if newest else self.checkpoints[0]
        self.checkpoints = [c for c in self.checkpoints if c <= version]
        self.ledger.batches.resume(version)
        self.version_of = {worker: min(held, version) for worker, held in self.version_of.items()}

    @invariant()
    def counts_add_up(self):
        if not hasattr(self, "ledger"):
            return
        db = self.database
        total = db.value("SELECT COUNT(*) FROM groups WHERE evaluation IS NULL")
        newest = db.value("SELECT MAX(group_id) + 1 FROM groups WHERE evaluation IS NULL")
        assert total == newest, "a prompt was skipped"
        trained = db.value("SELECT COUNT(*) FROM groups WHERE state = 'trained'")
        assert trained == self.ledger.current_step * self.rules_of_run.groups_per_batch
        dropped = db.value(
            "SELECT COUNT(*) FROM groups WHERE state IN ('filtered', 'expired', 'failed') AND evaluation IS NULL"
        )
        assert self.ledger.live_groups() == total - dropped

    @invariant()
    def an_evaluation_is_whole_and_of_a_version_that_stands(self):
        if not hasattr(self, "ledger"):
            return
        db = self.database
        open_ones = db.rows("SELECT version FROM evaluations WHERE figures IS NULL")
        assert len(open_ones) <= 1
        for row in db.rows("SELECT * FROM evaluations"):
            assert row["version"] <= self.ledger.current_step
            states = [r["state"] for r in db.rows("SELECT state FROM groups WHERE evaluation = ?", row["version"])]
            assert len(states) == 2 and "expired" not in states
            if row["figures"] is not None:
                figures = json.loads(row["figures"])
                assert states.count("evaluated") == figures["eval/prompts"]
                assert states.count("failed") == figures["eval/failed_prompts"]

    @invariant()
    def acknowledged_groups_are_there(self):
        for group_id in getattr(self, "acknowledged", {}):
            row = self.database.row("SELECT state FROM groups WHERE group_id = ?", group_id)
            assert row["state"] != "leased"
            if row["state"] in ("generated", "ready"):
                assert self.ledger.rollouts_of(group_id)

    @invariant()
    def members_are_made_of_parts_that_follow_each_other(self):
        if not hasattr(self, "ledger"):
            return
        db = self.database
        for row in db.rows("SELECT * FROM rollouts WHERE payload IS NOT NULL"):
            whole = decode_rollout(row["payload"])
            attempts = whole.token_ids // 1000
            assert (whole.token_ids % 1000).tolist() == list(range(len(whole.token_ids)))
            assert (np.diff(attempts) >= 0).all() and attempts[-1] == row["attempt"]
            assert (whole.log_probs == -attempts).all()
            assert (row["oldest_version"], row["newest_version"]) == (whole.versions.min(), whole.versions.max())
            for attempt in set(attempts.tolist()):
                assert np.argmax(attempts == attempt) == self.begun[row["group_id"], row["member"], attempt]
        for row in db.rows("SELECT groups.tokens AS tokens, group_id FROM groups"):
            kept = db.value("SELECT SUM(tokens) FROM attempts WHERE group_id = ?", row["group_id"])
            assert row["tokens"] == kept, "tokens do not add up"

    @invariant()
    def only_members_that_are_missing_have_parts(self):
        if hasattr(self, "ledger"):
            for row in self.database.rows("SELECT * FROM parts JOIN groups USING (group_id)"):
                assert row["state"] == "leased" and row["start"] >= 0
                assert row["member"] in self.ledger._book.missing_members(row["group_id"])

    @invariant()
    def nothing_stale_is_trained(self):
        if hasattr(self, "ledger"):
            worst = self.database.value("SELECT MAX(step - oldest_version) FROM groups WHERE state = 'trained'")
            assert worst <= self.rules_of_run.staleness_bound


LedgerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLedgerInterleavings = LedgerMachine.TestCase
