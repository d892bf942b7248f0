"""Delays, and now and then loses, what a router forwards: the userspace half of an emulated WAN, for kernels without netem.

Run in the router's network namespace: `python wan_delay.py TABLE`. Every forwarded packet goes to NFQUEUE 0 and is let
through when its time has come. TABLE has a line `IN OUT DELAY_US LOSS_PPM` for each pair of interface indices.
Invariant: packets of one pair leave in the order in which they came.
"""

from __future__ import annotations

import ctypes
import heapq
import os
import random
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path

QUEUE = 0
NETLINK_NETFILTER = 12
SO_RCVBUFFORCE, SOL_NETLINK, NETLINK_NO_ENOBUFS = 33, 270, 5
NFQUEUE_SUBSYSTEM = 3 << 8
PACKET, VERDICT, CONFIG = NFQUEUE_SUBSYSTEM, NFQUEUE_SUBSYSTEM | 1, NFQUEUE_SUBSYSTEM | 2
ACCEPT, DROP = 1, 0
LONGEST_QUEUE = 200_000
HEADER = struct.Struct("=IHHII")
NUMBER = struct.Struct("!I")
PACKET_FIELDS = struct.Struct("!24xI8xI4xI")
"""Packet id, index of the interface it came in by, and of the one it leaves by, at fixed places of a metadata message."""
VERDICTS_AT_ONCE = 512
EARLY_S = 0.0003

IPT_SO_SET_REPLACE, IPT_SO_GET_INFO = 64, 64
HOOKS = 5
ENTRY_BYTES = 112
RULE_BYTES = ENTRY_BYTES + 40
ERROR_BYTES = ENTRY_BYTES + 64


def entry(size: int, target: bytes) -> bytes:
    """An iptables rule for every packet."""
    return bytes(84) + struct.pack("=IHHIQQ", 0, ENTRY_BYTES, size, 0, 0, 0) + target


def target(name: bytes, body: bytes, size: int) -> bytes:
    return struct.pack("=H29sB", size, name, 0) + body.ljust(size - 32, b"\0")


def divert_forwarded() -> None:
    """The kernel's `mangle` table: what is forwarded goes to the queue, all else is accepted. Raises OSError."""
    accept = entry(RULE_BYTES, target(b"", struct.pack("=i", -ACCEPT - 1), 40))
    queue = entry(RULE_BYTES, target(b"NFQUEUE", struct.pack("=H", QUEUE), 40))
    error = entry(ERROR_BYTES, target(b"ERROR", b"ERROR", 64))
    rules = [accept, accept, queue, accept, accept, accept]
    firsts = [index * RULE_BYTES for index in (0, 1, 2, 4, 5)]
    defaults = [index * RULE_BYTES for index in (0, 1, 3, 4, 5)]
    entries = b"".join(rules) + error
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as control:
        info = ctypes.create_string_buffer(b"mangle", 84)
        length = ctypes.c_uint(84)
        kernel = ctypes.CDLL(None, use_errno=True)
        if kernel.getsockopt(control.fileno(), socket.IPPROTO_IP, IPT_SO_GET_INFO, info, ctypes.byref(length)):
            raise OSError(ctypes.get_errno(), "this kernel has no iptables table `mangle`")
        old_entries = struct.unpack_from("=I", info.raw, 76)[0]
        counters = ctypes.create_string_buffer(16 * old_entries)
        sizes = (1 << HOOKS) - 1, len(rules) + 1, len(entries)
        addresses = old_entries, ctypes.addressof(counters)
        replace = struct.pack("=32s3I5I5IIQ", b"mangle", *sizes, *firsts, *defaults, *addresses)
        control.setsockopt(socket.IPPROTO_IP, IPT_SO_SET_REPLACE, replace + entries)


def attribute(kind: int, value: bytes) -> bytes:
    body = struct.pack("=HH", 4 + len(value), kind) + value
    return body + bytes(-len(body) % 4)


def message(kind: int, attributes: bytes) -> bytes:
    body = b"\x02\0" + struct.pack("!H", QUEUE) + attributes
    return HEADER.pack(HEADER.size + len(body), kind, 1, 0, 0) + body


def open_queue() -> socket.socket:
    """A socket that gets the metadata of every diverted packet."""
    queue = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
    queue.bind((0, 0))
    queue.setblocking(False)
    queue.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 32 << 20)
    queue.setsockopt(SOL_NETLINK, NETLINK_NO_ENOBUFS, 1)
    queue.send(message(CONFIG, attribute(1, struct.pack("!BBH", 1, 0, socket.AF_INET))))
    queue.send(message(CONFIG, attribute(2, struct.pack("!IB", 0, 1))))
    queue.send(message(CONFIG, attribute(3, NUMBER.pack(LONGEST_QUEUE))))
    whole_segments = 4
    queue.send(message(CONFIG, attribute(5, NUMBER.pack(whole_segments)) + attribute(4, NUMBER.pack(whole_segments))))
    return queue


def read_table(file: Path) -> dict[tuple[int, int], tuple[float, float]]:
    """Seconds of delay and probability of loss for each pair of interfaces."""
    rows = [[int(field) for field in line.split()] for line in file.read_text().splitlines()]
    return {(came, leaves): (delay_us / 1e6, loss_ppm / 1e6) for came, leaves, delay_us, loss_ppm in rows}


def serve(queue: socket.socket, table: dict[tuple[int, int], tuple[float, float]]) -> None:
    """Let packets through when their time has come, until SIGTERM."""
    prefix = HEADER.pack(32, VERDICT, 1, 0, 0) + b"\x02\0" + struct.pack("!H", QUEUE) + struct.pack("=HH", 12, 2)
    accept, drop = prefix + NUMBER.pack(ACCEPT), prefix + NUMBER.pack(DROP)
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    poll = select.poll()
    poll.register(queue, select.POLLIN)
    waiting: list[tuple[float, int]] = []
    while not stopping:
        poll.poll(max(0.0, (waiting[0][0] - time.monotonic()) * 1000) if waiting else 1000)
        try:
            for _ in range(256):
                packet = queue.recv(512)
                if int.from_bytes(packet[4:6], sys.byteorder) != PACKET:
                    continue
                number, came, leaves = PACKET_FIELDS.unpack_from(packet)
                delay_s, loss = table.get((came, leaves), (0.0, 0.0))
                if loss and random.random() < loss:
                    queue.send(drop + NUMBER.pack(number))
                else:
                    heapq.heappush(waiting, (time.monotonic() + delay_s, number))
        except BlockingIOError:
            pass
        due_s = time.monotonic() + EARLY_S
        verdicts = []
        while waiting and waiting[0][0] <= due_s:
            verdicts.append(accept + NUMBER.pack(heapq.heappop(waiting)[1]))
        for first in range(0, len(verdicts), VERDICTS_AT_ONCE):
            queue.send(b"".join(verdicts[first : first + VERDICTS_AT_ONCE]))


if __name__ == "__main__":
    os.nice(-15)
    delays = read_table(Path(sys.argv[1]))
    packets = open_queue()
    divert_forwarded()
    print("ready", flush=True)
    serve(packets, delays)
