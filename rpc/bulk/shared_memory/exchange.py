"""Shared memory between this worker and all others: the messages about it on their connections.

``negotiation.py`` has the states that two workers go through. If any step fails, large messages go through
the socket, and the log has one line about it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final

from rpc.bulk.shared_memory import fd_channel, memory
from rpc.bulk.shared_memory.fd_channel import FdListener
from rpc.bulk.shared_memory.incoming import IncomingSegments
from rpc.bulk.shared_memory.memory import LEDGER_BYTES, SLOTS, Ledger, Mapping
from rpc.bulk.shared_memory.negotiation import RECEIVER, SENDER, Event, Negotiation, OfferState
from rpc.bulk.shared_memory.outgoing import OutgoingSegments
from rpc.bulk.shared_memory.packing import Message, pack, unpack
from rpc.bulk.shared_memory.pool import Limits, Pool, Segment
from rpc.errors import ProtocolError, RpcError, WorkerLostError
from rpc.group.peer import Peer
from rpc.runtime.interrupts import protected
from rpc.serialization.payload import Payload
from rpc.transport.base import SMALL_BYTES
from rpc.wire.frames import Frame, Kind, encode_small
from rpc.wire.reassembly import MAX_BUFFERS

__all__ = ["SharedMemory"]

logger = logging.getLogger(__name__)

SMALLEST_BYTES: Final = 64 << 10
"""Minimum size in bytes of a message that goes through shared memory; below, a socket is as fast."""

IDLE_SECONDS: Final = 20.0
"""Time in seconds for which a segment is unused before its memory is returned to the system."""

_MAX_COUNT: Final = 64


class _Link:
    """The memory shared with one peer, in both directions, and the state of the negotiations."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.sending = Negotiation(SENDER)
        self.connected: tuple[socket.socket, Ledger, Limits] | None = None
        self.outgoing: OutgoingSegments | None = None
        self.receiving = Negotiation(RECEIVER)
        self.listener: FdListener | None = None
        self.incoming: IncomingSegments | None = None

    def disconnect(self) -> None:
        """Forget the memory that was being set up for sending."""
        connected, self.connected = self.connected, None
        if connected is not None:
            connected[0].close()

    def close(self) -> None:
        """Release everything: the peer is lost, or this worker leaves."""
        self.sending.on(Event.GONE)
        self.receiving.on(Event.GONE)
        self.disconnect()
        ends = self.outgoing, self.listener, self.incoming
        self.outgoing = self.listener = self.incoming = None
        for end in ends:
            if end is not None:
                end.close()

    def abandon(self) -> None:
        """Close the descriptors in a forked child; the parent continues to use its own."""
        if self.connected is not None:
            os.close(self.connected[0].detach())
        for each in (self.outgoing, self.listener, self.incoming):
            if each is not None:
                each.abandon()


