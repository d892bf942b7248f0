"""Hosts of what the broadcast is compared with, each a small program of the standard library.

`broadcast_rival_node.py download URL`, `… swarm FOLDER COMMAND-AS-JSON`, or `… track ADDRESS PORT HOSTS`.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

ANNOUNCE_S = 1
ANSWER_S = 2.0
LOOK_S = 0.005


def say(**fields: float) -> None:
    print(json.dumps(fields), flush=True)


def download(url: str) -> None:
    """Read a file over HTTP as fast as this language can and keep nothing of it."""
    parts = urlsplit(url)
    room = memoryview(bytearray(1 << 20))
    say(ready=1)
    sys.stdin.readline()
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.sendall(f"GET {parts.path} HTTP/1.0\r\nHost: {parts.hostname}\r\n\r\n".encode())
        answer = connection.makefile("rb")
        if b" 200 " not in answer.readline():
            raise SystemExit(f"{url} was not served")
        lengths = [
            int(line.split(b":")[1]) for line in iter(answer.readline, b"\r\n") if line.lower().startswith(b"content-length")
        ]
        rest = lengths[0]
        while rest:
            got = answer.readinto(room[:rest])
            if not got:
                raise SystemExit(f"{url} broke off")
            rest -= got
    say(done_s=time.monotonic())


def swarm(folder: Path, command: list[str]) -> None:
    """Start a downloader at the word go; it makes a file beside the payload when that is whole."""
    whole = folder / "payload.whole"
    say(ready=1)
    sys.stdin.readline()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as downloader:
        while downloader.poll() is None and not whole.exists():
            time.sleep(LOOK_S)
        say(done_s=time.monotonic())
        sys.stdin.readline()
        downloader.kill()


def track(address: str, port: int, count: int) -> None:
    """A BitTorrent tracker (BEP 3, BEP 23) for one torrent and `count` hosts.

    Says so when it listens, and when the first host has announced itself; the others are answered once all have, with all.
    """
    hosts: set[tuple[str, int]] = set()
    changed = threading.Condition()

    class Announcements(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = parse_qs(urlsplit(self.path).query, encoding="latin-1")
            me = self.client_address[0], int(asked["port"][0])
            with changed:
                hosts.add(me)
                changed.notify_all()
                first = len(hosts) == 1
                changed.wait_for(lambda: first or len(hosts) == count, ANSWER_S)
                others = b"".join(socket.inet_aton(host) + number.to_bytes(2, "big") for host, number in hosts - {me})
            body = b"d8:completei1e8:intervali%de5:peers%d:%se" % (ANNOUNCE_S, len(others), others)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            if first:
                say(announced=1)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer((address, port), Announcements) as server:
        say(ready=1)
        server.serve_forever()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["download", url]:
            download(url)
        case ["swarm", folder, command]:
            swarm(Path(folder), json.loads(command))
        case ["track", address, port, count]:
            track(address, int(port), int(count))
