"""How close the broadcast comes to its bound on an emulated WAN: `python -m benchmarks.broadcast [--quick] [--json FILE]`.

Each figure is the time until the last worker has a snapshot, checked and decrypted, over the bound T*, with 50 ms of round-trip
time, unless its name says otherwise. `cold` is the first snapshot on fresh connections, `warm` a later one. Needs root (see
benchmarks/wan.py). Rates and sizes are scaled down together, so that times stay, where all workers would otherwise relay more
than `--relaying-gbps` in sum: an emulated network on few cores is then bound by the processor. The table tells the scale, and
marks runs with the machine's cores nearly all busy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.broadcast_fleet import Fleet, Loopback, Outcome
from benchmarks.wan import Host, Wan

MB = 1_000_000
CHUNK_BYTES = 128 * 1024
CPU_BOUND_SHARE = 0.9
TORRENT = Path(__file__).parent / "broadcast_torrent.py"
SYM = Host(200, 200)
ASYM_SOURCE, ASYM = Host(500, 500), Host(100, 500)


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

    def add(self, name: str, value: float, target: float | None, at_least: bool = False, **about: object) -> None:
        met = target is None or (value >= target if at_least else value <= target)
        self.values[name] = round(value, 4)
        self.rows.append({"figure": name, "value": round(value, 4), "target": target, "met": met, **about})
        sign = ">=" if at_least else "<="
        aim = "" if target is None else f"{sign} {target:g} {'met' if met else 'MISSED'}"
        print(f"{name:34s} {value:8.3f}  {aim:16s} {'  '.join(f'{key} {told}' for key, told in about.items())}", flush=True)


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
        chunk_bytes = max(16 * 1024, int(CHUNK_BYTES * scale) // 1024 * 1024)
        return Fleet(hosts[0], hosts[1:], scenario.unreachable, chunk_bytes), int(scenario.megabytes * MB * scale), scale

    def cold_and_warm(self, scenario: Scenario) -> tuple[Outcome, Outcome, float]:
        fleet, total_bytes, scale = self.fleet(scenario)
        with fleet:
            cold = fleet.broadcast(total_bytes)
            warm = [fleet.broadcast(total_bytes) for _ in range(self._repeats if scenario.megabytes < 256 else 1)]
        return cold, median(warm), scale

    def shape(self, kind: str, scenario: Scenario) -> Outcome:
        """Figures of an undisturbed fleet; returns its warm outcome."""
        cold, warm, scale = self.cold_and_warm(scenario)
        name = f"{kind}_n{len(scenario.workers)}_{scenario.megabytes}"
        self.figures.add(f"ratio_cold_{name}", cold.ratio, 1.25 if scenario.megabytes < 256 else 1.10, **about(cold, scale))
        self.figures.add(f"ratio_warm_{name}", warm.ratio, 1.10, **about(warm, scale))
        return warm

    def adversity(self, name: str) -> None:
        scenario, target = ADVERSITIES[name]
        _, warm, scale = self.cold_and_warm(scenario)
        self.figures.add(name, warm.ratio, target, **about(warm, scale))

    def relays_killed(self) -> None:
        """One relay of eight killed halfway, then two more while the next snapshot is on its way."""
        fleet, total_bytes, scale = self.fleet(symmetric(8))
        with fleet:
            fleet.broadcast(total_bytes)
            undisturbed = fleet.broadcast(total_bytes)
            half_s = undisturbed.bound_s / 2
            one = fleet.broadcast(total_bytes, killing(fleet, half_s, [1]))
            two = fleet.broadcast(total_bytes, killing(fleet, half_s, [2, 3]))
        self.figures.add("relay_kill_over_undisturbed", one.last_s / undisturbed.last_s, 1.35, **about(one, scale))
        self.figures.add("finished_after_three_of_eight_killed", len(two.done_s), 5, at_least=True, **about(two, scale))

    def star(self, ours: Outcome) -> None:
        """The source alone sends to everybody: the same transport with nobody reachable."""
        scenario = replace(symmetric(8), unreachable=tuple(range(1, 9)))
        fleet, total_bytes, scale = self.fleet(replace(scenario, unreachable=()))
        star = Fleet(fleet.source, fleet.workers, scenario.unreachable, fleet.chunk_bytes)
        with star:
            outcome = star.broadcast(total_bytes)
        told = {"by": "own transport, nobody reachable", **about(outcome, scale)}
        self.figures.add("star_over_ours_sym_64", outcome.last_s / ours.last_s, None, **told)

    def torrent(self, kind: str, scenario: Scenario, ours: Outcome, target: float, python: str) -> None:
        """libtorrent on fresh connections, as it has no standing ones, against ours."""
        fleet, total_bytes, scale = self.fleet(scenario)
        last_s = torrent_s([fleet.source, *fleet.workers], total_bytes, 1 << (2 * fleet.chunk_bytes - 1).bit_length(), python)
        name = f"libtorrent_over_ours_{kind}_64"
        self.figures.add(
            name, last_s / ours.last_s, target, at_least=True, libtorrent_s=round(last_s, 2), scale=round(scale, 3)
        )

    def relay_cost(self) -> None:
        """Processor time of workers on loopback, where the network itself costs next to nothing but copies."""
        with Fleet(SYM, (SYM,) * 8, chunk_bytes=256 * 1024, network=Loopback(), cap_bytes_per_s=40 * MB) as fleet:
            outcomes = [fleet.broadcast(32 * MB) for _ in range(5)]
        warm = median(outcomes[-2:])
        told = {"relayed_gb": round(warm.forwarded_bytes / 1e9, 2), "checks_besides": round(warm.checks_core_s_per_gb, 2)}
        self.figures.add("relay_core_s_per_gb", warm.relay_core_s_per_gb, 1.0, **told)


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


def torrent_s(hosts: Sequence[Host], total_bytes: int, piece_bytes: int, python: str) -> float:
    """Seconds until the last host of a swarm has the file."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, Wan(hosts) as wan:
        seed, torrent = Path(folder, "0", "payload"), Path(folder, "torrent")
        seed.parent.mkdir()
        seed.write_bytes(os.urandom(total_bytes))
        subprocess.run([python, str(TORRENT), "make", str(seed), str(torrent), str(piece_bytes)], check=True)
        addresses = [wan.address(number) for number in range(len(hosts))]
        nodes = []
        for number in range(len(hosts)):
            Path(folder, str(number)).mkdir(exist_ok=True)
            command = [python, str(TORRENT), str(number), str(Path(folder, str(number))), str(torrent), *addresses]
            nodes.append(wan.spawn(number, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        outputs = [node.stdout for node in nodes if node.stdout is not None]
        for output in outputs:
            output.readline()
        begun_s = time.monotonic()
        for node in nodes:
            assert node.stdin is not None
            node.stdin.write(b"go\n")
            node.stdin.flush()
        return max(json.loads(output.readline())["done_s"] for output in outputs[1:]) - begun_s


def run(arguments: argparse.Namespace) -> Figures:
    benchmark = Benchmark(arguments.relaying_gbps, 1 if arguments.quick else 3)
    ours = {"sym": benchmark.shape("sym", symmetric(8)), "asym": benchmark.shape("asym", asymmetric(8))}
    for name in ("ratio_slow_uplink",) if arguments.quick else ADVERSITIES:
        benchmark.adversity(name)
    benchmark.relays_killed()
    benchmark.relay_cost()
    if arguments.quick:
        return benchmark.figures
    benchmark.star(ours["sym"])
    for workers, megabytes in ((8, 256), (16, 64), (16, 256)):
        benchmark.shape("sym", symmetric(workers, megabytes))
        benchmark.shape("asym", asymmetric(workers, megabytes))
    if arguments.libtorrent_python:
        benchmark.torrent("sym", symmetric(8), ours["sym"], 2.0, arguments.libtorrent_python)
        benchmark.torrent("asym", asymmetric(8), ours["asym"], 1.3, arguments.libtorrent_python)
    return benchmark.figures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="the figures that matter most, in less than a minute")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--relaying-gbps", type=float, default=1.6, help="what all workers receive in sum at most, in Gbit/s")
    parser.add_argument("--libtorrent-python", help="a Python that has libtorrent, to compare with it")
    arguments = parser.parse_args()
    figures = run(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps({"figures": figures.values, "rows": figures.rows}, indent=2))
    return 0 if all(row["met"] for row in figures.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
