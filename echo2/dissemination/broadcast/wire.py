"""What goes over the connections of a broadcast: the proof of the run's token, then frames of a header and a body.

Invariants: nothing but the handshake is read from a connection before the other end has proved its key; whoever dialled proves
first.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
import struct
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from blake3 import blake3

MAGIC = b"echo2-02"
KEY_CONTEXT = "echo2 2026-11 broadcast connection key"
HEADER = struct.Struct("!BxxxIIQ")
LENGTH = struct.Struct("!H")
SERVICE = struct.Struct("!d")
LONGEST_SERVICE_S = 3600.0
NONCE_BYTES = 32
PROOF_BYTES = 32
LARGEST_NUMBER = 2**31 - 1
HANDSHAKE_S = 5.0
UNHEARD_MS = 12_000
"""How long what was sent may be unacknowledged: as long as it takes to find out without sending anything."""
MAX_CONTROL_BYTES = 64 * 1024 * 1024
MAX_DATA_BYTES = 64 * 1024 * 1024 + 16


class Kind(IntEnum):
    """What a frame says. S is the source, W a worker."""

    ROSTER = 1
    """S→W: the receiver's number and who takes part, as JSON."""
    ANNOUNCE = 2
    """S→W: a broadcast begins: manifest and salt, as compressed JSON: all of it leaves before the first chunk, to everybody."""
    CHUNK = 3
    """Encrypted chunk for the receiver alone."""
    STRIPE = 4
    """S→W: encrypted chunk to keep and to forward to all others."""
    FORWARD = 5
    """S→W: the workers that the next stripe of this chunk is forwarded to, instead of all."""
    CREDIT = 6
    """W→S: the stripe's chunk was forwarded: seconds that took, and workers that were left out."""
    MISSED = 7
    """S→W: chunks that nobody will send unasked; where a chunk's number stands, that of a worker not to ask, or 0."""
    PROGRESS = 8
    """W→S: bitmap of the chunks that arrived."""
    DONE = 9
    """W→S: everything arrived and is right: seconds from the announcement to each chunk."""
    ASK = 10
    """Chunks that the asker wants."""
    LACK = 11
    """Chunks that were asked for, or were to be forwarded, and are not here."""
    REPORT = 12
    """W→S: another worker misbehaves: what it did, its number and name, and details, as JSON."""
    WITHDRAWN = 13
    """S→W: this broadcast is no longer served."""


DATA = frozenset((Kind.CHUNK, Kind.STRIPE))


class WireError(Exception):
    """The other end is not of this run, or breaks the protocol; the connection is of no use."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame as it arrived; `body` is valid until the handler returns."""

    kind: Kind
    broadcast: int
    chunk: int
    body: memoryview


def pack_bits(bits: int) -> bytes:
    """A set of chunks as the body of a frame."""
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def unpack_bits(body: memoryview) -> int:
    return int.from_bytes(body, "little")


def pack_numbers(numbers: Collection[int]) -> bytes:
    """Workers' numbers as the body of a frame."""
    return struct.pack(f"!{len(numbers)}I", *numbers)


def unpack_numbers(body: memoryview) -> tuple[int, ...]:
    """Raises struct.error for a body that is cut short."""
    return struct.unpack(f"!{len(body) // 4}I", body)


def pack_credit(service_s: float, skipped: Collection[int]) -> bytes:
    """Seconds in which a chunk was forwarded, and who was left out, as the body of a frame."""
    return SERVICE.pack(service_s) + pack_numbers(skipped)


def unpack_credit(body: memoryview) -> tuple[float | None, tuple[int, ...]]:
    """None for seconds that cannot be. Raises struct.error for a body that is cut short."""
    (service_s,) = SERVICE.unpack(body[: SERVICE.size])
    return service_s if 0.0 < service_s < LONGEST_SERVICE_S else None, unpack_numbers(body[SERVICE.size :])


