"""What the ledger says about the capacity model's terms, and the plan that is made of it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from echo2.capacity.calibration import calibrate
from echo2.hub.database import Database
from echo2.hub.group_book import rules_of
from echo2.hub.inspection import observe_run
from echo2.hub.ledger import Ledger, MemberScore
from echo2.hub.roster import Roster
from echo2.hub.statistics import Statistics
from echo2.protocol import GroupRollouts, Rollout, Telemetry

REPOSITORY = Path(__file__).parent.parent.parent
STEP_S, CALL_S, SCORING_S, TRANSFER_S, FIXED_S = 2.0, 0.8, 0.1, 0.3, 0.2
SETTINGS = ("batch.groups=4", "batch.members=2", "run.steps=50", "fleet.workers=2", "staleness.bound=2")


class KnownRun:
    """A run whose ledger is filled by hand: two workers with 4 slots each, and every fourth group filtered."""

    def __init__(self, run):
        self.now_s = 1000.0
        self.run = run
        self.metrics = lambda step: {}
        self.database = Database(run.ledger, run.run_id)
        self.ledger = Ledger(self.database, rules_of(run.config), lambda: self.now_s)
        self.roster = Roster(self.database, lambda: self.now_s)
        self.ledger.announce(0)
        self.workers = [self.join(name) for name in ("a", "b")]

    def join(self, name):
        worker_id, _ = self.roster.register(name)
        self.load(worker_id, 0)
        return worker_id

    def load(self, worker_id, version):
        telemetry = Telemetry(version=version, snapshot_id=f"{version}-x")
        self.roster.heartbeat(worker_id, telemetry)
        self.roster.record_load(worker_id, version, f"{version}-x", self.now_s, TRANSFER_S)

    def generate(self, worker_id, version, count=4):
        leases = self.ledger.lease(worker_id, version, count)
        began_s = self.now_s
        self.now_s += CALL_S
        for lease in leases:
            rollouts = tuple(
                Rollout(m, np.array([4], np.int32), np.array([-0.1], np.float32), np.array([version], np.int32), "stop")
                for m in lease.members
            )
            self.ledger.post(worker_id, GroupRollouts(lease.group_id, lease.attempt, rollouts))
        self.now_s += SCORING_S
        for lease in leases:
            second = 0.0 if lease.group_id % 4 == 3 else 1.0
            self.ledger.record_scores(lease.group_id, [MemberScore(0, 0.0), MemberScore(1, second)])
        self.now_s = began_s + 1.0

    def step(self, workers):
        """The workers generate as much as they may, then a step is trained and its version loaded."""
        version = self.ledger.current_step
        while self.ledger.batches.assign(version) is None:
            for worker_id in workers:
                self.generate(worker_id, version)
        self.now_s += STEP_S
        metrics = {"learner/step_s": STEP_S, "learner/wait_s": 0.5} | self.metrics(version)
        self.ledger.batches.commit(version, metrics, version)
        self.ledger.announce(version + 1)
        self.now_s += TRANSFER_S + FIXED_S
        for worker_id in workers:
            self.load(worker_id, version + 1)


@pytest.fixture
def known(make_run):
    made = KnownRun(make_run(*SETTINGS))
    yield made
    made.database.close()


def echo2(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "echo2", *map(str, arguments)], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )


def refusal(*arguments):
    done = echo2(*arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    (line,) = done.stderr.splitlines()
    return line


def test_the_ledger_gives_the_terms_that_made_it(known):
    for _ in range(20):
        known.step(known.workers)
    measured = calibrate(observe_run(known.run))
    assert measured.missing == []
    assert measured.learner_step_s.value == pytest.approx(STEP_S)
    assert measured.group_latency_s.value == pytest.approx(CALL_S + SCORING_S)
    assert measured.transfer_s.value == pytest.approx(TRANSFER_S)
    assert measured.fixed_s.value == pytest.approx(FIXED_S, abs=1e-3)
    assert measured.accepted_share.value == pytest.approx(0.75, abs=0.03)
    assert measured.groups_per_s.value == pytest.approx(2 * 4 / CALL_S)
    assert measured.workers == 2


def test_observations_since_a_time_leave_out_what_was_before(known):
    for _ in range(6):
        known.step(known.workers)
    middle_s = known.now_s
    for _ in range(3):
        known.step(known.workers)
    seen = Statistics(known.database).observations(7.0, middle_s)
    assert [step.step for step in seen.steps] == [6, 7, 8]
    assert {load.version for load in seen.loads} == {7, 8, 9}
    assert seen.groups and min(group.scored_at_s for group in seen.groups) > middle_s
    assert seen.utilisation == pytest.approx(0.8)


def test_a_lost_or_silent_worker_does_not_count_and_those_at_the_end_of_a_run_do(known):
    for _ in range(6):
        known.step(known.workers)
    a, b = known.workers

    def count():
        return list(observe_run(known.run).workers)

    assert count() == [a, b]
    for _ in range(4):
        known.step([a])
    assert count() == [a], "b was not heard of while a was"
    known.roster.register("c")
    assert count() == [a], "c has loaded nothing yet"
    known.load(b, known.ledger.current_step)
    known.roster.leave(a)
    assert count() == [b], "a left, the run goes on"
    known.roster.leave(b)
    assert count() == [a, b], "everybody left: the run is over"


def test_loads_from_before_a_resume_are_left_out(known):
    for _ in range(6):
        known.step(known.workers)
    assert {load.version for load in observe_run(known.run).loads} == {1, 2, 3, 4, 5, 6}
    known.ledger.batches.resume(5)
    known.now_s += 100.0
    known.ledger.batches.assign(5)
    known.ledger.batches.commit(5, {"learner/step_s": STEP_S, "learner/wait_s": 0.0}, 5)
    assert {load.version for load in observe_run(known.run).loads} == {1, 2, 3, 4, 5}


def test_a_plan_from_a_run_uses_its_terms_its_configuration_and_overrides(known):
    for _ in range(20):
        known.step(known.workers)
    path = known.run.path
    done = echo2("plan", "--from-run", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "50 steps of B = 4 groups, S = 2, κ = 1" in done.stdout
    assert f"measured in {path}: 2 … 2 (95 %, 20 steps)" in done.stdout
    assert "2 × 5 groups/s per worker" in done.stdout and "estimate" not in done.stdout
    more = echo2("plan", "--from-run", path, "staleness.bound=6", "fleet.workers=12").stdout
    assert "S = 6" in more and "12 × 5 groups/s per worker" in more and "60 groups/s" in more
    other = echo2("plan", "--from-run", path, "configs/demo.toml").stdout
    assert "Plan of run demo: 100 steps of B = 32 groups" in other and "2 × 5 groups/s per worker" in other


def test_a_run_that_broadcast_has_the_time_of_its_broadcasts_and_the_links_that_it_saw(known):
    """Each step tells of the version before its own; 100 MB went from 50 MB/s to two workers of 25 MB/s: T* = 2 s."""
    seen = {"full_bytes": 1e9, "delta_bytes": 1e8, "last_s": 0.2, "source_uplink_bytes_per_s": 50e6}
    seen["worker_uplink_bytes_per_s"] = 25e6

    def metrics(step):
        return {f"dissemination/{name}": value for name, value in (seen | {"version": float(step)}).items()} if step else {}

    known.metrics = metrics
    for _ in range(20):
        known.step(known.workers)
    measured = calibrate(observe_run(known.run))
    assert measured.transfer_s.value == pytest.approx(0.2) and measured.transfer_s.count == 19
    assert measured.fixed_s.value == pytest.approx(TRANSFER_S + FIXED_S - 0.2, abs=1e-3)
    told = echo2("plan", "--from-run", known.run.path).stdout
    assert "(95 %, 19 broadcasts)" in told
    (row,) = [line.split() for line in told.splitlines() if line.startswith("in full, 1 GB")]
    assert row[4:8] == ["2", "s", "2.3", "s"]
    wider = echo2("plan", "--from-run", known.run.path, "fleet.workers=4").stdout
    (row,) = [line for line in wider.splitlines() if line.startswith("D_tx")]
    assert "0.2667 s" in row and "in proportion to 1.1 · T* of a broadcast of 100 MB to 4 workers: sum of uplinks binds" in row


def test_a_plan_from_a_run_chooses_machines_by_what_rented_ones_showed(known):
    offer = "nebius/eu-north1/gpu-h100-sxm_1gpu-16vcpu-200gb/spot"
    for name in ("a", "b"):
        known.database.execute("INSERT INTO paid_intervals VALUES (?, ?, 1.25, 940.0, NULL)", (name, offer))
    for _ in range(20):
        known.step(known.workers)
    settings = ("model.path=examples/Qwen3-8B", "model.dtype=bfloat16", "activation.completion_tokens=2000")
    done = echo2("plan", "--from-run", known.run.path, *settings, "--catalog", "examples/catalog/v8")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"measured on 2 workers in {known.run.path}" in done.stdout
    assert "measured on 2 starts" in done.stdout and "0 in 0.1 h" in done.stdout
    kept, let_go = (next(line for line in done.stdout.splitlines() if line.startswith(word)) for word in ("kept", "let go"))
    assert offer in kept and offer in let_go and kept.split()[1] == let_go.split()[2] == "1"


def test_a_plan_from_a_run_can_be_drawn(known, tmp_path):
    for _ in range(4):
        known.step(known.workers)
    done = echo2("plan", "--from-run", known.run.path, "--plot", tmp_path / "plan.png")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_a_plan_from_what_has_not_measured_its_terms_is_refused(make_run, known, tmp_path):
    assert str(tmp_path / "none") in refusal("plan", "--from-run", tmp_path / "none")
    assert "no ledger yet" in refusal("plan", "--from-run", make_run("run.name=empty").path)
    sentence = refusal("plan", "--from-run", known.run.path)
    assert all(f"{name} (needs" in sentence for name in ("T", "L", "D_tx", "D_fix", "α", "μ"))
    for _ in range(4):
        known.step(known.workers)
    known.database.execute("DELETE FROM disseminations")
    sentence = refusal("plan", "--from-run", known.run.path)
    assert "D_tx (needs two versions" in sentence and "T (needs" not in sentence
    assert "staleness.bond" in refusal("plan", "--from-run", known.run.path, "staleness.bond=2")


def test_status_shows_the_measured_terms_with_their_intervals(known):
    for _ in range(6):
        known.step(known.workers)
    figures = json.loads(echo2("status", known.run.path, "--json").stdout)["measured_terms"]
    assert figures["learner_step_s"] == {"value": STEP_S, "low": STEP_S, "high": STEP_S, "count": 6}
    assert figures["workers"] == 2 and set(figures["worker_groups_per_s"]) == set(known.workers)
    assert "| T | 2 s | 2 … 2 |" in echo2("status", known.run.path).stdout
