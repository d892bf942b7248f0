"""Drift: which term moved, and when it is told."""

from dataclasses import replace

import pytest
from test_calibration import a_run

from echo2.capacity.drift import DriftWatch, find_departure, with_term
from echo2.capacity.latencies import Constant, Lognormal
from echo2.capacity.terms import estimate_terms, predict_run
from echo2.config import load_config

CONFIG = load_config([], ["batch.groups=32", "staleness.bound=2", "staleness.publish_interval=1"])
FORMER = replace(
    estimate_terms(CONFIG, workers=4),
    learner_step_s=1.0,
    latency=Lognormal(0.4, 0.2),
    groups_per_s=64.0,
    accepted_share=0.8,
    transfer_s=0.1,
    fixed_s=0.1,
    worker_slots=8,
)
MOVES = {
    "T": replace(FORMER, learner_step_s=0.4),
    "L": replace(FORMER, latency=Lognormal(2.0, 0.2), worker_slots=40),
    "D_tx": replace(FORMER, transfer_s=3.0),
    "D_fix": replace(FORMER, fixed_s=3.0),
    "α": replace(FORMER, accepted_share=0.3),
    "μ": replace(FORMER, groups_per_s=24.0, workers=2),
}


@pytest.mark.parametrize("name", MOVES)
def test_the_term_that_moved_is_named(name):
    present = replace(MOVES[name], accepted_share=MOVES[name].accepted_share * 0.99)
    observed = predict_run(CONFIG, present).utilisation
    departure = find_departure(CONFIG, FORMER, present, observed)
    assert departure.term == name
    assert departure.explained == pytest.approx(observed, abs=0.03)
    assert f"{name} moved from" in str(departure) and "fell to" in str(departure)


def test_the_sentence_has_all_figures():
    departure = find_departure(CONFIG, FORMER, MOVES["μ"], 0.61)
    assert str(departure) == (
        "utilisation fell to 61 % where 100 % were predicted: μ moved from 64 to 24 groups/s (2 of 4 workers are gone), "
        f"with which {100 * departure.explained:.0f} % would be predicted"
    )
    assert departure.explained == pytest.approx(0.6, abs=0.03)


def test_what_no_term_explains_is_said():
    departure = find_departure(CONFIG, FORMER, replace(FORMER, accepted_share=0.79), 0.6)
    assert departure.term is None and "no term that was measured explains it" in str(departure)


def test_what_stays_near_the_prediction_is_no_departure():
    assert find_departure(CONFIG, FORMER, MOVES["μ"], 0.91) is None


def test_each_term_can_be_replaced_alone():
    other = replace(FORMER, learner_step_s=9.0, latency=Constant(9.0), groups_per_s=9.0, accepted_share=0.9, transfer_s=9.0)
    for name in ("T", "L", "D_tx", "D_fix", "α", "μ"):
        changed = with_term(FORMER, other, name)
        assert (changed == FORMER) is (name == "D_fix")


class Run:
    """A run of windows that are alike but for what a test changes."""

    def __init__(self):
        self.watch = DriftWatch(load_config([], ["batch.groups=20", "staleness.bound=4"]), "runs/known")
        self.now_s = 0.0

    def window(self, workers=("a", "b"), wait_s=0.02, steps=25):
        """Another window passes; what is told of it."""
        observed = a_run(workers=workers, steps=steps)
        times = [replace(s, finished_at_s=self.now_s + 0.5 * (n + 1), wait_s=wait_s) for n, s in enumerate(observed.steps)]
        self.now_s = times[-1].finished_at_s
        return self.watch.look(lambda since_s: replace(observed, steps=[t for t in times if t.finished_at_s > since_s]))


def test_a_departure_is_told_once_and_only_after_two_windows():
    run = Run()
    assert [run.window() for _ in range(4)] == [None] * 4
    assert run.watch.predicted == pytest.approx(1.0) and run.watch.observed == pytest.approx(0.96, abs=0.02)
    assert run.window(wait_s=0.8) is None, "one window may be an accident"
    assert run.window() is None
    assert run.window(workers=("a",), wait_s=0.2) is None
    assert run.window(workers=("a",), wait_s=0.2).term == "μ"
    assert [run.window(workers=("a",), wait_s=0.2) for _ in range(3)] == [None] * 3, "the reference is the new state"


def test_the_start_of_the_workers_is_no_departure():
    run = Run()
    assert [run.window(workers=("a",), wait_s=0.2) for _ in range(2)] == [None] * 2
    assert [run.window(workers=("a", "b"), wait_s=2.0), run.window()] == [None] * 2
    assert [run.window() for _ in range(3)] == [None] * 3


def test_a_window_that_is_too_short_is_not_judged():
    run = Run()
    assert [run.window(steps=3) for _ in range(4)] == [None] * 4
    assert (run.watch.predicted, run.watch.observed) == (None, None)


def test_a_model_that_does_not_describe_the_run_is_told_once_and_changes_are_told_nevertheless():
    run = Run()
    first, misfit, *more = [run.window(wait_s=0.8) for _ in range(6)]
    assert first is None and more == [None] * 4
    assert str(misfit) == (
        "the capacity model does not describe this run: utilisation is 38 % where the terms measured at the same time predict "
        "100 %; from now on changes of it are told"
    )
    assert run.window(workers=("a",), wait_s=3.0) is None
    departure = run.window(workers=("a",), wait_s=3.0)
    assert departure.term == "μ" and departure.predicted == pytest.approx(misfit.observed, abs=0.01)
    assert "to 14 % where 38 % were predicted" in str(departure)
    assert [run.window(workers=("a",), wait_s=3.0) for _ in range(3)] == [None] * 3


@pytest.mark.parametrize(("steps", "told"), [(25, False), (40, True)])
def test_one_window_suffices_where_workers_are_gone_for_longer_than_the_heartbeat_time_out(steps, told):
    run = Run()
    assert [run.window() for _ in range(3)] == [None] * 3
    assert run.window(workers=("a",), wait_s=0.2, steps=3) is None, "the loss is seen within a window"
    departure = run.window(workers=("a",), wait_s=0.2, steps=steps)
    assert (departure is not None) is told
    if told:
        assert departure.term == "μ" and "1 of 2 workers are gone" in str(departure)


def test_workers_that_came_back_are_not_taken_for_gone():
    run = Run()
    assert [run.window() for _ in range(3)] == [None] * 3
    assert run.window(workers=("a",), wait_s=0.2, steps=3) is None
    assert run.window(steps=3) is None
    assert run.window(workers=("a",), wait_s=0.2, steps=40) is None
