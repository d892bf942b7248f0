"""A run's metrics as curves over its steps.

Invariant: what lies beyond an axis is marked where it would be, and told with its largest value.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from echo2.capacity.tables import counted
from echo2.dissemination.broadcast.record import BroadcastRecord
from echo2.durability import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = (
    ("share", ("reward", "exact_match", "eval/reward", "eval/pass@1")),
    ("steps", ("staleness/mean", "staleness/max")),
    ("s per step", ("learner/step_s", "learner/wait_s")),
    ("utilisation, %", ("capacity/predicted_utilisation", "capacity/observed_utilisation")),
)
"""The axes and what they show."""

Steps = Sequence[Mapping[str, float]]

SHOWN_SHARE = 0.98
"""Share of the steps whose times fit on their axis: one long wait would flatten all others."""

HEADROOM = 1.2
TOP_MARK = 0.98
"""Height on an axis at which a step beyond it is marked."""


def write_curves(file: Path, title: str, staleness_bound: int, steps: Steps) -> None:
    """Draw the curves of at least one step into a PNG file. Raises OSError where it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 11), constrained_layout=True)
    draw_curves(figure, title, staleness_bound, steps)
    _write(file, figure)


def write_broadcast(file: Path, record: BroadcastRecord) -> None:
    """Draw when each worker had how much of a version into a PNG file; one curve per worker, and T* beside them.

    Raises OSError where it cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), constrained_layout=True)
    axis = figure.subplots()
    for arrival in record.arrivals:
        times_s = sorted(arrival.chunk_arrivals_s)
        shares = [100 * (place + 1) / len(times_s) for place in range(len(times_s))]
        axis.step([0.0, *times_s], [0.0, *shares], where="post", label=arrival.worker)
    if record.bound_s:
        axis.axvline(record.bound_s, color="grey", linestyle="--", label="bound T*")
    axis.set_xlabel("s since the announcement")
    axis.set_ylabel(f"of {record.total_bytes:,} bytes, %")
    axis.set_ylim(0, 102)
    axis.set_xlim(left=0)
    axis.grid(alpha=0.3)
    axis.legend(loc="best", frameon=False, fontsize="small")
    figure.suptitle(f"version {record.version} on its way to {counted(len(record.arrivals), 'worker')}")
    _write(file, figure)


def _write(file: Path, figure: Figure) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    write_atomically(file, picture.getvalue())


def draw_curves(figure: Figure, title: str, staleness_bound: int, steps: Steps) -> None:
    """One axis per panel, one above the other."""
    axes: Sequence[Axes] = figure.subplots(len(PANELS), 1, sharex=True)
    for axis, (unit, names) in zip(axes, PANELS, strict=True):
        percent = 100 if unit.endswith("%") else 1
        for name in names:
            place, marker = ("eval/version", "o") if name.startswith("eval/") else ("step", None)
            shown = [(step[place], percent * step[name]) for step in steps if name in step]
            if shown:
                axis.plot(*zip(*shown, strict=True), label=name, marker=marker)
        if unit == "steps":
            axis.axhline(staleness_bound, color="grey", linestyle="--", label="bound S")
        if unit == "s per step":
            _cut(axis, steps, names)
        if percent == 100:
            axis.set_ylim(0, 100)
        axis.set_ylabel(unit)
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(loc="best", frameon=False)
    axes[-1].set_xlabel("learner step")
    figure.suptitle(title)


def _cut(axis: Axes, steps: Steps, names: Sequence[str]) -> None:
    """Fit the axis to `SHOWN_SHARE` of the steps, and mark the others at its top."""
    totals = sorted(sum(step[name] for name in names) for step in steps)
    highest = HEADROOM * totals[int(SHOWN_SHARE * (len(totals) - 1))]
    axis.set_ylim(0, highest)
    beyond = [(step["step"], step[name]) for step in steps for name in names if step[name] > highest]
    if not beyond:
        return
    places = [step for step, _ in beyond]
    axis.plot(places, [TOP_MARK * highest] * len(places), "^", color="black", markersize=4, label="off scale")
    step, longest = max(beyond, key=lambda entry: entry[1])
    axis.annotate(
        f"{len(beyond)} off scale, the longest {longest:.3g} s in step {step:.0f}",
        xy=(0.01, 0.9),
        xycoords="axes fraction",
        fontsize="small",
    )
