"""The receiving half of a set of stripes: what may not be received yet stays where it is."""

from __future__ import annotations

import socket
import weakref
from struct import Struct
from typing import Any

from rpc.bulk.striping.plan import CHUNK_BYTES, Arrivals
from rpc.bulk.striping.receiving import StripeReceiver
from rpc.runtime.loop import LoopThread
from rpc.wire.chunking import Room
from tests.support.streams import Sockets, until
from tests.unit.rpc.bulk.striping.ends import LIMIT, Receiving, Sending, large

HEADER = Struct("<QQI")


def content(*lengths: int) -> list[bytes]:
    return [bytes([index + 1]) * length for index, length in enumerate(lengths)]


def chunk(number: int, index: int, length: int = CHUNK_BYTES) -> bytes:
    return HEADER.pack(number, index * CHUNK_BYTES, length) + b"\1" * length


def opening(length: int = 2 * CHUNK_BYTES) -> bytes:
    return bytes(large(1, length)[0][0])


def test_messages_go_over_all_stripes_both_ways_at_once(loop: LoopThread, sockets: Sockets) -> None:
    pairs = [sockets() for _ in range(4)]
    here, there = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    receivers = Receiving(loop, here), Receiving(loop, there)
    senders = Sending(loop, here, receivers[1].open), Sending(loop, there, receivers[0].open)
    sizes = [(7, 3_000_000, 5), (1 << 20, 1, 1 << 20), (2_000_003,), (5_000_000,)]
    for call_id, lengths in enumerate(sizes):
        for sending in senders:
            sending.send(large(call_id, *lengths))
    for receiving in receivers:
        assert sorted(receiving.messages.wait_for(4)) == [
            (call_id, content(*lengths)) for call_id, lengths in enumerate(sizes)
        ]
    for end in (*senders, *receivers):
        assert not hasattr(end, "malformed") or not end.malformed.noted
        end.close()


def send_without_waiting(sock: socket.socket, data: bytes) -> int:
    """How much of ``data`` the kernel takes."""
    sock.setblocking(False)
    sent = 0
    try:
        while sent < len(data):
            sent += sock.send(data[sent:])
    except BlockingIOError:
        pass
    return sent


def test_a_chunk_before_its_opening_waits_in_the_kernel(loop: LoopThread, sockets: Sockets) -> None:
    (early, early_there), (other, other_there) = sockets(), sockets()
    receiving = Receiving(loop, [early_there, other_there])
    early.sendall(HEADER.pack(1, 0, CHUNK_BYTES))
    until(lambda: receiving.receiver._lanes[0].waits)
    taken = send_without_waiting(early, chunk(1, 0)[HEADER.size :] + chunk(1, 1) * 20)
    assert taken < 20 * CHUNK_BYTES
    receiving.open(0, opening())
    other.sendall(chunk(0, 1) + chunk(0, 0))
    assert receiving.messages.wait_for(1) == [(1, content(2 * CHUNK_BYTES))]
    receiving.open(1, opening(40 * CHUNK_BYTES))
    until(lambda: not receiving.receiver._lanes[0].waits)
    assert not receiving.malformed.noted
    receiving.close()


def test_what_may_not_be_is_reported(loop: LoopThread, sockets: Sockets) -> None:
    here, there = sockets()
    receiving = Receiving(loop, [there])
    receiving.open(0, opening())
    here.sendall(chunk(0, 0) + chunk(0, 0)[: HEADER.size])
    assert receiving.malformed.wait_for(1) == ["the chunk at 0 of message 0 has come twice"]
    receiving.close()


def test_an_end_is_reported_once(loop: LoopThread, sockets: Sockets) -> None:
    (here, there), (_, quiet) = sockets(), sockets()
    receiving = Receiving(loop, [there, quiet])
    receiving.open(0, opening())
    here.sendall(chunk(0, 0)[:100])
    here.close()
    assert receiving.failures.wait_for(1) == ["was closed by the other side"]
    loop.call(lambda: None)
    assert len(receiving.failures.noted) == 1
    receiving.close()


def test_it_is_idle_when_all_that_was_opened_has_arrived(loop: LoopThread, sockets: Sockets) -> None:
    here, there = sockets()
    receiving = Receiving(loop, [there])
    receiving.open(0, opening())
    receiving.when_idle()
    here.sendall(chunk(0, 1))
    assert not receiving.idle.noted
    here.sendall(chunk(0, 0))
    assert receiving.idle.wait_for(1)
    receiving.close()


def test_it_is_idle_at_once_when_nothing_was_opened(loop: LoopThread, sockets: Sockets) -> None:
    receiving = Receiving(loop, [sockets()[1]])
    receiving.when_idle()
    assert receiving.idle.noted
    receiving.close()


def test_nothing_is_received_after_the_end(loop: LoopThread, sockets: Sockets) -> None:
    here, there = sockets()
    receiving = Receiving(loop, [there])
    receiving.close()
    here.sendall(b"x" * 100)
    noted: list[Any] = [receiving.malformed.noted, receiving.failures.noted, receiving.messages.noted]
    loop.call(lambda: None)
    assert noted == [[], [], []]
    assert there.recv(200) == b"x" * 100


class Memory(bytearray):
    """Something to which there can be weak references."""


def test_what_has_come_of_a_message_is_gone_with_its_connection(loop: LoopThread, sockets: Sockets) -> None:
    taken: list[weakref.ref[Memory]] = []

    def allocate(length: int) -> memoryview:
        memory = Memory(length)
        taken.append(weakref.ref(memory))
        return memoryview(memory)

    def never(*_: Any) -> None:
        raise AssertionError

    here, there = sockets()
    there.setblocking(False)
    arrivals = Arrivals(LIMIT, allocate)
    receiver = loop.call(lambda: StripeReceiver(loop.loop, [there], arrivals, never, never, never))
    length = 2 * CHUNK_BYTES
    loop.call(lambda: receiver.open(0, "what", [Room(length, length)], 0))
    here.sendall(chunk(0, 0)[:1000])
    until(lambda: receiver._lanes[0].parts)
    assert taken[0]() is not None
    loop.call(receiver.close)
    assert taken[0]() is None
