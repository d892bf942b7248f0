"""What a run leaves to look at."""

import pytest
from matplotlib.figure import Figure

from echo2.capacity.calibration import Observations, StepTime
from echo2.config import load_config
from echo2.curves import draw_curves, write_curves
from echo2.report import render_status, summarise
from flows.run import render_summary

STATUS = {
    "run_id": "known",
    "step": 200,
    "total_steps": 200,
    "version": 200,
    "max_trained_staleness": 2,
    "workers_seen": 2,
    "versions_disseminated": 200,
    "groups": {"trained": 800},
    "wasted_tokens": {},
    "cost_usd": 0.0,
    "quiet_s": None,
    "rollouts_per_s": 10.0,
    "workers": [],
    "workers_live": 0,
    "workers_omitted": 0,
    "log_prob_differences": [],
    "evaluations": [],
    "last_step": {},
    "measured_terms": {
        "accepted_share": {"value": 0.5176, "low": 0.5, "high": 0.53, "count": 9},
        "learner_step_s": {"value": 2.0, "low": 1.9, "high": 2.1, "count": 9},
    },
    "events": [],
}


def steps_with(waits_s):
    return [
        {"step": n, "learner/step_s": 1.0, "learner/wait_s": wait_s, "capacity/observed_utilisation": 0.97}
        for n, wait_s in enumerate(waits_s)
    ]


def test_the_busy_share_of_the_run_and_that_of_the_window_are_told_apart():
    steps = steps_with([1.0] * 72 + [0.0] * 128)
    window = Observations(steps=[StepTime(s["step"], s["step"], 1.0, s["learner/wait_s"]) for s in steps[-128:]])
    summary = summarise(load_config([], []), STATUS, steps, window)
    assert summary["busy_share_observed"] == pytest.approx(200 / 272)
    assert summary["busy_share_observed_in_window"] == 1.0 and summary["busy_share_window_steps"] == 128
    assert summary["busy_share_predicted"] is None, "terms are missing"


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        ({"exact_match": 0.25, "reward": 0.5}, "exact match         25.0 % in the first 3 steps, 25.0 % in the last 10"),
        ({"accuracy": 0.25, "reward": -0.5}, "reward              -0.5 in the first 3 steps, -0.5 in the last 10"),
        ({}, "exact match         unknown in the first 3 steps, unknown in the last 10"),
    ],
)
def test_the_summary_tells_the_reward_where_a_task_has_no_exact_match(metrics, line):
    times = {"learner/step_s": 1.0, "learner/wait_s": 0.0}
    steps = [{"step": float(step)} | times | metrics for step in range(20)]
    status = STATUS | {"groups": dict.fromkeys(("trained", "filtered", "expired", "failed"), 1)}
    summary = summarise(load_config([], []), status, steps, Observations(steps=[]))
    assert f"\n  {line}\n" in render_summary(summary, load_config([], []), elapsed_s=1.0)


def test_the_accepted_share_is_shown_in_per_cent():
    shown = render_status(STATUS)
    assert "| α | 51.76 % | 50 … 53 |" in shown and "| T | 2 s | 1.9 … 2.1 |" in shown


def drawn(waits_s):
    figure = Figure()
    draw_curves(figure, "known", 2, steps_with(waits_s))
    times, utilisation = figure.axes[2:]
    return times, utilisation


def test_waits_that_are_off_scale_are_marked():
    times, _ = drawn([0.1] * 50 + [60.0, 0.1, 30.0] + [0.1] * 150)
    assert times.get_ylim()[1] < 10
    marks = next(line for line in times.lines if line.get_label() == "off scale")
    assert list(marks.get_xdata()) == [50, 52]
    assert all(0 < height < times.get_ylim()[1] for height in marks.get_ydata())
    assert [text.get_text() for text in times.texts] == ["2 off scale, the longest 60 s in step 50"]


def test_nothing_is_marked_where_everything_fits():
    times, _ = drawn([0.1] * 50)
    assert [line.get_label() for line in times.lines] == ["learner/step_s", "learner/wait_s"] and not times.texts


def test_utilisation_is_shown_from_0_to_100_percent():
    _, utilisation = drawn([0.1] * 50)
    assert utilisation.get_ylim() == (0, 100) and utilisation.get_ylabel() == "utilisation, %"
    assert list(utilisation.lines[0].get_ydata()) == pytest.approx([97.0] * 50)


def test_curves_are_written_as_a_picture(tmp_path):
    write_curves(tmp_path / "curves.png", "known", 2, steps_with([0.1]))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_workers_that_are_left_out_of_the_table_are_counted():
    assert "\n12 workers more left before these.\n" in render_status(STATUS | {"workers_omitted": 12})
    assert "left before these" not in render_status(STATUS)
