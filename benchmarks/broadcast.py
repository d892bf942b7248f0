"""How long weights take to reach the last worker on an emulated WAN, beside other ways: `python -m benchmarks.broadcast`.

    python -m benchmarks.broadcast [--quick] [--json FILE] [--relaying-gbps RATE] [--libtorrent-python PROGRAM]

Ratios are times until the last worker has a snapshot, checked and decrypted, over the bound T*, which counts neither headers
nor distance; a round trip is 50 ms and a packet 9000 bytes unless the name says otherwise. `cold` is the first snapshot
on fresh connections, `warm` one on connections that carried another. Figures are medians of three; three fleets for `cold`.

Beside them, with 8 workers and 64 MB, all on fresh connections and so compared with `cold`: a star, which is nginx sending the
file to everybody; libtorrent 2.1.1, in an environment made on first use; and aria2. Who is missing is named in a line.

`delta` is the version after one step of Adam at a learning rate of 1e-6 from fresh bf16 weights of 59 M parameters
(benchmarks/delta.py), the worst there is; its publication is timed from the learner's memory to the first token of the last
of two workers (benchmarks/broadcast_publication.py).

Limits. Needs root (benchmarks/wan.py). All hosts share this machine's cores, where the emulated links cost about as much as the
broadcast: rates and sizes are scaled down together where workers would receive more than `--relaying-gbps` in sum, so that
times stay. The table tells the scale, and marks a run as bound by the processor that kept nearly all cores busy: its ratio is
an upper limit. Run it on a quiet machine; it takes a quarter of an hour, `--quick` less than a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from benchmarks import broadcast_rivals as rivals
from benchmarks import delta
from benchmarks.broadcast_fleet import Fleet, Loopback, Outcome
from benchmarks.broadcast_publication import publications
from benchmarks.wan import Host

MB = 1_000_000
CPU_BOUND_SHARE = 0.9
RELAYED_MB = 256
"""What relaying costs is told for the delta of a model of some billion parameters; smaller chunks cost more for each byte."""
PIECE_BYTES = 256 * 1024
"""Of the torrents: of those tried, the one with the shortest times."""
SYM = Host(200, 200)
ASYM_SOURCE, ASYM = Host(500, 500), Host(100, 500)
PUBLISHED_TO = 2


@dataclass(frozen=True)
class Scenario:
    """A fleet and the size of its snapshots; rates in Mbit/s."""

    source: Host
    workers: tuple[Host, ...]
    megabytes: int = 64
    unreachable: tuple[int, ...] = ()

    def scale(self, relaying_gbps: float) -> float:
        """Factor on rates and sizes that keeps the workers' receiving in sum under the limit."""
        return min(1.0, relaying_gbps * self.bound_s / (8e-3 * self.megabytes * len(self.workers)))

    @property
    def bound_s(self) -> float:
        return Fleet(self.source, self.workers, self.unreachable).bound_s(self.megabytes * MB)


@dataclass
class Figures:
    """What was measured, by name, with its target and what the machine had to do for it."""

    values: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, object]] = field(default_factory=list)

    def add(
        self,
        name: str,
        value: float,
        target: float | None,
        told: Mapping[str, object] = MappingProxyType({}),
        at_least: bool = False,
    ) -> None:
        met = target is None or (value >= target if at_least else value <= target)
        self.values[name] = round(value, 4)
        self.rows.append({"figure": name, "value": round(value, 4), "target": target, "met": met, **told})
        sign = ">=" if at_least else "<="
        aim = "" if target is None else f"{sign} {target:g} {'met' if met else 'MISSED'}"
        print(f"{name:36s} {value:8.3f}  {aim:15s} {'  '.join(f'{key} {value}' for key, value in told.items())}", flush=True)


def symmetric(workers: int, megabytes: int = 64) -> Scenario:
    return Scenario(SYM, (SYM,) * workers, megabytes)


def asymmetric(workers: int, megabytes: int = 64) -> Scenario:
    return Scenario(ASYM_SOURCE, (ASYM,) * workers, megabytes)


ADVERSITIES: dict[str, tuple[Scenario, float]] = {
    "ratio_slow_uplink": (Scenario(SYM, (*(SYM,) * 7, Host(25, 200))), 1.25),
    "ratio_unreachable": (Scenario(SYM, (SYM,) * 8, unreachable=(7, 8)), 1.25),
    "ratio_mixed_uplink": (
        Scenario(Host(300, 500), tuple(Host(up, 500) for up in (20, 40, 80, 120, 160, 200, 300, 400))),
        1.25,
    ),
    "ratio_mixed_rtt": (
        Scenario(replace(SYM, rtt_ms=20), tuple(replace(SYM, rtt_ms=20 + 80 * number / 7) for number in range(8))),
        1.25,
    ),
    "ratio_loss": (Scenario(replace(SYM, loss=0.001), (replace(SYM, loss=0.001),) * 8), 1.5),
}


