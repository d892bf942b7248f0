"""A source and its workers on an emulated WAN, for benchmarks of the broadcast."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.conversation import Conversation
from benchmarks.wan import Host, Wan
from echo2.dissemination.broadcast.plan import Origin, Receiver, fluid_bound_s

REPOSITORY = Path(__file__).parent.parent
MBIT = 1e6 / 8
ROOMS_HELD = 3
"""Payloads that a worker has memory for: two that are whole and one on its way. Then the memory of the oldest is used again."""


class Loopback:
    """Hosts without a network between them: each is an address of 127.0.0.0/8."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def address(self, host: int) -> str:
        return f"127.0.77.{host + 1}"

    def spawn(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], **options)
        self._processes.append(process)
        return process


@dataclass(frozen=True, slots=True)
class Outcome:
    """One broadcast: seconds from its start until each worker had it, those that died left out, and the bound."""

    done_s: dict[int, float]
    bound_s: float
    relay_core_s_per_gb: float
    """Processor seconds of all workers, receiving included, per GB that they forwarded."""
    checks_core_s_per_gb: float
    """The same for decrypting and checking, which is not in the former."""
    forwarded_bytes: int
    source_core_s: float
    used_cores: float
    """Cores that the whole machine had busy meanwhile: near its number of cores the figure tells of it, not of the network."""
    sent_bytes: int
    duplicate_bytes: int
    events: list[str]

    @property
    def last_s(self) -> float:
        return max(self.done_s.values())

    @property
    def ratio(self) -> float:
        return self.last_s / self.bound_s


class Fleet:
    """Builds network and processes on entry; host 0 is the source."""

    def __init__(
        self,
        source: Host,
        workers: Sequence[Host],
        unreachable: Sequence[int] = (),
        network: Loopback | None = None,
        cap_bytes_per_s: float = 0.0,
    ) -> None:
        """`unreachable` counts workers from 1; without a `network` the hosts' links are emulated; 0 is no cap."""
        self._cap_bytes_per_s = cap_bytes_per_s
        self.source, self.workers = source, tuple(workers)
        self._network: Wan | Loopback = network or Wan([source, *workers])
        self._unreachable = set(unreachable)
        self._nodes: dict[int, Conversation] = {}
        self._version = 0

    def __enter__(self) -> Fleet:
        self._network.__enter__()
        try:
            self._start()
        except BaseException:
            self._network.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._network.__exit__(kind, error, trace)

    def broadcast(self, total_bytes: int, meanwhile: Callable[[], set[int]] = set) -> Outcome:
        """One snapshot to all; `meanwhile` is called when it has begun and returns the workers that it killed."""
        self._version += 1
        if self._version <= ROOMS_HELD:
            for number in self._nodes.keys() - {0}:
                self._nodes[number].ask(room=total_bytes)
        self._nodes[0].ask(version=self._version, bytes=total_bytes)
        busy_s, began_s = _machine_busy_s(), time.monotonic()
        self._nodes[0].tell(go=True)
        dead = meanwhile()
        told = self._nodes[0].hear()
        busy = (_machine_busy_s() - busy_s) / (time.monotonic() - began_s)
        for worker in dead:
            self._nodes.pop(worker)
        reports = {number: self._nodes[number].hear() for number in self._nodes if number}
        assert all(report["version"] == self._version and report["bytes"] == total_bytes for report in reports.values())
        forwarded = sum(report["forwarded_bytes"] for report in reports.values())
        checks_s = sum(report["checks_cpu_s"] for report in reports.values())
        return Outcome(
            done_s={number: report["done_s"] - told["start_s"] for number, report in reports.items()},
            bound_s=self.bound_s(total_bytes),
            relay_core_s_per_gb=(sum(report["cpu_s"] for report in reports.values()) - checks_s) / max(forwarded / 1e9, 1e-9),
            checks_core_s_per_gb=checks_s / max(forwarded / 1e9, 1e-9),
            forwarded_bytes=int(forwarded),
            source_core_s=told["cpu_s"],
            used_cores=busy,
            sent_bytes=told["sent_bytes"],
            duplicate_bytes=int(sum(report["duplicate_bytes"] for report in reports.values())),
            events=told["events"],
        )

    def bound_s(self, total_bytes: int) -> float:
        receivers = [
            Receiver(host.up_mbps * MBIT, host.down_mbps * MBIT, number not in self._unreachable)
            for number, host in enumerate(self.workers, start=1)
        ]
        return fluid_bound_s(total_bytes, Origin(self.source.up_mbps * MBIT), receivers)

    def kill(self, worker: int) -> None:
        """kill -9."""
        self._nodes[worker].process.kill()

    def _start(self) -> None:
        self._node(0, "source", self._network.address(0), str(self._cap_bytes_per_s))
        self._nodes[0].hear()
        for number in range(1, len(self.workers) + 1):
            serving = "unreachable" if number in self._unreachable else "serving"
            self._node(number, "worker", str(number), self._network.address(0), self._network.address(number), serving)
        self._nodes[0].ask(workers=len(self.workers))
        for number in range(1, len(self.workers) + 1):
            count = len(self.workers) - 1
            self._nodes[number].ask(peers=count - len(self._unreachable - {number}) if number in self._unreachable else count)

    def _node(self, host: int, *arguments: str) -> None:
        command = [sys.executable, "-m", "benchmarks.broadcast_node", *arguments]
        process = self._network.spawn(host, command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._nodes[host] = Conversation(process)


def _machine_busy_s() -> float:
    """Processor seconds that all cores have been busy since the machine started."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / 100
