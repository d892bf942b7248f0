"""Evaluations in the ledger: beside training, without touching it, and through whatever happens to workers and learner."""

from dataclasses import replace

import pytest
from test_ledger import RULES, Clock, rollout, scores

from echo2.config_evaluation import EvaluationSection
from echo2.hub.database import Database
from echo2.hub.evaluation_figures import pass_at_k
from echo2.hub.evaluation_groups import EvaluationGroups, is_evaluation
from echo2.hub.ledger import Ledger
from echo2.hub.statistics import Statistics
from echo2.protocol import GroupRollouts

EVALUATION = EvaluationSection(every_steps=2, prompts=4, samples=2, temperature=1.0, share=0.5)
EVALUATED = replace(RULES, evaluation=EVALUATION)
GROUPS = EVALUATED.evaluation_groups


class Run:
    """A ledger that is reopened as a hub that was killed would do it."""

    def __init__(self, file, rules=EVALUATED):
        self.file, self.rules, self.clock = file, rules, Clock()
        self.open()
        self.ledger.announce(0)

    def open(self):
        self.database = Database(self.file, "run-1")
        self.ledger = Ledger(self.database, self.rules, self.clock)

    def lease(self, worker, version, limit=100):
        """Leases to train, and those to evaluate."""
        leases = self.ledger.lease(worker, version, limit)
        evaluated = [lease for lease in leases if is_evaluation(lease.group_id)]
        return [lease for lease in leases if lease not in evaluated], evaluated

    def evaluate(self, worker, version, limit=100):
        """Leases to evaluate; those to train are handed back."""
        trained, evaluated = self.lease(worker, version, limit)
        self.ledger.return_leases(worker, [lease.group_id for lease in trained])
        return evaluated

    def finish(self, leases, version, rewards=(0.0, 1.0), worker="w"):
        for lease in leases:
            members = tuple(rollout(m, version) for m in lease.members)
            assert self.ledger.post(worker, GroupRollouts(lease.group_id, lease.attempt, members)) == "accepted"
            values = [rewards[m % len(rewards)] for m in range(len(lease.members))]
            self.ledger.record_scores(lease.group_id, scores(*values))

    def step(self):
        """Generate and train the next step, evaluating nothing."""
        version = self.ledger.current_step
        trained, evaluated = self.lease("trainer", version)
        self.ledger.return_leases("trainer", [lease.group_id for lease in evaluated])
        self.finish(trained, version, worker="trainer")
        assert self.ledger.batches.assign(version)
        self.ledger.batches.commit(version, {}, 0)
        self.ledger.announce(version + 1)

    def figures(self):
        return Statistics(self.database).evaluations()


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path / "ledger.db")
    yield made
    made.database.close()


def test_an_evaluation_takes_its_share_of_the_slots_and_the_rest_once_there_is_nothing_to_train(run):
    trained, evaluated = run.lease("a", 0, limit=4)
    assert (len(trained), len(evaluated)) == (2, 2)
    trained, evaluated = run.lease("b", 0, limit=4)
    assert (len(trained), len(evaluated)) == (2, 2), "admission gives out (0 + 1 + 1) · 2 groups, as without an evaluation"
    run.ledger.return_leases("b", [lease.group_id for lease in evaluated])
    assert len(run.lease("c", 0, limit=1)[1]) == 1
    assert len(run.lease("d", 0, limit=4)[1]) == 1


def test_a_worker_with_one_slot_shares_its_time_between_evaluation_and_training(run):
    for _ in range(4):
        assert [sum(map(len, kinds)) for kinds in zip(run.lease("a", 0, 1), run.lease("a", 0, 1), strict=True)] == [1, 1]


def test_evaluated_groups_have_prompts_and_members_of_their_own(run):
    evaluated = run.evaluate("a", 0)
    assert [lease.members for lease in evaluated] == [(0, 1)] * 4
    assert [GROUPS.place(lease.group_id) for lease in evaluated] == [0, 1, 2, 3]
    run.finish(evaluated, 0, worker="a")
    run.ledger.evaluations.settle()
    for _ in range(2):
        run.step()
    again = run.evaluate("a", 2)
    assert [GROUPS.place(lease.group_id) for lease in again] == [0, 1, 2, 3]
    assert not {lease.group_id for lease in again} & {lease.group_id for lease in evaluated}


