"""Plots of a plan: the curves, the picture, and the command that writes it."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from plan_example import example

from echo2.capacity.dials import Situation
from echo2.capacity.model import Links
from echo2.capacity.plan import Plan, make_plan
from echo2.capacity.plots import MOST_STALENESS_BOUNDS, Panel, panels, plot_plan

REPOSITORY = Path(__file__).parent.parent.parent


def plan_with(*overrides: str) -> Plan:
    """The example with κ = 3."""
    return make_plan(example("staleness.publish_interval=3", *overrides))


def drawn(plan: Plan) -> Figure:
    figure = Figure()
    plot_plan(plan, figure)
    figure.draw_without_rendering()
    return figure


def words_of(figure: Figure) -> str:
    texts = [figure.get_suptitle()]
    texts += [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    for axis in figure.axes:
        texts += [axis.get_xlabel(), axis.get_ylabel(), *(text.get_text() for text in axis.texts)]
        texts += [child.get_xlabel() for child in axis.child_axes]
    return "\n".join(texts)


def at(panel: Panel, value: float) -> tuple[float, float, float]:
    """The three curves at one value: configured, best, serial."""
    place = panel.values.index(value)
    return panel.configured[place], panel.best[place], panel.serial[place]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("staleness.publish_interval=1",),
        ("staleness.bound=0", "staleness.publish_interval=1"),
        ("capacity.transfer_s=0.0",),
        ("capacity.transfer_s=0.3", "capacity.dissemination_fixed_s=0.7", "fleet.workers=7"),
        ("capacity.transfer_s=60.0",),
    ],
    ids=" ".join,
)
def test_every_panel_passes_through_the_plan_and_the_best_interval_is_never_worse(overrides: tuple[str, ...]) -> None:
    plan = plan_with(*overrides)
    for panel in panels(plan):
        configured, best, _ = at(panel, panel.now)
        assert configured == pytest.approx(plan.prediction.utilisation)
        assert best >= configured
        assert panel.values == tuple(sorted(set(panel.values)))
        for one, of_best, of_serial in zip(panel.configured, panel.best, panel.serial, strict=True):
            assert all(math.isnan(share) or 0 < share <= of_best * (1 + 1e-8) for share in (one, of_serial))


def test_each_panel_changes_one_number_only() -> None:
    plan = plan_with("capacity.transfer_s=0.5", "capacity.dissemination_fixed_s=1.5")
    by_pool, by_staleness, by_latency = panels(plan)
    least = by_pool.values[0]
    now = Situation(plan.workload, plan.links, plan.terms.slots, plan.terms.latency)
    assert by_pool.configured[0] == replace(now, slots=least * 0.8).utilisation < 0.1
    assert at(by_staleness, 6)[0] == replace(now, workload=replace(plan.workload, staleness_bound=6)).utilisation
    longest_s = by_latency.values[-1]
    links = Links(longest_s / 4, longest_s * 3 / 4)
    assert by_latency.configured[-1] == pytest.approx(replace(now, links=links).utilisation)


def test_the_serial_rules_interval_stalls_where_the_best_one_does_not() -> None:
    by_pool, by_staleness, by_latency = panels(plan_with("fleet.workers=77"))
    for panel in (by_pool, by_latency):
        _, best, serial = at(panel, panel.now)
        assert (best, serial) == (1, pytest.approx(3 / 3.8))
    assert at(by_staleness, 4)[2] == pytest.approx(3 / 3.8)


def test_a_rule_without_an_allowed_interval_has_a_gap() -> None:
    _, by_staleness, _ = panels(plan_with())
    assert [math.isnan(at(by_staleness, S)[0]) for S in (0, 1, 2, 3)] == [True, True, False, False]
    assert [math.isnan(at(by_staleness, S)[2]) for S in (0, 1, 2, 3)] == [True, True, False, False]
    assert not any(math.isnan(share) for share in by_staleness.best)


def test_the_staleness_axis_reaches_the_bound_that_keeps_the_learner_busy_and_stays_readable() -> None:
    _, by_staleness, _ = panels(plan_with("capacity.dissemination_fixed_s=100.0"))
    assert by_staleness.values[-1] > 100
    assert 4 in by_staleness.values
    assert len(by_staleness.values) <= MOST_STALENESS_BOUNDS + 2
    assert max(by_staleness.best) == 1


def test_the_pool_axis_holds_the_serial_rules_pool_unless_it_would_dwarf_the_plan() -> None:
    by_pool, *_ = panels(plan_with())
    assert 96 < by_pool.values[-1] < 110
    dwarfed, *_ = panels(plan_with("capacity.dissemination_fixed_s=0.99"))
    assert dwarfed.values[-1] < 60


def test_the_picture_has_three_panels_with_units_rules_and_the_plan() -> None:
    figure = drawn(plan_with())
    words = words_of(figure)
    for part in (
        "groups/s",
        "workers",
        "staleness bound S (steps)",
        "dissemination latency D (s)",
        "U = T/τ (%)",
        "overlap, κ = 3 as configured",
        "overlap, best κ at each point",
        "serial rule's κ = S − 1",
        "target 97 %",
        "this plan",
        "97 % is out of reach of any pool at κ = 3",
        "the serial rule asks for 96 groups/s",
        "estimate from [capacity]",
    ):
        assert part in words
    assert len(figure.axes) == 3
    points = [line.get_xydata().tolist() for axis in figure.axes for line in axis.lines if line.get_label() == "this plan"]
    share = pytest.approx(100 * 3 / 4.6)
    assert points == [[[32.5, share]], [[4, share]], [[2, share]]]
    targets = [line for axis in figure.axes for line in axis.lines if line.get_label() == "target 97 %"]
    assert [list(line.get_ydata()) for line in targets] == [[97, 97]] * 3


def test_rules_have_different_colours_and_what_cannot_be_met_is_said() -> None:
    figure = drawn(plan_with("staleness.bound=0", "staleness.publish_interval=1"))
    assert len({to_hex(line.get_color()) for line in figure.axes[0].lines}) == 5
    assert "no pool meets the serial rule" in words_of(figure)
    assert "100 % needs 40 groups/s" in words_of(drawn(plan_with("staleness.publish_interval=2")))


def echo2_plan(*arguments: str | Path, code: str = "") -> subprocess.CompletedProcess[str]:
    program = f"import sys\n{code}\nsys.argv[1:] = {['plan', *map(str, arguments)]!r}\nfrom echo2.cli import main\nmain()"
    return subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)


def refusal(*arguments: str | Path, code: str = "") -> str:
    done = echo2_plan(*arguments, code=code)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("echo2: --plot ") and len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def test_the_command_writes_a_png_and_says_so_in_one_line_after_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.png"
    done = echo2_plan("configs/demo.toml", "--plot", file)
    assert done.returncode == 0, done.stderr
    plan, _, said = done.stdout.rstrip("\n").rpartition("\n\n")
    assert said == f"Utilisation against pool, S and D is drawn in {file}"
    assert echo2_plan("configs/demo.toml").stdout == plan + "\n"
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    assert width > 2 * height > 1000
    assert list(tmp_path.iterdir()) == [file]


def test_a_path_that_cannot_be_written_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    assert "No such file or directory" in refusal("--plot", tmp_path / "none" / "plan.png")
    assert "Is a directory" in refusal("--plot", tmp_path / "folder.png")
    for target in (tmp_path / "plan.jpg", tmp_path / ".png", "", f"{tmp_path}/plan.png/", f"{tmp_path}/plan.png/."):
        assert "does not end in .png" in refusal("--plot", target)
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder.png"]


def test_the_plot_is_refused_before_anything_is_computed_and_drawn_after_the_plan_is_shown(tmp_path: Path) -> None:
    uncomputable = "import echo2.capacity.plan\necho2.capacity.plan.make_plan = None"
    assert "No such file or directory" in refusal("--plot", tmp_path / "none" / "plan.png", code=uncomputable)
    undrawable = "import echo2.capacity.plots\necho2.capacity.plots.plot_plan = None"
    done = echo2_plan("configs/demo.toml", "--plot", tmp_path / "plan.png", code=undrawable)
    assert done.returncode != 0 and done.stdout == echo2_plan("configs/demo.toml").stdout


def test_without_matplotlib_only_the_plot_is_refused_and_the_extra_is_named(tmp_path: Path) -> None:
    absent = (
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "absent = lambda name: name.split('.')[0] == 'matplotlib'\n"
        "PathFinder.find_spec = lambda name, *rest: None if absent(name) else find(name, *rest)"
    )
    assert "pip install '.[learner]'" in refusal("--plot", tmp_path / "plan.png", code=absent)
    assert echo2_plan(code=absent).returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_plan_without_a_plot_loads_neither_matplotlib_nor_numpy() -> None:
    report = (
        "import atexit\n"
        "def show():\n"
        "    print(sorted({'matplotlib', 'numpy', 'echo2'} & set(sys.modules)), file=sys.stderr)\n"
        "atexit.register(show)"
    )
    assert echo2_plan(code=report).stderr.splitlines()[-1] == "['echo2']"
