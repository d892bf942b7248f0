"""Records of when spot machines could be had: how many, zone by zone, as somebody measured them.

Invariants: nothing is fetched; the zones of a set were watched at the same time, and are about one kind of machine; what cannot
be read is named with its file.

A file `ZONE_MACHINE.json` holds `metadata.gap_seconds` and either `data`, the machines at each of these intervals, as
skypilot-org/spot-traces has it, or `runs`, the same in pairs: how many machines, for how many intervals. The folder's name
begins with the cloud's, as in `aws-08-27-2023`.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

from echo2.errors import UserError

SHIPPED = Path(str(resources.files("clouds").joinpath("spot_traces")))
"""The traces that come with the program; SOURCE.md there says whose they are."""

LONGEST_S = 366 * 86400.0
"""Longest time that a zone is believed to have been watched."""

DEFAULT_TRACES = SHIPPED / "availability/16-node/aws-08-27-2023"
"""What is replayed where nothing is named: the set with the most machines to a zone."""


@dataclass(frozen=True, slots=True)
class ZoneTrace:
    """What one zone had."""

    zone: str
    gap_s: float
    runs: tuple[tuple[int, int], ...]
    """(machines, intervals), one after the other."""

    @property
    def duration_s(self) -> float:
        """How long it was watched."""
        return self.gap_s * sum(intervals for _, intervals in self.runs)

    @property
    def region(self) -> str:
        """Of the zone.

        >>> ZoneTrace("us-east-1f", 60.0, ()).region, ZoneTrace("us-central1-a", 60.0, ()).region
        ('us-east-1', 'us-central1')
        """
        return re.sub(r"-?[a-z]$", "", self.zone)

    def changes(self) -> Iterator[tuple[float, int]]:
        """(second, machines from then on), the first at 0."""
        at_s = 0.0
        for machines, group in groupby(self.runs, key=lambda run: run[0]):
            yield at_s, machines
            at_s += self.gap_s * sum(intervals for _, intervals in group)


@dataclass(frozen=True, slots=True)
class TraceSet:
    """Zones that were watched at the same time."""

    name: str
    """Folder and kind of machine."""
    cloud: str
    zones: tuple[ZoneTrace, ...]

    @property
    def duration_s(self) -> float:
        """How long all of them were watched."""
        return min(zone.duration_s for zone in self.zones)

    @property
    def most_machines(self) -> int:
        """The most that any zone had, which is the most that anybody asked for."""
        return max(machines for zone in self.zones for machines, _ in zone.runs)

    def mean(self, figure: Callable[[int], float], most_s: float = math.inf) -> float:
        """Over time, of a figure of the machines that all zones have together, for `most_s` at most.

        >>> day = ZoneTrace("us-east-1a", 3600.0, ((0, 18), (2, 6))), ZoneTrace("us-east-1b", 3600.0, ((1, 24),))
        >>> TraceSet("a day", "aws", day).mean(lambda machines: machines >= 2)
        0.25
        """
        total, at_s, end_s = 0.0, 0.0, min(most_s, self.duration_s)
        counts = dict.fromkeys((zone.zone for zone in self.zones), 0)
        for change_s, zone, machines in [*self.changes(), (end_s, self.zones[0].zone, 0)]:
            until_s = min(change_s, end_s)
            total += (until_s - at_s) * figure(sum(counts.values()))
            counts[zone], at_s = machines, until_s
        return total / end_s

    def changes(self) -> list[tuple[float, str, int]]:
        """(second, zone, machines from then on), in order, as long as all zones were watched."""
        found, end_s = (
            [(at_s, zone.zone, machines) for zone in self.zones for at_s, machines in zone.changes()],
            self.duration_s,
        )
        return sorted(change for change in found if change[0] < end_s)


def read_traces(folder: Path) -> list[TraceSet]:
    """All sets below `folder`, by name. Raises UserError where there are none, or a file is damaged."""
    if not folder.is_dir():
        raise UserError(f"--spot-traces {folder} is no folder: name one with files like us-east-1a_v100_1.json")
    files = sorted(folder.rglob("*.json"))
    kinds: dict[tuple[Path, str], list[ZoneTrace]] = defaultdict(list)
    for file in files:
        zone, _, kind = file.stem.partition("_")
        if not kind:
            raise UserError(f"{file} is not called ZONE_MACHINE.json: rename it, or name a folder of traces alone")
        kinds[file.parent, kind].append(_read_zone(file, zone))
    if not kinds:
        raise UserError(f"--spot-traces {folder} has no .json files: name a folder with files like us-east-1a_v100_1.json")
    return [_make_set(parent, kind, zones) for (parent, kind), zones in sorted(kinds.items())]


def _make_set(parent: Path, kind: str, zones: Sequence[ZoneTrace]) -> TraceSet:
    resolved = parent.resolve()
    return TraceSet(f"{resolved.name} {kind}", resolved.name.partition("-")[0], tuple(zones))


def _read_zone(file: Path, zone: str) -> ZoneTrace:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return _checked(ZoneTrace(zone, _positive(content["metadata"]["gap_seconds"]), tuple(_read_runs(content))))
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): name a folder that you may read") from None
    except (ValueError, TypeError, KeyError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else error
        raise UserError(f"{file} is no spot trace ({reason}): get it anew, or move it elsewhere") from None


def _checked(trace: ZoneTrace) -> ZoneTrace:
    if trace.duration_s > LONGEST_S:
        intervals = sum(intervals for _, intervals in trace.runs)
        raise ValueError(
            f"{intervals:,} intervals of gap_seconds = {trace.gap_s:g} are {trace.duration_s / 86400:,.0f} days, which exceeds "
            f"{LONGEST_S / 86400:.0f}"
        )
    return trace


def _read_runs(content: dict[str, Any]) -> Iterator[tuple[int, int]]:
    if "runs" in content:
        runs = [(_count(machines), _count(intervals)) for machines, intervals in content["runs"]]
    else:
        runs = [(_count(machines), len(list(group))) for machines, group in groupby(content["data"])]
    if not sum(intervals for _, intervals in runs):
        raise ValueError("it has no data")
    yield from runs


def _count(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no number of machines or intervals")
    return value


def _positive(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"gap_seconds = {value!r} is no time")
    return float(value)