def test_more_samples_than_a_trained_group_has_members_come_from_several_groups(tmp_path):
    many = replace(RULES, evaluation=EVALUATION.model_copy(update={"samples": 7}))
    run = Run(tmp_path / "many.db", many)
    evaluated = run.evaluate("a", 0)
    assert [lease.members for lease in evaluated] == 4 * [(0, 1, 2), (0, 1, 2), (0,)]
    assert [many.evaluation_groups.place(lease.group_id) for lease in evaluated] == [n // 3 for n in range(12)]
    for place in range(4):
        # Of 7 completions the first prompt has one that is right, the second two, and so on.
        right, groups = place + 1, evaluated[3 * place : 3 * place + 3]
        for number, lease in enumerate(groups):
            run.finish([lease], 0, [float(3 * number + m < right) for m in lease.members], worker="a")
    assert run.ledger.evaluations.settle()
    (figures,) = run.figures()
    assert [figures[f"eval/{name}"] for name in ("pass@1", "exact_match", "reward")] == pytest.approx(3 * [2.5 / 7])
    assert (figures["eval/pass@7"], figures["eval/prompts"]) == (1.0, 4.0)
    assert figures["eval/pass@4"] == pytest.approx(sum(pass_at_k(7, right, 4) for right in (1, 2, 3, 4)) / 4)
    run.database.close()


@pytest.mark.parametrize(("samples", "sizes"), [(1, [1]), (8, [8]), (9, [8, 1]), (24, [8, 8, 8])])
def test_groups_of_evaluations_are_told_apart_by_version_and_prompt(samples, sizes):
    groups = EvaluationGroups(prompts=5, samples=samples, members=8)
    ids = [group_id for version in range(3) for group_id in groups.of_version(version)]
    assert len(set(ids)) == len(ids) == 3 * 5 * len(sizes) and all(map(is_evaluation, ids)) and not is_evaluation(10**9)
    assert [groups.place(group_id) for group_id in ids] == 3 * [place for place in range(5) for _ in sizes]
    assert [groups.size(group_id) for group_id in ids] == 15 * sizes


def test_the_figures_come_with_the_last_group_and_are_told_at_one_step(run):
    evaluated = run.evaluate("a", 0)
    run.finish(evaluated[:3], 0, rewards=(0.0, 1.0), worker="a")
    assert not run.ledger.evaluations.settle() and run.ledger.evaluations.take(0) is None
    run.finish(evaluated[3:], 0, rewards=(1.0, 1.0), worker="a")
    assert run.ledger.evaluations.settle() and not run.ledger.evaluations.settle()
    (figures,) = run.figures()
    assert figures["eval/pass@1"] == figures["eval/exact_match"] == (3 * 0.5 + 1.0) / 4
    assert (figures["eval/pass@2"], figures["eval/prompts"], figures["eval/failed_prompts"]) == (1.0, 4.0, 0.0)
    assert figures["eval/pass@1_stderr"] == pytest.approx(0.125)
    assert (figures["eval/version"], figures["eval/oldest_version"], figures["eval/newest_version"]) == (0, 0, 0)
    trained, _ = run.lease("a", 0)
    run.finish(trained, 0, worker="a")
    run.ledger.batches.assign(0)
    assert run.ledger.batches.scored_means(0).items() >= figures.items()
    run.ledger.batches.commit(0, {}, 0)
    run.ledger.batches.resume(0)
    assert run.ledger.batches.scored_means(0).items() >= figures.items(), "a replay is told the same"
    run.ledger.batches.commit(0, {}, 0)
    run.ledger.announce(1)
    run.step()
    assert not any(name.startswith("eval/") for name in run.ledger.batches.scored_means(1))


def test_only_workers_with_the_version_or_a_newer_one_take_part_and_the_figures_say_which(run):
    run.finish(run.evaluate("a", 0), 0, worker="a")
    run.ledger.evaluations.settle()
    run.step()
    run.step()
    assert run.evaluate("old", 1) == []
    first = run.evaluate("new", 2, limit=2)
    run.finish(first, 2, worker="new")
    run.step()
    run.finish(run.evaluate("newer", 3), 3, worker="newer")
    run.ledger.evaluations.settle()
    last = run.figures()[-1]
    assert (last["eval/version"], last["eval/oldest_version"], last["eval/newest_version"]) == (2, 2, 3)


def test_admission_counts_and_calibration_see_no_evaluation(run, tmp_path):
    plain = Run(tmp_path / "plain.db", RULES)
    for each in (run, plain):
        for _ in range(3):
            each.finish(each.evaluate("a", each.ledger.current_step), each.ledger.current_step, worker="a")
            each.ledger.evaluations.settle()
            each.step()
    assert len(run.figures()) == 2 and plain.figures() == []
    views = [Statistics(each.database, each.clock) for each in (run, plain)]
    for look in ("groups_by_state", "wasted_tokens", "rollouts_per_s", "max_trained_staleness"):
        seen, wanted = (getattr(view, look)() for view in views)
        assert seen == wanted, look
    seen, wanted = (view.observations(10.0) for view in views)
    assert (seen.groups, seen.accepted) == (wanted.groups, wanted.accepted)
    assert run.ledger.live_groups() == plain.ledger.live_groups()
    plain.database.close()


def test_a_lost_worker_and_a_killed_hub_cost_an_evaluation_nothing(run):
    evaluated = run.evaluate("a", 0, limit=4)
    run.finish(evaluated[:1], 0, worker="a")
    run.ledger.reopen_leases_of("a")
    abandoned = run.database
    run.open()
    abandoned.close()
    rest = run.evaluate("b", 0)
    assert len(rest) == 3 and [lease.attempt for lease in rest] == [2, 1, 1]
    run.finish(rest, 0, worker="b")
    assert run.ledger.evaluations.settle()
    assert run.figures()[0]["eval/prompts"] == 4.0


def test_a_group_that_fails_for_good_does_not_hold_up_the_others(run):
    evaluated = run.evaluate("a", 0)
    run.ledger.fail(evaluated[0].group_id, "no such prompt")
    run.finish(evaluated[1:], 0, worker="a")
    assert run.ledger.evaluations.settle()
    assert (run.figures()[0]["eval/prompts"], run.figures()[0]["eval/failed_prompts"]) == (3.0, 1.0)


def test_an_evaluation_is_never_stale(run):
    evaluated = run.evaluate("slow", 0)
    run.step()
    run.finish(evaluated, 0, worker="slow")
    assert run.ledger.evaluations.settle()


def test_the_next_evaluation_cuts_one_short_that_is_not_done(run):
    evaluated = run.evaluate("a", 0)
    run.finish(evaluated[:2], 0, worker="a")
    run.step()
    run.step()
    members = tuple(rollout(m, 0) for m in evaluated[2].members)
    assert run.ledger.post("a", GroupRollouts(evaluated[2].group_id, 1, members)) == "stale"
    run.finish(run.evaluate("b", 2), 2, worker="b")
    assert run.ledger.evaluations.settle()
    assert [figures["eval/version"] for figures in run.figures()] == [2.0]


def test_announcing_tells_which_evaluation_was_cut_short_and_a_version_is_evaluated_once(run):
    assert run.ledger.announce(1) is None and run.ledger.announce(2) == 0
    assert run.ledger.announce(2) is None
    run.finish(run.evaluate("a", 2), 2, worker="a")
    run.ledger.evaluations.settle()
    assert run.ledger.announce(2) is None and run.evaluate("a", 2) == []


def test_a_resume_takes_back_what_is_newer_and_it_is_evaluated_anew(run):
    run.finish(run.evaluate("a", 0), 0, worker="a")
    run.ledger.evaluations.settle()
    run.step()
    run.step()
    under_way = run.evaluate("a", 2)
    run.finish(under_way[:3], 2, worker="a")
    run.ledger.batches.resume(1)
    assert [figures["eval/version"] for figures in run.figures()] == [0.0]
    assert run.evaluate("a", 2) == []
    run.ledger.batches.commit(1, {}, 0)
    run.ledger.announce(2)
    again = run.evaluate("b", 2)
    assert [lease.group_id for lease in again] == [lease.group_id for lease in under_way]
    assert all(lease.members == (0, 1) for lease in again)
    run.finish(again, 2, worker="b")
    assert run.ledger.evaluations.settle()
    assert [figures["eval/prompts"] for figures in run.figures()] == [4.0, 4.0]


def test_the_share_of_tokens_is_of_what_was_scored_meanwhile(run):
    trained, evaluated = run.lease("a", 0)
    run.clock.now += 5.0
    run.finish(trained, 0, worker="a")
    run.finish(evaluated, 0, worker="a")
    run.ledger.evaluations.settle()
    (figures,) = run.figures()
    assert figures["eval/token_share"] == pytest.approx(4 * 2 / (4 * 2 + 4 * 3))
    assert figures["eval/duration_s"] == pytest.approx(5.0)


def test_the_last_version_is_evaluated_whether_or_not_it_is_a_multiple():
    settings = EvaluationSection(every_steps=4)
    assert [version for version in range(11) if settings.is_due(version, total_steps=10)] == [0, 4, 8, 10]
    assert not any(EvaluationSection().is_due(version, total_steps=10) for version in range(11))
