"""Segments between this worker and all others: how two begin, what is said on their connection, and the end.

Whoever has something large for a peer on the same host *asks*, once, and meanwhile sends through the socket.
The peer opens a door and says *come*, with the door's name and a token. The sender connects there, its
channel for descriptors, and sends the descriptor of a ledger with a nonce in it; the peer maps that and says
the nonce on the connection: *proof* that both share this memory, and that the channel is the peer's. From
then on there may be segments. Whatever goes wrong on the way, the sender stays with the socket, and says so
once in its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence, Sized
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import msgpack

from rpc.bulk.shared_memory import fd_channel, memory
from rpc.bulk.shared_memory.copying import Copier
from rpc.bulk.shared_memory.fd_listener import Door
from rpc.bulk.shared_memory.incoming import TAKEN, IncomingSegments
from rpc.bulk.shared_memory.ledger import LEDGER_BYTES, SLOTS, Ledger
from rpc.bulk.shared_memory.memory import Mapping
from rpc.bulk.shared_memory.outgoing import OutgoingSegments
from rpc.bulk.shared_memory.packing import Message, pack, unpack
from rpc.bulk.shared_memory.pool import Limits, Pool, Segment
from rpc.errors import ProtocolError, RpcError, WorkerLostError
from rpc.group.peer import Peer
from rpc.serialization.payload import Payload
from rpc.transport import SMALL_BYTES
from rpc.wire.frames import MAX_SEGMENTS, Frame, Kind, encode_small

if TYPE_CHECKING:
    from rpc.agent.agent import Agent

__all__ = ["SharedMemory"]

logger = logging.getLogger(__name__)

SMALLEST_BYTES: Final = 64 << 10
"""Below, a socket is as fast."""

IDLE_SECONDS: Final = 20.0
"""How long a segment rests before its memory is given back."""

_MAX_COUNT: Final = 64


class SharedMemory:
    """All segments of one agent. ``send`` and ``unwrap`` from any thread, everything else on the loop's.

    Args:
        agent: whose they are.
        bound: bytes of all segments that it sends through, and of those that it takes from any one peer;
            0: it uses none and takes none.
        max_message_bytes: the largest message.
        takes: whether it takes any. (Those who check what they receive must not: its sender could change it
        after.)
    """

    def __init__(
        self,
        agent: Agent,
        bound: int,
        max_message_bytes: int,
        *,
        takes: bool = True,
    ) -> None:
        self._agent = agent
        self._loop: asyncio.AbstractEventLoop = agent.loop
        self._bound = bound if memory.AVAILABLE else 0
        self._max_message_bytes = max_message_bytes
        self._takes = takes
        self._lock = threading.RLock()  # a finalizer that runs while it is held may send
        self._pool = Pool(bound)
        self._copier = Copier()
        self._outgoing: dict[int, OutgoingSegments | None] = {}
        self._unproved: dict[int, tuple[socket.socket, Ledger, Limits]] = {}
        self._doors: dict[int, Door] = {}
        self._incoming: dict[int, tuple[IncomingSegments, socket.socket]] = {}
        self._trimming: asyncio.TimerHandle | None = None
        self._said = False
        self._closed = False

    # ---- sending

    def send(self, peer: Peer, kind: int, call_id: int, payload: Payload, wait: float) -> bool:
        """Send a message through a segment, if it is large enough and there is one for it.

        Returns:
            Whether it was sent. If not, it is to go through the socket.
        """
        header, segments = payload.header, payload.buffers
        size = sum(map(len, segments)) - len(segments[0])
        if not SMALLEST_BYTES <= size <= self._max_message_bytes or len(segments) > MAX_SEGMENTS:
            return False
        try:
            outgoing = self._outgoing[peer.incarnation]
        except KeyError:
            self._agent.mailbox.call(self._begin, peer)
            return False
        if outgoing is None:
            return False
        loan = outgoing.lend(segments[1:])
        if self._trimming is None:
            self._agent.mailbox.call(self._trim_later)
        if loan is None:
            return False
        try:
            message = Message(kind, header, loan.segment.number, loan.use, loan.lengths, segments[0])
            frame = encode_small(Kind.IN_SEGMENT, call_id, {}, (pack(message),))
            if len(frame) <= SMALL_BYTES:
                peer.send_small(frame, wait)
            else:
                peer.send((frame,), len(frame), wait=wait)
            outgoing.sent(loan)
        except BaseException:
            outgoing.withdraw(loan)
            raise
        return True

    def _begin(self, peer: Peer) -> None:
        """Ask a peer if it was not asked before; those that cannot share memory are not asked at all."""
        if peer.incarnation in self._outgoing:
            return
        self._outgoing[peer.incarnation] = None
        mine = self._agent.view.me
        if self._bound and not peer.is_self and peer.member.host == mine.host and not self._closed:
            self._say(peer, {"ask": True})

    def _say(self, peer: Peer, header: dict[str, Any]) -> None:
        with contextlib.suppress(WorkerLostError):
            frame = encode_small(Kind.SEGMENTS, 0, header, ())
            peer.send_small(frame, False)

    def _fall_back(self, peer: Peer, reason: str) -> None:
        level = logging.DEBUG if self._said else logging.WARNING
        self._said = True
        logger.log(
            level,
            "large tensors for worker '%s' go through the socket, not through shared memory: %s",
            peer.name,
            reason,
        )

    # ---- what peers say

    def message_received(self, peer: Peer, frame: Frame) -> None:
        """A message came whose large buffers lie in a segment: hand it on as if they had come with it."""
        self._agent.frames_received(peer, [self.unwrap(peer, frame)])

    @staticmethod
    def outline(segment: Any) -> tuple[int, dict[str, Any]] | None:
        """Kind and header of the message that a frame with this segment stands for, which nothing is done to;
        None if it stands for none.
        """
        try:
            message = unpack(segment)
        except ProtocolError:
            return None
        return message.kind, message.header

    def unwrap(self, peer: Peer, frame: Frame, taken: Sized = TAKEN) -> Frame:
        """The message that a frame stands for, together with its buffers. For whoever reads messages.

        Args:
            taken: see ``IncomingSegments.open``.

        Raises:
            ProtocolError: it stands for none.
        """
        incoming = self._incoming.get(peer.incarnation)
        if incoming is None or frame.header or len(frame.buffers) != 1:
            raise ProtocolError("a malformed message in a segment")
        kind, header, number, use, lengths, pickle = unpack(frame.buffers[0])
        if kind == Kind.IN_SEGMENT:
            raise ProtocolError("a message in a segment in a segment")
        buffers = incoming[0].open(number, use, lengths, self._max_message_bytes, taken)
        return Frame(kind, frame.call_id, header, [pickle, *buffers])

    def received(self, peer: Peer, frame: Frame) -> None:
        """A peer says something about segments."""
        handlers: dict[str, Callable[[Peer, Any], None]] = {
            "ask": self._asked,
            "come": self._told_to_come,
            "proof": self._proved,
            "refuse": self._refused,
            "drop": self._dropped,
        }
        for key, value in frame.header.items():
            if key not in handlers:
                raise ProtocolError("an unknown message about segments")
            handlers[key](peer, value)

    # ---- to receive through segments

    def _asked(self, peer: Peer, _: object) -> None:
        if peer.incarnation in self._doors or peer.incarnation in self._incoming:
            raise ProtocolError("it asks for segments for the second time")
        try:
            if not self._bound:
                raise RpcError("shared memory is turned off there, or its system has none of this kind")
            if not self._takes:
                raise RpcError("it deserializes in safe mode, so it takes no memory that others could change")
            door = Door(self._loop, lambda sock, descriptor: self._entered(peer, sock, descriptor))
        except (OSError, RpcError) as error:
            self._say(peer, {"refuse": str(error)})
            return
        self._doors[peer.incarnation] = door
        self._say(peer, {"come": [door.name, door.token, self._bound, _MAX_COUNT]})

    def _entered(self, peer: Peer, sock: socket.socket, descriptor: int | None) -> None:
        try:
            if descriptor is None:
                raise OSError("a descriptor did not arrive: it may have no more files open")
            memory.check(descriptor, LEDGER_BYTES)
            ledger = Ledger(Mapping(descriptor, LEDGER_BYTES))
        except (OSError, RpcError) as error:
            sock.close()
            self._say(peer, {"refuse": str(error)})
            return
        finally:
            if descriptor is not None:
                os.close(descriptor)
        incoming = IncomingSegments(peer.name, ledger, self._bound, _MAX_COUNT)
        self._incoming[peer.incarnation] = incoming, sock
        self._loop.add_reader(sock.fileno(), self._introduced, peer, incoming, sock)
        self._say(peer, {"proof": ledger.nonce()})

    def _introduced(self, peer: Peer, incoming: IncomingSegments, sock: socket.socket) -> None:
        """Take the segments that a peer introduces on the channel."""
        try:
            record, descriptor = fd_channel.receive(sock)
            if not record:
                self._loop.remove_reader(sock.fileno())
                return
            try:
                number, slot, size, use = msgpack.unpackb(record)
            except Exception as error:
                if descriptor is not None:
                    os.close(descriptor)
                raise ProtocolError("a malformed introduction of a segment") from error
            incoming.introduce(number, slot, size, use, descriptor)
        except BlockingIOError:
            return
        except OSError as error:
            logger.debug("no more segments come from worker '%s': %s", peer.name, error)
            self._loop.remove_reader(sock.fileno())
        except ProtocolError as error:
            self._agent.connections.lose(peer, f"it sent {error}")

    def _dropped(self, peer: Peer, numbers: object) -> None:
        incoming = self._incoming.get(peer.incarnation)
        if incoming is not None:
            incoming[0].drop(numbers)

    # ---- to send through segments

    def _told_to_come(self, peer: Peer, value: object) -> None:
        if self._outgoing.get(peer.incarnation, self) is not None or peer.incarnation in self._unproved:
            raise ProtocolError("it says where to come, and was not asked")
        match value:
            case [str(name), bytes(token), int(bound), int(count)]:
                limits = Limits(bound, count, SLOTS)
            case _:
                raise ProtocolError("a malformed message about segments")
        try:
            sock, ledger = _connect(name, token)
        except OSError as error:
            self._fall_back(peer, error.strerror or str(error))
        else:
            self._unproved[peer.incarnation] = sock, ledger, limits

    def _proved(self, peer: Peer, nonce: object) -> None:
        if peer.incarnation not in self._unproved:
            raise ProtocolError("it proves what was not asked")
        sock, ledger, limits = self._unproved.pop(peer.incarnation)
        if nonce != ledger.nonce():
            sock.close()
            self._fall_back(peer, "what is written here is not what is read there")
            return
        with self._lock:
            self._pool.open(peer.incarnation, limits)
            self._outgoing[peer.incarnation] = OutgoingSegments(
                peer,
                self._pool,
                self._lock,
                sock,
                ledger,
                self._copier,
                self._discard,
                lambda why: self._fall_back(peer, why),
            )

    def _refused(self, peer: Peer, reason: object) -> None:
        unproved = self._unproved.pop(peer.incarnation, None)
        if unproved is not None:
            unproved[0].close()
        self._fall_back(peer, str(reason)[:300])

    # ---- the end of segments

    def _discard(self, segments: Sequence[Segment]) -> None:
        """Unmap segments that left the pool, and have their peers do so. From any thread."""
        numbers: dict[int, list[int]] = {}
        for segment in segments:
            outgoing = self._outgoing.get(segment.peer)
            if outgoing is not None and outgoing.forget(segment):
                numbers.setdefault(segment.peer, []).append(segment.number)
        for incarnation, those in numbers.items():
            peer = self._agent.peer_by_incarnation(incarnation)
            if peer is not None:
                self._say(peer, {"drop": those})

    def _trim_later(self) -> None:
        if self._trimming is None and not self._closed:
            self._trimming = self._loop.call_later(IDLE_SECONDS / 2, self._trim)

    def _trim(self) -> None:
        """Give back the memory of segments that have rested long enough; look again while there are any."""
        self._trimming = None  # before the look: what is made after it finds no timer and sets one
        now = monotonic()
        for outgoing in list(self._outgoing.values()):
            if outgoing is not None:
                outgoing.look(now)
        with self._lock:
            dropped = self._pool.trim(now, IDLE_SECONDS)
            left = self._pool.size
        self._discard(dropped)
        if left:
            self._trim_later()

    def peer_gone(self, peer: Peer, reason: str) -> None:
        """A worker is gone: its segments are not used again; what was received through them stays."""
        self._close_door(peer.incarnation)
        unproved = self._unproved.pop(peer.incarnation, None)
        if unproved is not None:
            unproved[0].close()
        outgoing = self._outgoing.get(peer.incarnation)
        self._outgoing[peer.incarnation] = None
        if outgoing is not None:
            outgoing.close()
        incoming = self._incoming.pop(peer.incarnation, None)
        if incoming is not None:
            incoming[0].close()
            self._loop.remove_reader(incoming[1].fileno())
            incoming[1].close()

    def _close_door(self, incarnation: int) -> None:
        door = self._doors.pop(incarnation, None)
        if door is not None:
            door.close()

    def close(self) -> None:
        """This worker leaves."""
        self._closed = True
        if self._trimming is not None:
            self._trimming.cancel()
        for incarnation in {*self._doors, *self._unproved, *self._outgoing, *self._incoming}:
            peer = self._agent.peer_by_incarnation(incarnation)
            if peer is not None:
                self.peer_gone(peer, "")

    def abandon(self) -> None:
        """In a forked child: let go of what the parent goes on using, without taking a lock."""
        for door in self._doors.values():
            door.abandon()
        for outgoing in self._outgoing.values():
            if outgoing is not None:
                outgoing.abandon()
        for sock in [
            *(each[0] for each in self._unproved.values()),
            *(each[1] for each in self._incoming.values()),
        ]:
            os.close(sock.detach())
        for incoming, _ in self._incoming.values():
            incoming.close()


def _connect(name: str, token: bytes) -> tuple[socket.socket, Ledger]:
    """Go through a peer's door, with a new ledger in the hand."""
    descriptor = memory.create(LEDGER_BYTES)
    try:
        ledger = Ledger(Mapping(descriptor, LEDGER_BYTES))
        ledger.write_nonce()
        sock = fd_channel.connect(name)
        try:
            fd_channel.send(sock, token, descriptor)
        except BaseException:
            sock.close()
            raise
    finally:
        os.close(descriptor)
    return sock, ledger
