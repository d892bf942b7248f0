"""What the broadcast is compared with, on the same emulated WAN: nginx to everybody, and BitTorrent by libtorrent and aria2.

Each way is given what helps it: nginx's clients throw away what they read and check nothing; the swarms are tuned for few hosts
on fast links, everybody is unchoked, nothing is encrypted, and the clock starts when the file has long been hashed. All run on
fresh connections, since none of them keeps connections for the next file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.conversation import Conversation
from benchmarks.peer_environment import peer_python
from benchmarks.wan import Host, Wan

LIBTORRENT = "libtorrent-2.1.1"
TORRENT_NODE = Path(__file__).parent / "broadcast_torrent.py"
RIVAL_NODE = Path(__file__).parent / "broadcast_rival_node.py"
TRACKER_PORT = 6969
NGINX = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log stderr;
events {{ worker_connections 256; }}
http {{
    access_log off; sendfile on; tcp_nopush on; tcp_nodelay on;
    client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
    uwsgi_temp_path {folder}; scgi_temp_path {folder};
    server {{ listen {address}:8000; root {folder}; }}
}}
"""
ARIA2 = {
    "bt-enable-lpd": "false",
    "enable-dht": "false",
    "enable-dht6": "false",
    "enable-peer-exchange": "true",
    "disable-ipv6": "true",
    "bt-max-peers": "0",
    "bt-request-peer-speed-limit": "10000M",
    "bt-tracker-interval": "1",
    "seed-ratio": "0.0",
    "check-integrity": "true",
    "file-allocation": "none",
    "disk-cache": "256M",
    "listen-port": "6881",
    "summary-interval": "0",
    "console-log-level": "error",
    "quiet": "true",
    "no-conf": "true",
}


def nginx_s(hosts: Sequence[Host], total_bytes: int) -> float:
    """Seconds until the last client has read the file from nginx on host 0."""
    with _payload(total_bytes) as folder, Wan(hosts) as wan:
        settings = folder / "nginx.conf"
        settings.write_text(NGINX.format(folder=folder / "0", address=wan.address(0)))
        wan.spawn(0, ["nginx", "-c", str(settings)])
        url = f"http://{wan.address(0)}:8000/payload"
        nodes = [_node(wan, host, [sys.executable, str(RIVAL_NODE), "download", url]) for host in range(1, len(hosts))]
        return _last_s(nodes)


def libtorrent_s(hosts: Sequence[Host], total_bytes: int, piece_bytes: int, python: str) -> float:
    """Seconds until the last host of a swarm has the file; `python` has libtorrent."""
    with _payload(total_bytes) as folder, Wan(hosts) as wan:
        torrent = _torrent(folder, piece_bytes, "")
        addresses = [wan.address(number) for number in range(len(hosts))]
        nodes = []
        for number in range(len(hosts)):
            place = folder / str(number)
            place.mkdir(exist_ok=True)
            command = [python, str(TORRENT_NODE), str(number), str(place), str(torrent), *addresses]
            nodes.append(_node(wan, number, command))
        return _last_s(nodes[1:], also=nodes[:1])


def aria2_s(hosts: Sequence[Host], total_bytes: int, piece_bytes: int) -> float:
    """The same with aria2, which finds the others by a tracker on host 0."""
    with _payload(total_bytes) as folder, Wan(hosts) as wan:
        torrent = _torrent(folder, piece_bytes, f"http://{wan.address(0)}:{TRACKER_PORT}/announce")
        track = ["track", wan.address(0), str(TRACKER_PORT), str(len(hosts))]
        tracker = _node(wan, 0, [sys.executable, str(RIVAL_NODE), *track])
        tracker.hear()
        options = [f"--{name}={value}" for name, value in ARIA2.items()]
        hook = folder / "whole"
        hook.write_text('#!/bin/sh\n: > "$3.whole"\n')
        hook.chmod(0o755)
        options.append(f"--on-bt-download-complete={hook}")
        nodes = []
        for number in range(len(hosts)):
            place = folder / str(number)
            place.mkdir(exist_ok=True)
            command = ["aria2c", *options, f"--interface={wan.address(number)}", f"--dir={place}", str(torrent)]
            if number == 0:
                wan.spawn(0, command)
                tracker.hear()
            else:
                watch = [sys.executable, str(RIVAL_NODE), "swarm", str(place), json.dumps(command)]
                nodes.append(_node(wan, number, watch))
        return _last_s(nodes)


def nginx_is_here() -> bool:
    return _is_here("nginx", "the star")


def aria2_is_here() -> bool:
    return _is_here("aria2c", "aria2")


def libtorrent_python() -> str | None:
    """A Python that has libtorrent; None, and said so, where there is none."""
    return peer_python(LIBTORRENT)


def _is_here(program: str, figures: str) -> bool:
    found = shutil.which(program) is not None
    if not found:
        print(f"no peer: {program} is not installed, so the figures of {figures} are left out", flush=True)
    return found


@contextmanager
def _payload(total_bytes: int) -> Iterator[Path]:
    """A folder in memory, with the file in the folder `0` of it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "0").mkdir()
        (folder / "0" / "payload").write_bytes(os.urandom(total_bytes))
        yield folder


def _torrent(folder: Path, piece_bytes: int, tracker: str) -> Path:
    """A metainfo file of version 1 (BEP 3)."""
    content = (folder / "0" / "payload").read_bytes()
    pieces = b"".join(
        hashlib.sha1(content[start : start + piece_bytes]).digest() for start in range(0, len(content), piece_bytes)
    )
    info = {"length": len(content), "name": b"payload", "piece length": piece_bytes, "pieces": pieces}
    file = folder / "torrent"
    file.write_bytes(bencode({"announce": tracker.encode(), "info": info}))
    return file


def bencode(value: int | bytes | dict[str, object]) -> bytes:
    """BitTorrent's encoding of a number, bytes, or a mapping of such; keys are in order."""
    if isinstance(value, int):
        return b"i%de" % value
    if isinstance(value, bytes):
        return b"%d:%s" % (len(value), value)
    return b"d%se" % b"".join(bencode(key.encode()) + bencode(value[key]) for key in sorted(value))  # type: ignore[arg-type]


def _node(wan: Wan, host: int, command: Sequence[str]) -> Conversation:
    return Conversation(wan.spawn(host, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))


def _last_s(nodes: Sequence[Conversation], also: Sequence[Conversation] = ()) -> float:
    """Once all are ready, say go, and wait for all of `nodes`; seconds to the last one."""
    everybody = [*nodes, *also]
    for node in everybody:
        node.hear()
    begun_s = time.monotonic()
    for node in everybody:
        node.tell(go=True)
    return float(max(node.hear()["done_s"] for node in nodes)) - begun_s
