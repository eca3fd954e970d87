"""Two ends of bulk messages, and the bytes between them, which arrive when a test says so."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from rpc.bulk.point_to_point import Bulk
from rpc.group.peer import Peer
from rpc.group.workers import Member, WorkerInfo
from rpc.transport.base import DirectConnection
from rpc.wire.chunking import WHOLE_BYTES, Outgoing
from rpc.wire.frames import Frame, Kind, chunk_prefix, chunked, encode
from tests.support.frames import feed, greeted
from tests.support.members import codec

LIMIT = 1 << 30


class _Wire(DirectConnection):
    """What one end sends, as bytes of frames; a large message chunk by chunk."""

    def __init__(self, first: int = 0) -> None:
        super().__init__("the other end")
        self.under_way: list[bytes] = []
        self._numbers = first

    def pass_on(self, frame: bytearray) -> None:
        self.under_way.append(bytes(frame))

    def send(self, buffers: Sequence[Any], size: int, **options: Any) -> None:
        if size <= WHOLE_BYTES or len(buffers) == 1:
            self.pass_on(bytearray().join(buffers))
            return
        outgoing = Outgoing(chunk_prefix, LIMIT, LIMIT)
        outgoing.add(chunked(buffers, size, self._numbers))
        self._numbers += 1
        while outgoing:
            self.under_way.append(b"".join(bytes(each) for each in outgoing.next()))


class End:
    """One worker.

    Attributes:
        bulk: its bulk messages.
        peer: the other worker.
        decoder: of its connection.
        lost: why it has cut the other off.
    """

    def __init__(self, name: str, number: int) -> None:
        self.wire = _Wire()
        self.lost: list[str] = []
        self.bulk = Bulk(
            lambda *_: False, lambda *_: None, lambda peer, reason: self.lost.append(reason)
        )  # fmt: skip
        member = Member(WorkerInfo(name, number), number, "host", (), "main", LIMIT)
        self.peer = Peer(member, codec(), lambda _: None)
        self.peer.send_by(self.wire)
        self.decoder = greeted(LIMIT)
        self.decoder.arriving.find_target = functools.partial(self.bulk.find_target, self.peer)

    def receive(self, data: bytes) -> None:
        """Some bytes have come."""
        for frame in feed(self.decoder, data):
            self.take_in(frame)

    def take_in(self, frame: Frame) -> None:
        handlers: dict[int, Any] = {
            Kind.BULK: self.bulk.received,
            Kind.BULK_CREDIT: self.bulk.credited,
            Kind.BULK_CLOSE: self.bulk.closed,
        }
        task = handlers[frame.kind](self.peer, frame)
        if task is not None:
            function, argument = task
            function(argument)

    def lose(self) -> None:
        """The other worker is gone."""
        self.decoder.clear()
        self.peer.gone("it died")
        self.bulk.peer_gone(self.peer, "it died")


class Pair:
    """Two workers. What one has sent reaches the other when ``deliver`` is called."""

    def __init__(self) -> None:
        self.left, self.right = End("right", 2), End("left", 1)

    def deliver(self) -> None:
        """Until nothing is under way."""
        while self.left.wire.under_way or self.right.wire.under_way:
            for sender, receiver in ((self.left, self.right), (self.right, self.left)):
                under_way, sender.wire.under_way = sender.wire.under_way, []
                for data in under_way:
                    receiver.receive(data)


def message(tag: int, number: int, buffers: Sequence[Any], opened_as: int | None = None) -> list[bytes]:
    """A large message as it is sent: its chunks, the first behind the opening, which has its own number."""
    wire = _Wire(number if opened_as is None else opened_as)
    wire.send(*encode(Kind.BULK, (tag << 32) + number, {}, [b"", *buffers]))
    return wire.under_way
