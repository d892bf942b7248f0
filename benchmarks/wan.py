"""A wide-area network on one machine: hosts in network namespaces of their own, joined by a router with rates, delay and loss.

    with Wan([Host(200, 200, rtt_ms=50), Host(100, 500, rtt_ms=50)]) as wan:
        wan.spawn(1, ["ping", "-c1", wan.address(0)]).wait()

Needs root, `ip`, `tc`, `setpriv`, and a kernel with namespaces, veth, tbf and NFQUEUE; uses addresses of its namespaces only.
Invariants: nothing is left behind: what a killed run left is removed when the next one begins; runs at the same time do not
meet; the delay between two hosts is half the mean of their round-trip times, each way.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

PREFIX = "echo2wan"
MTU = 9000
BURST = "128kb"
LEAST_QUEUE_BYTES = 256 * 1024
LEAST_SENDER_QUEUE_BYTES = 4 * 1024 * 1024
DELAY = Path(__file__).parent / "wan_delay.py"
TCP = {
    "net.ipv4.tcp_congestion_control": "cubic",
    "net.ipv4.tcp_no_metrics_save": "1",
    "net.ipv4.tcp_slow_start_after_idle": "0",
    "net.ipv4.tcp_rmem": "4096 1048576 67108864",
    "net.ipv4.tcp_wmem": "4096 1048576 67108864",
}


@dataclass(frozen=True, slots=True)
class Host:
    """One host's link: Mbit/s up and down, round-trip time to a host of the same kind, and loss as a share of packets."""

    up_mbps: float
    down_mbps: float
    rtt_ms: float = 50.0
    loss: float = 0.0


class Wan:
    """Builds the network on entry and removes it on exit."""

    def __init__(self, hosts: Sequence[Host], mtu: int = MTU) -> None:
        self.hosts = list(hosts)
        self._mtu = mtu
        self._name = f"{PREFIX}-{os.getpid()}"
        self._core = f"{self._name}-core"
        self._folder = tempfile.TemporaryDirectory(prefix=f"{PREFIX}-")
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Wan:
        sweep()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def namespace(self, host: int) -> str:
        return f"{self._name}-h{host}"

    def address(self, host: int) -> str:
        return f"10.77.{host}.2"

    def spawn(self, host: int, command: Sequence[str], **options: object) -> subprocess.Popen[bytes]:
        """Start a process on a host; it ends with the network, or with this process."""
        return self._spawn(self.namespace(host), command, **options)

    def _spawn(self, namespace: str, command: Sequence[str], **options: object) -> subprocess.Popen[bytes]:
        start = ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", namespace, *command]
        process: subprocess.Popen[bytes] = subprocess.Popen(start, **options)  # type: ignore[call-overload]
        self._processes.append(process)
        return process

    def _build(self) -> None:
        names = [self._core, *(self.namespace(host) for host in range(len(self.hosts)))]
        _batch("ip", [f"netns add {name}" for name in names])
        allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
        if "cubic" not in allowed.read_text():
            allowed.write_text(allowed.read_text().strip() + " cubic")
        _sysctl(self._core, {"net.ipv4.ip_forward": "1", "net.ipv4.conf.all.rp_filter": "0"})
        for number, host in enumerate(self.hosts):
            self._connect(number, host)
        self._start_delay()

    def _connect(self, number: int, host: Host) -> None:
        there = self.namespace(number)
        segments = f" gso_max_size {self._mtu}" if any(other.loss for other in self.hosts) else ""
        _batch(
            "ip",
            [f"link add l{number} netns {self._core} mtu {self._mtu} type veth peer name eth0 netns {there} mtu {self._mtu}"],
        )
        _batch("ip", [f"addr add 10.77.{number}.1/24 dev l{number}", f"link set l{number} up"], self._core)
        _batch(
            "ip",
            [
                "link set lo up",
                f"addr add {self.address(number)}/24 dev eth0",
                f"link set eth0{segments} up",
                f"route add default via 10.77.{number}.1 initcwnd 2",
            ],
            there,
        )
        up, down = (_rate(host.up_mbps), host.rtt_ms), (_rate(host.down_mbps), host.rtt_ms)
        up_queue = max(4 * _product(*up), LEAST_SENDER_QUEUE_BYTES)
        down_queue = max(_product(*down), LEAST_QUEUE_BYTES)
        _batch("tc", [f"qdisc add dev eth0 root tbf rate {_rate(host.up_mbps)}bit burst {BURST} limit {up_queue}"], there)
        _batch(
            "tc",
            [f"qdisc add dev l{number} root tbf rate {_rate(host.down_mbps)}bit burst {BURST} limit {down_queue}"],
            self._core,
        )
        _sysctl(there, TCP)

    def _start_delay(self) -> None:
        links = json.loads(_output(["ip", "-j", "-n", self._core, "link"]))
        indices = {int(link["ifname"][1:]): link["ifindex"] for link in links if link["ifname"] != "lo"}
        rows = []
        for came, leaves in ((a, b) for a in indices for b in indices if a != b):
            one, other = self.hosts[came], self.hosts[leaves]
            delay_us = round((one.rtt_ms + other.rtt_ms) / 4 * 1000)
            rows.append(f"{indices[came]} {indices[leaves]} {delay_us} {round(max(one.loss, other.loss) * 1e6)}")
        table = Path(self._folder.name) / "delays"
        table.write_text("\n".join(rows))
        delay = self._spawn(self._core, [sys.executable, str(DELAY), str(table)], stdout=subprocess.PIPE)
        assert delay.stdout is not None
        if delay.stdout.readline() != b"ready\n":
            raise RuntimeError("the delay of the emulated network did not start: it needs root and NFQUEUE in the kernel")
        self.delay_pid = delay.pid

    def _remove(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        _remove_namespaces([name for name in _namespaces() if name.startswith(f"{self._name}-")])
        self._folder.cleanup()


def sweep() -> None:
    """Remove what runs left whose process is gone."""
    orphans = [name for name in _namespaces() if name.startswith(PREFIX) and not _alive(int(name.split("-")[1]))]
    _remove_namespaces(orphans)


def _rate(mbps: float) -> int:
    return round(mbps * 1e6)


def _product(bits_per_s: int, rtt_ms: float) -> int:
    """Bandwidth-delay product in bytes."""
    return int(bits_per_s / 8 * max(rtt_ms, 20.0) / 1000)


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _output(["ip", "netns", "list"]).splitlines() if line.strip()]


def _remove_namespaces(names: Sequence[str]) -> None:
    for name in names:
        for pid in _output(["ip", "netns", "pids", name]).split():
            os.kill(int(pid), signal.SIGKILL)
        _output(["ip", "netns", "delete", name])


def _sysctl(namespace: str, settings: dict[str, str]) -> None:
    _output(["ip", "netns", "exec", namespace, "sysctl", "-qw", *(f"{name}={value}" for name, value in settings.items())])


def _batch(tool: str, lines: Sequence[str], namespace: str | None = None) -> None:
    inside = ["-n", namespace] if namespace else []
    _output([tool, *inside, "-b", "-"], "\n".join(lines) + "\n")


def _output(command: Sequence[str], given: str | None = None) -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}{' for: ' + given if given else ''}")
    return done.stdout