class SharedMemory:
    """All shared memory of one agent. ``send`` and ``unwrap`` from any thread, all other methods on the
    loop's thread.

    Args:
        bound: maximum size in bytes of all segments that it sends through, and of those that it accepts from
            any one peer; 0: it neither uses nor accepts any.
        takes: whether it accepts any. (A worker that checks what it receives must not, since the sender could
            change it after the check.)
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        soon: Callable[..., object],
        lose: Callable[[Any, str], object],
        *,
        bound: int,
        max_message_bytes: int,
        takes: bool = True,
    ) -> None:
        self._loop = loop
        self._soon = soon
        self._lose = lose
        self._bound = bound if memory.AVAILABLE else 0
        self._max_message_bytes = max_message_bytes
        self._takes = takes
        self._lock = threading.RLock()  # a finalizer that runs while it is held may send
        self._pool = Pool(bound)
        self._links: dict[int, _Link] = {}
        self._trimming: asyncio.TimerHandle | None = None
        self._said = False
        self._closed = False
        self.sent_bytes = self.received_bytes = 0

    def register(self, on: Callable[..., object]) -> None:
        """Register the handlers of its kinds of messages; ``on`` is ``Dispatcher.on``."""
        on(Kind.SEGMENTS, self.received)

    # ---- messages

    @protected
    def send(self, peer: Peer, kind: int, call_id: int, payload: Payload, wait: float) -> bool:
        """Send a message through a segment, if it is large enough and a segment is available; returns whether
        it was sent. If not, it must go through the socket.
        """
        header, buffers = payload.header, payload.buffers
        size = sum(map(len, buffers)) - len(buffers[0])
        if not SMALLEST_BYTES <= size <= self._max_message_bytes or len(buffers) > MAX_BUFFERS:
            return False
        link = self._links.get(peer.incarnation)
        outgoing = None if link is None else link.outgoing
        if outgoing is None:
            if link is None or link.sending.state is OfferState.NEW:
                self._soon(self._begin, peer)
            return False
        loan = outgoing.lend(buffers[1:])
        if self._trimming is None:
            self._soon(self._trim_later)
        if loan is None:
            return False
        try:
            message = Message(kind, header, loan.segment.number, loan.use, loan.lengths, buffers[0])
            frame = encode_small(Kind.IN_SEGMENT, call_id, {}, (pack(message),), payload.codec)
            if len(frame) <= SMALL_BYTES:
                peer.send_small(frame, wait)
            else:
                peer.send((frame,), len(frame), wait=wait)
            outgoing.sent(loan)
        except BaseException:
            outgoing.withdraw(loan)
            raise
        with self._lock:
            self.sent_bytes += size
        return True

    def unwrap(self, peer: Peer, frame: Frame) -> Frame:
        """Return the message that a frame refers to. Raises ``ProtocolError`` if there is none. The buffers
        belong to the receiver from now on.
        """
        link = self._links.get(peer.incarnation)
        incoming = None if link is None else link.incoming
        if incoming is None or frame.header or len(frame.buffers) != 1:
            raise ProtocolError("a malformed message in a segment")
        kind, header, number, use, lengths, pickle = unpack(frame.buffers[0])
        if kind == Kind.IN_SEGMENT:
            raise ProtocolError("a message in a segment in a segment")
        buffers = incoming.open(number, use, lengths, self._max_message_bytes)
        with self._lock:
            self.received_bytes += sum(lengths)
        return Frame(kind, frame.call_id, header, [pickle, *buffers], frame.codec)

    # ---- negotiation

    def received(self, peer: Peer, frame: Frame) -> None:
        """Handle a peer's message about shared memory."""
        link = self._link(peer)
        for said, value in frame.header.items():
            match said, value:
                case "ask", _:
                    self._asked(link)
                case "come", [str(name), bytes(token), int(bound), int(count)]:
                    self._told_to_come(link, name, token, Limits(bound, count, SLOTS))
                case "proof", bytes(nonce):
                    self._proved(link, nonce)
                case "refuse", _:
                    link.sending.on(Event.REFUSE)
                    link.disconnect()
                    self._fall_back(peer, str(value)[:300])
                case "drop", _:
                    link.receiving.on(Event.DROP)
                    assert link.incoming is not None
                    link.incoming.drop(value)
                case _:
                    raise ProtocolError("a malformed message about shared memory")

    def _link(self, peer: Peer) -> _Link:
        link = self._links.get(peer.incarnation)
        if link is None:
            link = self._links[peer.incarnation] = _Link(peer)
        return link

    def _say(self, peer: Peer, what: str, value: object) -> None:
        with contextlib.suppress(WorkerLostError):
            peer.send_small(encode_small(Kind.SEGMENTS, 0, {what: value}, ()), False)

    def _fall_back(self, peer: Peer, reason: str) -> None:
        level = logging.DEBUG if self._said else logging.WARNING
        self._said = True
        how = "through the socket, not through shared memory"
        logger.log(level, "large tensors for worker '%s' go %s: %s", peer.name, how, reason)

    def _begin(self, peer: Peer) -> None:
        """Ask a peer if it was not asked before; peers that cannot share memory are not asked."""
        if peer.lost is not None:
            return
        link = self._link(peer)
        if link.sending.state is not OfferState.NEW:
            return
        suits = self._bound and not peer.is_self and peer.near and not self._closed
        link.sending.on(Event.NEED if suits else Event.FAILED)
        if suits:
            self._say(peer, "ask", True)

    def _asked(self, link: _Link) -> None:
        link.receiving.on(Event.ASK)
        try:
            if not self._bound:
                raise RpcError("shared memory is turned off there, or its system has none of this kind")
            if not self._takes:
                raise RpcError("it deserializes in safe mode, so it takes no memory that others could change")
            listener = FdListener(self._loop, lambda sock, descriptor: self._entered(link, sock, descriptor))
        except (OSError, MemoryError, RpcError) as error:
            link.receiving.on(Event.FAILED)
            self._say(link.peer, "refuse", str(error))
            return
        link.listener = listener
        self._say(link.peer, "come", [listener.name, listener.token, self._bound, _MAX_COUNT])

    def _told_to_come(self, link: _Link, name: str, token: bytes, limits: Limits) -> None:
        link.sending.on(Event.COME)
        try:
            link.connected = *_connect(name, token), limits
        except (OSError, MemoryError) as error:
            link.sending.on(Event.FAILED)
            self._fall_back(link.peer, getattr(error, "strerror", None) or str(error) or "there is no memory")

    def _entered(self, link: _Link, sock: socket.socket, descriptor: int | None) -> None:
        try:
            if descriptor is None:
                raise OSError("a descriptor did not arrive: it may have no more files open")
            memory.check(descriptor, LEDGER_BYTES)
            ledger = Ledger(Mapping(descriptor, LEDGER_BYTES))
        except (OSError, MemoryError, RpcError) as error:
            sock.close()
            link.receiving.on(Event.FAILED)
            self._say(link.peer, "refuse", str(error))
            return
        finally:
            if descriptor is not None:
                os.close(descriptor)
        link.receiving.on(Event.ENTERED)
        link.incoming = IncomingSegments(link.peer.name, self._loop, sock, ledger, self._bound, _MAX_COUNT)
        self._loop.add_reader(sock.fileno(), self._introduced, link, link.incoming)
        self._say(link.peer, "proof", ledger.nonce())

    def _introduced(self, link: _Link, incoming: IncomingSegments) -> None:
        try:
            incoming.receive()
        except ProtocolError as error:
            self._lose(link.peer, f"it sent {error}")

    def _proved(self, link: _Link, nonce: bytes) -> None:
        peer = link.peer
        link.sending.on(Event.PROOF)
        assert link.connected is not None
        sock, ledger, limits = link.connected
        if nonce != ledger.nonce():
            link.sending.on(Event.FAILED)
            link.disconnect()
            self._fall_back(peer, "what is written here is not what is read there")
            return
        link.connected = None
        with self._lock:
            self._pool.open(peer.incarnation, limits)
        link.outgoing = OutgoingSegments(
            peer, self._pool, self._lock, sock, ledger, self._discard, lambda why: self._fall_back(peer, why)
        )

    # ---- the end of segments

    def _discard(self, segments: Sequence[Segment]) -> None:
        """Unmap segments that left the pool, and make their peers unmap them. From any thread."""
        numbers: dict[int, list[int]] = {}
        for segment in segments:
            link = self._links.get(segment.peer)
            outgoing = None if link is None else link.outgoing
            if outgoing is not None and outgoing.forget(segment):
                numbers.setdefault(segment.peer, []).append(segment.number)
        for incarnation, those in numbers.items():
            self._say(self._links[incarnation].peer, "drop", those)

    def _trim_later(self) -> None:
        if self._trimming is None and not self._closed:
            self._trimming = self._loop.call_later(IDLE_SECONDS / 2, self._trim)

    def _trim(self) -> None:
        """Return the memory of segments that have been unused for long enough to the system; check again
        while there are segments.
        """
        self._trimming = None  # before the check: a segment that is made after it finds no timer and sets one
        self._note_returns()
        with self._lock:
            dropped = self._pool.trim(monotonic(), IDLE_SECONDS)
            left = self._pool.size
        self._discard(dropped)
        if left:
            self._trim_later()

    def _note_returns(self) -> None:
        now = monotonic()
        for link in list(self._links.values()):
            if link.outgoing is not None:
                link.outgoing.note_returns(now)

    def usage(self) -> tuple[int, int]:
        """Total size in bytes of the segments that it sends through, and of those that are lent. From any
        thread.
        """
        self._note_returns()
        with self._lock:
            return self._pool.size, sum(each.size for each in self._pool.all_segments() if each.lent)

    def peer_gone(self, peer: Peer, reason: str) -> None:
        """Handle that a worker is lost: its segments are not used again; received tensors in them remain
        valid.
        """
        link = self._links.pop(peer.incarnation, None)
        if link is not None:
            link.close()

    def close(self) -> None:
        """Release everything: this worker leaves."""
        self._closed = True
        if self._trimming is not None:
            self._trimming.cancel()
        for link in list(self._links.values()):
            link.close()

    def abandon(self) -> None:
        """Release everything in a forked child, without taking a lock; the parent continues to use its
        own.
        """
        for link in self._links.values():
            link.abandon()


def _connect(name: str, token: bytes) -> tuple[socket.socket, Ledger]:
    """Connect to the channel of a peer, and send it a new ledger."""
    descriptor = memory.create(LEDGER_BYTES)
    try:
        ledger = Ledger(Mapping(descriptor, LEDGER_BYTES))
        ledger.write_nonce()
        sock = fd_channel.connect(name)
        try:
            fd_channel.send(sock, token, descriptor)
        except OSError:
            sock.close()
            raise
    finally:
        os.close(descriptor)
    return sock, ledger
