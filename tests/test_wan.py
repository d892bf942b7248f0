"""The emulated wide-area network of the benchmarks."""

import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))
from benchmarks.wan import PREFIX, Host, Wan  # noqa: E402

TOOLS = ("ip", "tc", "setpriv", "sysctl")
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or any(shutil.which(tool) is None for tool in TOOLS), reason=f"needs root and {', '.join(TOOLS)}"
)

LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    while connection.recv(1 << 16):
        pass
    connection.sendall(b"x")
    connection.close()
"""
SEND = """
import socket, sys, time
for total in (1, int(sys.argv[2])):
    start = time.monotonic()
    connection = socket.create_connection((sys.argv[1], 5000))
    connected = time.monotonic() - start
    connection.sendall(bytes(total))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    print(connected, time.monotonic() - start, flush=True)
"""


def namespaces():
    return [
        line for line in subprocess.check_output(["ip", "netns", "list"], text=True).splitlines() if line.startswith(PREFIX)
    ]


def test_delay_and_rate_are_those_that_were_asked_for_and_nothing_is_left_behind():
    with Wan([Host(100, 100, rtt_ms=40), Host(20, 100, rtt_ms=40)]) as wan:
        server = wan.spawn(0, [sys.executable, "-c", LISTEN, wan.address(0)], stdout=subprocess.PIPE)
        assert server.stdout.readline() == b"ready\n"
        client = wan.spawn(1, [sys.executable, "-c", SEND, wan.address(0), "5000000"], stdout=subprocess.PIPE)
        lines = [[float(field) for field in line.split()] for line in client.communicate(timeout=30)[0].splitlines()]
        mine = [line for line in namespaces() if f"{PREFIX}-{os.getpid()}-" in line]
        assert len(mine) == 3
    assert 0.039 < statistics.median(connected for connected, _ in lines) < 0.2
    assert 2.0 < lines[1][1] < 5.0
    assert server.poll() is not None
    assert [line for line in namespaces() if f"{PREFIX}-{os.getpid()}-" in line] == []


def test_what_a_killed_run_left_is_removed_by_the_next():
    code = (
        "import time; from benchmarks.wan import Host, Wan; Wan([Host(9, 9)]).__enter__(); print(1, flush=True); time.sleep(60)"
    )
    killed = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE)
    assert killed.stdout.readline() == b"1\n"
    killed.kill()
    killed.wait()
    left = f"{PREFIX}-{killed.pid}-"
    assert any(line.startswith(left) for line in namespaces())
    time.sleep(0.2)
    with Wan([Host(10, 10)]):
        assert not any(line.startswith(left) for line in namespaces())
