"""What the tests' clouds have in common: a network with hosts, processes that end with it, and SkyPilot kept to itself.

To be used inside of `lab.sh`, where all of this is nobody else's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from echo2.hub.client import HubClient
from echo2.hub.inspection import costs_of
from echo2.run_directory import RunDirectory

REPOSITORY = Path(__file__).parents[2]
INSIDE = os.environ.get("ECHO2_LAB") == "entered"
ENVIRONMENT = Path(sys.prefix)
"""With SkyPilot; it stands in for what SkyPilot would download to each machine."""
WORKERS = REPOSITORY / ".venv"
"""With torch."""


def sh(*command: str, **options) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}"
    return done.stdout


def add_host(name: str, address: str, gateway: str) -> None:
    """A network namespace on the bridge; `address` and `gateway` as 10.0.0.2/24 and 10.0.0.1."""
    link = f"l{name[-13:]}"
    sh("ip", "netns", "add", name)
    sh("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
    sh("ip", "link", "set", link, "master", "lab0", "up")
    for setting in (f"addr add {address} dev eth0", "link set lo up", "link set eth0 up", f"route add default via {gateway}"):
        sh("ip", "-n", name, *setting.split())


def protect(*folders: Path) -> None:
    """Whatever root does on a machine, these stay as they are."""
    for folder in folders:
        path = str(folder.resolve())
        sh("mount", "--bind", path, path)
        sh("mount", "-o", "remount,ro,bind", path)


class Daemons:
    """Processes in the foreground of their own log files."""

    def __init__(self, logs: Path) -> None:
        self._logs, self._running = logs, list[subprocess.Popen[bytes]]()
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, *command: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        quiet = {"stdin": subprocess.DEVNULL, "cwd": REPOSITORY, "env": environment}
        with (self._logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, **quiet)
        self._running.append(process)
        return process

    def echo2(self, home: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """The command `echo2` of this repository, in the Python environment `home`."""
        return self.start(arguments[0], str(home / "bin/python"), "-m", "echo2", *arguments, environment=environment)

    def said(self) -> str:
        """The end of each log."""
        return "\n".join(f"--- {log.name}\n{log.read_text()[-6000:]}" for log in sorted(self._logs.iterdir()))

    def stop(self) -> None:
        for process in reversed(self._running):
            process.terminate()
        for process in self._running:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def processes_with(mark: str) -> list[str]:
    """Command lines of all processes here that contain `mark`."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and folder.name != str(os.getpid()):
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if mark in line:
                found.append(line)
    return found


def wheel_hash() -> str:
    """Of the wheel that SkyPilot would install on machines."""
    (folder,) = [entry for entry in (ENVIRONMENT / "wheels").iterdir() if entry.is_dir()]
    return folder.name


class SkyPilot:
    """SkyPilot in a home of its own."""

    def __init__(self, home: Path, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        """`environment` is for its server and clients, beside what they have anyway."""
        self.home = home
        (home / ".sky").mkdir(parents=True)
        sh("cp", "-r", str(ENVIRONMENT / "wheels"), str(home / ".sky/wheels"))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "SKYPILOT_", "ECHO2_"))}
        path = f"{ENVIRONMENT}/bin:{os.environ['PATH']}"
        own = {"HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "PATH": path}
        self.environment = inherited | own | environment

    def write(self, name: str, content: str) -> None:
        """A file of its home."""
        file = self.home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)

    def start(self) -> None:
        """Its server, which is there a while later; whoever needs it earlier waits."""
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.Popen([str(ENVIRONMENT / "bin/sky"), "api", "start"], env=self.environment, cwd=self.home, **quiet)

    def __call__(self, *arguments: str) -> str:
        """Output of the command `sky`."""
        return sh(str(ENVIRONMENT / "bin/sky"), *arguments, env=self.environment, cwd=self.home)

    def clusters(self) -> list[str]:
        """Names of all clusters that SkyPilot knows, refreshed from the cloud."""
        code = "import sky; print(*[c['name'] for c in sky.get(sky.status(refresh=sky.StatusRefreshMode.FORCE))])"
        return sh(sys.executable, "-c", code, env=self.environment, cwd=self.home).splitlines()[-1].split()

    def stop(self) -> None:
        self("api", "stop")


def ready(client: HubClient) -> set[str]:
    """Names of the workers that hold a version."""
    return {member.name for member in client.crew() if member.live and member.ready}


def launches_and_losses(run: RunDirectory) -> dict[str, tuple[int, int]]:
    """By offer, as the ledger has them."""
    return {cost.offer: (cost.launches, cost.lost) for cost in costs_of(run).offers}
