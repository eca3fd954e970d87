"""The two ends of segments in one process, and raw descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgpack

from rpc.bulk.shared_memory import fd_channel, memory
from rpc.bulk.shared_memory.incoming import IncomingSegments
from rpc.bulk.shared_memory.memory import LEDGER_BYTES, SLOTS, Ledger, Mapping
from rpc.bulk.shared_memory.outgoing import Loan, OutgoingSegments
from rpc.bulk.shared_memory.pool import Limits, Pool, Segment
from rpc.group.peer import Peer

__all__ = ["MIB", "Ends", "in_child", "open_descriptors"]

MIB = 1 << 20
BOUND = 64 * MIB


class Ends:
    """A sender and a receiver over a channel of their own.

    Args:
        slots: words in the ledger that they use.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        descriptor = memory.create(LEDGER_BYTES)
        self.here, self.there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.here.setblocking(False)
        self.there.setblocking(False)
        self.loop = asyncio.new_event_loop()
        self.pool = Pool(BOUND)
        self.pool.open(1, Limits(BOUND, 8, slots))
        self.ledger = Ledger(Mapping(descriptor, LEDGER_BYTES))
        self.lock = threading.RLock()
        self.discarded: list[Segment] = []
        self.said: list[str] = []
        peer = cast("Peer", SimpleNamespace(incarnation=1, name="receiver"))
        self.outgoing = OutgoingSegments(
            peer,
            self.pool,
            self.lock,
            self.here,
            self.ledger,
            self._discard,
            self._say,
        )
        self.incoming = IncomingSegments(
            "sender", self.loop, self.there, Ledger(Mapping(descriptor, LEDGER_BYTES)), BOUND, 8
        )
        os.close(descriptor)

    def _discard(self, segments: Sequence[Segment]) -> None:
        self._check_that_others_may_lend()
        for segment in segments:
            self.discarded.append(segment)
            self.outgoing.forget(segment)

    def _say(self, why: str) -> None:
        self._check_that_others_may_lend()
        self.said.append(why)

    def _check_that_others_may_lend(self) -> None:
        """To tell the peer or the user may take locks that another thread holds while it sends."""
        assert not self.lock._is_owned()  # type: ignore[attr-defined]

    def introduce(self) -> int:
        """Have the receiver take what has been introduced; returns how many there were."""
        count = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                self.there.recv(1, socket.MSG_PEEK)
                self.incoming.receive()
                count += 1
        return count

    def introduce_raw(self, number: Any, slot: Any, size: Any, use: Any, descriptor: int | None) -> None:
        """Introduce a segment as a sender would that may do wrong; takes the descriptor."""
        record = msgpack.packb([number, slot, size, use])
        if descriptor is None:
            self.here.send(record)
        else:
            fd_channel.send(self.here, record, descriptor)
            os.close(descriptor)
        self.incoming.receive()

    def send(self, *buffers: bytes) -> list[memoryview] | None:
        """Send and receive buffers; None if there is no segment for them yet, but perhaps next time."""
        loan = self.outgoing.lend([memoryview(each) for each in buffers])
        if loan is None:
            self.introduce()
            return None
        self.outgoing.sent(loan)
        return self.open(loan)

    def open(self, loan: Loan) -> list[memoryview]:
        """What the receiver makes of a loan."""
        return self.incoming.open(loan.segment.number, loan.use, loan.lengths, BOUND)

    def close(self) -> None:
        self.incoming.close()
        self.outgoing.close()
        self.loop.close()
        self.__dict__.clear()  # there are cycles, and nothing is to wait for their collection


def open_descriptors() -> set[str]:
    """What this process has open."""
    return set(os.listdir("/proc/self/fd"))


def in_child(function: Callable[[], Any]) -> None:
    """Run a function in a forked child, as whoever and with whatever limits it likes; it must not raise."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = ""
        try:
            function()
        except BaseException as error:
            text = repr(error)
        finally:
            os.write(writing, text.encode()[:4000])
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        text = stream.read().decode()
    _, status = os.waitpid(pid, 0)
    assert (text, status) == ("", 0)
