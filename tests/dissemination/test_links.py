"""One connection by itself, over a pair of sockets."""

import asyncio
import socket

from echo2.dissemination.broadcast.buffers import Buffers
from echo2.dissemination.broadcast.link import ANSWERS_WAITING, FIRST_DETACH_S, Acknowledgements, Link
from echo2.dissemination.broadcast.wire import Kind

CHUNK = bytes(64 * 1024)
CHUNKS = 40


def link_over(connection, on_frame=lambda link, frame: False):
    connection.setblocking(False)
    return Link(
        connection,
        1,
        "worker w1",
        buffers=Buffers(),
        acknowledgements=Acknowledgements(),
        on_frame=on_frame,
        on_closed=lambda link: None,
    )


def test_what_was_asked_for_outlives_a_detach_and_what_was_not_is_given_up():
    arrived, told = [], {}

    def note(chunk):
        return lambda sent: told.setdefault(chunk, sent)

    async def scenario():
        ours, theirs = tcp_pair()
        sender = link_over(ours)
        for chunk in range(CHUNKS):
            sender.send(Kind.CHUNK, 1, chunk, CHUNK, note(chunk) if chunk % 2 else None, asked=chunk % 2 == 0)
        sender.detach()
        assert sender.queued_chunks >= CHUNKS // 4, "so much do the sockets not hold"
        await asyncio.sleep(1.1 * FIRST_DETACH_S)
        assert sender.detached, "until what was left over has gone"
        receiver = link_over(theirs, lambda link, frame: arrived.append(frame.chunk))
        async with asyncio.timeout(60):
            while sender.queued_chunks or len(arrived) < CHUNKS // 2:
                await asyncio.sleep(0.01)
        assert not sender.detached
        await asyncio.sleep(0.1)
        sender.close()
        receiver.close()

    asyncio.run(scenario())
    assert set(range(0, CHUNKS, 2)) <= set(arrived)
    assert len(arrived) == len(set(arrived)) < CHUNKS
    assert told == dict.fromkeys(range(1, CHUNKS, 2), False)


def test_who_asks_and_never_reads_makes_nobody_keep_more_than_some_answers():
    async def scenario():
        ours, theirs = tcp_pair()
        sender = link_over(ours)
        for chunk in range(3 * ANSWERS_WAITING):
            sender.send(Kind.CHUNK, 1, chunk, CHUNK, asked=True)
        assert sender.queued_chunks == ANSWERS_WAITING
        sender.close()
        theirs.close()

    asyncio.run(scenario())


def tcp_pair():
    """A connection that holds little on its way."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]