def worker_number(name: str) -> int:
    """The number, from 1, that a worker goes by: at every source the same, so that none is taken for another."""
    return int.from_bytes(blake3(name.encode()).digest(8), "big") % LARGEST_NUMBER + 1


def pack_json(fields: dict[str, Any]) -> bytes:
    """Fields as the compressed body of a frame."""
    return zlib.compress(json.dumps(fields).encode(), 1)


def unpack_json(body: memoryview) -> dict[str, Any]:
    """Raises ValueError for what `pack_json` did not make, or what would be too much."""
    inflating = zlib.decompressobj()
    try:
        text = inflating.decompress(body, MAX_CONTROL_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not inflating.eof:
        raise ValueError("it is cut short or too large")
    return parse_json(text)


def parse_json(text: bytes | memoryview) -> dict[str, Any]:
    """Fields that somebody sent who may be a stranger. Raises ValueError for what is no JSON object."""
    try:
        fields = json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError("it is not a JSON object")
    return fields


def connection_key(token: str, run_id: str) -> bytes:
    """Key, 32 bytes, that both ends of a connection prove to hold."""
    return blake3(f"{run_id}\0{token}".encode(), derive_key_context=KEY_CONTEXT).digest()


async def dial(host: str, port: int, key: bytes, hello: dict[str, Any]) -> tuple[socket.socket, dict[str, Any]]:
    """Connect and prove; returns the socket and the other end's hello. Raises WireError, OSError or TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(HANDSHAKE_S):
        family, _, _, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            prepare(connection)
            await loop.sock_connect(connection, address)
            mine = _packed(hello) + secrets.token_bytes(NONCE_BYTES)
            await loop.sock_sendall(connection, MAGIC + mine)
            theirs, their_hello = await _read_hello(connection)
            transcript = mine + theirs
            await loop.sock_sendall(connection, _proof(key, b"dialer", transcript))
            await _check_proof(connection, key, b"acceptor", transcript)
        except BaseException:
            connection.close()
            raise
    return connection, their_hello


async def accept(connection: socket.socket, key: bytes, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Let the dialer prove itself, then prove; returns its hello. `answer` makes what it is greeted with of that hello,
    which is not proved yet. Raises WireError, OSError or TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(HANDSHAKE_S):
        prepare(connection)
        if await _read(connection, len(MAGIC)) != MAGIC:
            raise WireError("the connection does not speak this protocol")
        theirs, their_hello = await _read_hello(connection)
        mine = _packed(answer(their_hello)) + secrets.token_bytes(NONCE_BYTES)
        await loop.sock_sendall(connection, mine)
        transcript = theirs + mine
        await _check_proof(connection, key, b"dialer", transcript)
        await loop.sock_sendall(connection, _proof(key, b"acceptor", transcript))
    return their_hello


def prepare(connection: socket.socket) -> None:
    """Options of a bulk connection: no delay, death noticed within seconds."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD_MS)


def _packed(hello: dict[str, Any]) -> bytes:
    body = json.dumps(hello).encode()
    return LENGTH.pack(len(body)) + body


async def _read(connection: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    body = bytearray(count)
    view = memoryview(body)
    while view:
        got = await loop.sock_recv_into(connection, view)
        if not got:
            raise WireError("the other end closed the connection before both had proved their token")
        view = view[got:]
    return bytes(body)


async def _read_hello(connection: socket.socket) -> tuple[bytes, dict[str, Any]]:
    length = await _read(connection, LENGTH.size)
    body = await _read(connection, LENGTH.unpack(length)[0] + NONCE_BYTES)
    try:
        hello = parse_json(body[:-NONCE_BYTES])
    except ValueError as error:
        raise WireError(f"the greeting cannot be read: {error}") from None
    return length + body, hello


async def _check_proof(connection: socket.socket, key: bytes, role: bytes, transcript: bytes) -> None:
    if not hmac.compare_digest(await _read(connection, PROOF_BYTES), _proof(key, role, transcript)):
        raise WireError("the other end holds another token or belongs to another run")


def _proof(key: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, role + transcript, hashlib.sha256)