class Benchmark:
    """Runs scenarios one after the other and collects figures."""

    def __init__(self, relaying_gbps: float, repeats: int) -> None:
        self.figures = Figures()
        self._relaying_gbps = relaying_gbps
        self._repeats = repeats

    def fleet(self, scenario: Scenario) -> tuple[Fleet, int, float]:
        """A fleet in this scenario, with the size of a snapshot in bytes and the scale."""
        scale = scenario.scale(self._relaying_gbps)
        hosts = [scaled(host, scale) for host in (scenario.source, *scenario.workers)]
        return Fleet(hosts[0], hosts[1:], scenario.unreachable), int(scenario.megabytes * MB * scale), scale

    def shape(self, kind: str, scenario: Scenario) -> Outcome:
        """Figures of an undisturbed fleet; returns its cold outcome."""
        colds, warms = [], []
        for _ in range(self._repeats):
            fleet, total_bytes, scale = self.fleet(scenario)
            with fleet:
                colds.append(fleet.broadcast(total_bytes))
                warms.append(fleet.broadcast(total_bytes))
        cold, warm = median(colds), median(warms)
        name = f"{kind}_n{len(scenario.workers)}_{scenario.megabytes}"
        self.figures.add(f"ratio_cold_{name}", cold.ratio, 1.25 if scenario.megabytes < 256 else 1.10, about(cold, scale))
        self.figures.add(f"ratio_warm_{name}", warm.ratio, 1.10, about(warm, scale))
        return cold

    def adversity(self, name: str) -> None:
        scenario, target = ADVERSITIES[name]
        fleet, total_bytes, scale = self.fleet(scenario)
        with fleet:
            fleet.broadcast(total_bytes)
            warm = median([fleet.broadcast(total_bytes) for _ in range(self._repeats)])
        self.figures.add(name, warm.ratio, target, about(warm, scale))

    def relays_killed(self) -> None:
        """One relay of eight killed halfway, then two more while the next snapshot is on its way."""
        undisturbed, ones, twos = [], [], []
        for _ in range(self._repeats):
            fleet, total_bytes, scale = self.fleet(symmetric(8))
            with fleet:
                fleet.broadcast(total_bytes)
                undisturbed.append(fleet.broadcast(total_bytes))
                half_s = undisturbed[-1].bound_s / 2
                ones.append(fleet.broadcast(total_bytes, killing(fleet, half_s, [1])))
                twos.append(fleet.broadcast(total_bytes, killing(fleet, half_s, [2, 3])))
        one, two = median(ones), min(twos, key=lambda outcome: len(outcome.done_s))
        ratio = one.last_s / median(undisturbed).last_s
        self.figures.add("relay_kill_over_undisturbed", ratio, 1.35, about(one, scale))
        self.figures.add("finished_after_three_of_eight_killed", len(two.done_s), 5, about(two, scale), at_least=True)

    def others(self, kind: str, scenario: Scenario, ours: Outcome, libtorrent_target: float, python: str | None) -> None:
        """Other ways, against ours."""
        fleet, total_bytes, scale = self.fleet(scenario)
        hosts = [fleet.source, *fleet.workers]

        def compare(name: str, target: float | None, last_s: float, **told: object) -> None:
            told |= {"last_s": round(last_s, 2), "over_bound": round(last_s / ours.bound_s, 2), "scale": round(scale, 3)}
            self.figures.add(f"{name}_over_ours_{kind}_64", last_s / ours.last_s, target, told, at_least=True)

        if python:
            runs = [rivals.libtorrent_s(hosts, total_bytes, PIECE_BYTES, python) for _ in range(self._repeats)]
            compare("libtorrent", libtorrent_target, statistics.median(runs))
        if rivals.aria2_is_here():
            runs = [rivals.aria2_s(hosts, total_bytes, PIECE_BYTES) for _ in range(self._repeats)]
            compare("aria2", None, statistics.median(runs))
        if rivals.nginx_is_here():
            # One run: nothing in it is left to chance.
            last_s, sent_s = rivals.nginx_s(hosts, total_bytes), total_bytes * 8e-6 * len(scenario.workers) / hosts[0].up_mbps
            compare("star", None, last_s, by="nginx", over_its_own_bound=round(last_s / sent_s, 3))

    def relay_cost(self) -> None:
        """Processor time of workers on loopback, where the network itself costs next to nothing but copies."""
        with Fleet(SYM, (SYM,) * 8, network=Loopback(), cap_bytes_per_s=40 * MB) as fleet:
            outcomes = [fleet.broadcast(RELAYED_MB * MB) for _ in range(2 + self._repeats)]
        warm = sorted(outcomes[2:], key=lambda outcome: outcome.relay_core_s_per_gb)[(self._repeats - 1) // 2]
        told = {"relayed_gb": round(warm.forwarded_bytes / 1e9, 2), "checks_besides": round(warm.checks_core_s_per_gb, 2)}
        self.figures.add("relay_core_s_per_gb", warm.relay_core_s_per_gb, 1.0, told)

    def deltas(self, scale: delta.Scale) -> None:
        """What a delta costs on one core, and what it saves from end to end."""
        pair = next(delta.pairs(scale))
        found = delta.figures_of(delta.delta_of(pair, scale.tries))
        told = {"changed": f"{pair.changed_share:.2%}", "full_mb": round(len(pair.target) / MB, 1)}
        self.figures.add("delta_share_of_full", found["delta_share_of_full"], 0.022, told)
        self.figures.add("delta_encode_gb_per_s", found["delta_encode_gb_per_s"], 1.0, at_least=True)
        self.figures.add("delta_decode_gb_per_s", found["delta_decode_gb_per_s"], 3.0, at_least=True)
        made = publications([SYM] * (1 + PUBLISHED_TO), delta.model_of(scale), pair.base, pair.target, self._repeats)
        last_s = {form: statistics.median(publication.last_s for publication in runs) for form, runs in made.items()}
        times = {
            "full_s": round(last_s["full"], 2),
            "delta_s": round(last_s["delta"], 3),
            "publish_s": round(statistics.median(publication.publish_s for publication in made["delta"]), 3),
            "workers": PUBLISHED_TO,
        }
        self.figures.add("delta_publish_speedup", last_s["full"] / last_s["delta"], 10.0, times, at_least=True)


def scaled(host: Host, scale: float) -> Host:
    return replace(host, up_mbps=host.up_mbps * scale, down_mbps=host.down_mbps * scale)


def median(outcomes: Sequence[Outcome]) -> Outcome:
    return sorted(outcomes, key=lambda outcome: outcome.last_s)[(len(outcomes) - 1) // 2]


def about(outcome: Outcome, scale: float) -> dict[str, object]:
    told: dict[str, object] = {
        "last_s": round(outcome.last_s, 2),
        "bound_s": round(outcome.bound_s, 2),
        "cores": round(outcome.used_cores, 2),
        "scale": round(scale, 3),
        "sent_mb": round(outcome.sent_bytes / 1e6, 1),
    }
    if outcome.used_cores > CPU_BOUND_SHARE * (os.cpu_count() or 1):
        told["processor"] = "bound"
    if outcome.events:
        told["events"] = len(outcome.events)
    return told


def killing(fleet: Fleet, after_s: float, workers: Sequence[int]) -> Callable[[], set[int]]:
    def kill() -> set[int]:
        time.sleep(after_s)
        for worker in workers:
            fleet.kill(worker)
        return set(workers)

    return kill


def run(arguments: argparse.Namespace) -> Figures:
    benchmark = Benchmark(arguments.relaying_gbps, 1 if arguments.quick else 3)
    benchmark.deltas(delta.FULL)
    ours = {"sym": benchmark.shape("sym", symmetric(8))}
    if arguments.quick:
        return benchmark.figures
    benchmark.relay_cost()
    ours["asym"] = benchmark.shape("asym", asymmetric(8))
    python = arguments.libtorrent_python or rivals.libtorrent_python()
    benchmark.others("sym", symmetric(8), ours["sym"], 2.0, python)
    benchmark.others("asym", asymmetric(8), ours["asym"], 1.3, python)
    for name in ADVERSITIES:
        benchmark.adversity(name)
    benchmark.relays_killed()
    for workers, megabytes in ((16, 64), (8, 256), (16, 256)):
        benchmark.shape("sym", symmetric(workers, megabytes))
        benchmark.shape("asym", asymmetric(workers, megabytes))
    return benchmark.figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.broadcast", description=(__doc__ or "").partition(":")[0] + ".")
    parser.add_argument("--quick", action="store_true", help="the figures that matter most, once each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--relaying-gbps", type=float, default=1.6, help="what all workers receive in sum at most, in Gbit/s")
    parser.add_argument("--libtorrent-python", metavar="PROGRAM", help="a Python that has libtorrent")
    arguments = parser.parse_args()
    # So that whoever ends it leaves no network behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    begun_s = time.monotonic()
    figures = run(arguments)
    print(f"{time.monotonic() - begun_s:.0f} s in all")
    if arguments.json:
        arguments.json.write_text(json.dumps({"figures": figures.values, "rows": figures.rows}, indent=2) + "\n")
    return 0 if all(row["met"] for row in figures.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
