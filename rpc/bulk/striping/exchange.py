"""Stripes between this worker and all others: how two begin, what is said on their connection, and the end.

The side that has made the connection opens the stripes. When it has sent its first large message, it *asks*;
the other side answers with an *offer*: how many, and a token. When all are open and welcome, the connecting
side says *ready*, and both may use them. The accepting side makes its offer unasked when it is the first to
send something large. Who cannot or shall not have stripes *refuses*; then all goes over the connection.

A worker that leaves says so (*leaving*) when all its messages have been given to the kernel, and stays until
the other has received them (*left*): on the connection alone, a goodbye could overtake them. From then on it
means nothing that its stripes end. Otherwise the end of a stripe is that of the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from rpc.bulk.striping.opening import TOKEN_BYTES, Offers, connect_stripes
from rpc.bulk.striping.plan import Arrivals, Outgoing
from rpc.bulk.striping.receiving import StripeReceiver
from rpc.bulk.striping.sending import StripeSender
from rpc.errors import ProtocolError, RpcError, WorkerLostError
from rpc.group.connections import FAREWELL_SECONDS
from rpc.group.handshake import legible
from rpc.group.peer import Peer
from rpc.transport import Connection, ConnectionClosed
from rpc.wire.decoder import allocate, read_opening
from rpc.wire.frames import Frame, Kind, encode_small

if TYPE_CHECKING:
    from rpc.agent.agent import Agent

__all__ = ["STRIPED_BYTES", "Striping"]

logger = logging.getLogger(__name__)

STRIPED_BYTES: Final = 1 << 20
"""Messages up to this size go over the connection itself."""

_OPENING_BYTES: Final = 32 << 10
"""A message with a longer opening goes over the connection itself."""

_GRACE_SECONDS: Final = 0.2
"""When a stripe ends, what has come on the connection is taken in first: it may say why."""

_OWN_KINDS: Final = (Kind.STRIPES, Kind.STRIPE, Kind.STRIPED)


class _Stripes:
    """The stripes of one peer."""

    def __init__(
        self, sockets: Sequence[socket.socket], sender: StripeSender, receiver: StripeReceiver
    ) -> None:
        self.sockets = sockets
        self.sender = sender
        self.receiver = receiver
        self.peer_leaves = False

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        for sock in self.sockets:
            sock.close()


class Striping:
    """All stripes of one agent. ``send`` from any thread, everything else on the loop's.

    Args:
        agent: whose they are.
        count: how many it may have to each peer; with 1, it neither asks for stripes nor accepts any.
        max_message_bytes: the largest message that it accepts.
    """

    def __init__(self, agent: Agent, count: int, max_message_bytes: int) -> None:
        self._agent = agent
        self._loop: asyncio.AbstractEventLoop = agent.loop
        self._count = count
        self._max_message_bytes = max_message_bytes
        self._stripes: dict[int, _Stripes | None] = {}
        """None: not now, or not at all, but large messages need not ask any more."""
        self._offers = Offers()
        self._had_offer: set[int] = set()
        self._connecting: dict[int, asyncio.Task[None]] = {}
        self._under_way: set[Connection] = set()
        self._left: dict[int, asyncio.Future[None]] = {}
        self._said = False
        self._closed = False
        self.stripe_came = self._offers.stripe_came
        """Takes over a connection that says to be a stripe, or raises ``ProtocolError``."""

    # ---- sending

    def send(self, peer: Peer, buffers: Sequence[Any], size: int, *, aliased: bool, wait: float) -> bool:
        """Send a message over stripes, if it is large enough and there are any.

        Arguments are as for ``Peer.send``.

        Returns:
            Whether it was sent. If not, it is to go over the connection.

        Raises:
            WorkerLostError: the worker is gone.
            QueueFull: too much is queued for it already.
        """
        if self._count == 1 or size <= STRIPED_BYTES or len(buffers) < 2 or len(buffers[0]) > _OPENING_BYTES:
            return False
        if self._closed:  # the goodbye goes over the connection, after all that does
            return False
        connection = peer.connection
        if connection is None or not connection.over_network:
            return False
        try:
            stripes = self._stripes[peer.incarnation]
        except KeyError:
            self._agent.mailbox.call(self._begin, peer)
            return False
        if stripes is None:
            return False
        if wait and connection.direct is not None:
            connection.direct.leave()  # this thread may wait for room
        try:
            return stripes.sender.send(buffers, size, aliased=aliased, wait=wait)
        except ConnectionClosed:
            raise peer.lost_error() from None

    def _begin(self, peer: Peer) -> None:
        if peer.incarnation in self._stripes:
            return  # other threads had something for it, or it opened them itself
        self._stripes[peer.incarnation] = None
        if self._closed or not peer.connected:
            return
        if self._agent.connections.has_dialled(peer):
            self._say(peer, {"ask": self._count})
        else:
            self._offer(peer, self._count)

    def _say(self, peer: Peer, header: dict[str, Any]) -> None:
        with contextlib.suppress(WorkerLostError):
            peer.send_small(encode_small(Kind.STRIPES, 0, header, ()), False)

    def _announce(self, peer: Peer, number: int, opening: bytes) -> None:
        with contextlib.suppress(WorkerLostError):
            peer.send_small(encode_small(Kind.STRIPED, number, {}, (opening,)), False)

    def _fall_back(self, peer: Peer, reason: str) -> None:
        level = logging.DEBUG if self._said else logging.WARNING
        self._said = True
        logger.log(
            level, "messages for worker '%s' go over one connection, not over stripes: %s", peer.name, reason
        )

    # ---- what peers say

    def received(self, peer: Peer, frame: Frame) -> None:
        """A peer says something about stripes."""
        handlers: dict[str, Callable[[Peer, Any], None]] = {
            "ask": self._asked,
            "offer": self._offered,
            "ready": self._ready,
            "refuse": self._refused,
            "leaving": self._leaving,
            "left": self._has_left,
        }
        for key, value in frame.header.items():
            if key not in handlers:
                raise ProtocolError("an unknown message about stripes")
            handlers[key](peer, value)

    def message_opened(self, peer: Peer, frame: Frame) -> None:
        """A message is opened whose segments come over stripes."""
        stripes = self._stripes.get(peer.incarnation)
        if (
            stripes is None
            or frame.header
            or len(frame.buffers) != 1
            or len(frame.buffers[0]) > _OPENING_BYTES
        ):
            raise ProtocolError("a malformed opening of a message over stripes")
        what, rooms, lead = read_opening(memoryview(frame.buffers[0]), self._max_message_bytes, 0)
        if what[0] in _OWN_KINDS:
            raise ProtocolError("a message about stripes over stripes")
        stripes.receiver.open(frame.call_id, what, rooms, lead)

    def _asked(self, peer: Peer, count: object) -> None:
        if not isinstance(count, int) or count < 2 or self._agent.connections.has_dialled(peer):
            raise ProtocolError("a malformed message about stripes")
        if peer.incarnation in self._had_offer:
            return  # made while it asked
        if self._count == 1 or self._closed:
            self._say(peer, {"refuse": "the option tcp_stripes is 1 there"})
        else:
            self._offer(peer, min(count, self._count))

    def _offer(self, peer: Peer, count: int) -> None:
        if peer.incarnation not in self._had_offer:
            self._had_offer.add(peer.incarnation)
            self._say(peer, {"offer": [count, self._offers.make(peer.incarnation, count)]})

    def _offered(self, peer: Peer, offer: object) -> None:
        match offer:
            case [int(count), bytes(token)] if count >= 2 and len(token) == TOKEN_BYTES:
                pass
            case _:
                raise ProtocolError("a malformed message about stripes")
        if peer.incarnation in self._had_offer or not self._agent.connections.has_dialled(peer):
            raise ProtocolError("it offers stripes for the second time, or is not the one to offer any")
        self._had_offer.add(peer.incarnation)
        if self._count == 1 or self._closed:
            self._say(peer, {"refuse": "the option tcp_stripes is 1 there"})
            return
        task = self._loop.create_task(self._connect(peer, token, min(count, self._count)))
        self._connecting[peer.incarnation] = task

    async def _connect(self, peer: Peer, token: bytes, count: int) -> None:
        try:
            sockets = await connect_stripes(
                lambda: self._agent.connections.connect_again(peer), token, count, self._under_way
            )
        except (OSError, RpcError) as error:
            if peer.lost is None and not self._closed:
                reason = str(error) or "it takes too long to connect"
                self._fall_back(peer, reason)
                self._say(peer, {"refuse": reason})
        else:
            self._say(peer, {"ready": count})
            self._open(peer, sockets)
        finally:
            self._connecting.pop(peer.incarnation, None)

    def _ready(self, peer: Peer, count: object) -> None:
        if not isinstance(count, int):
            raise ProtocolError("a malformed message about stripes")
        self._open(peer, self._offers.take(peer.incarnation, count))

    def _refused(self, peer: Peer, reason: object) -> None:
        if self._stripes.get(peer.incarnation) is not None:
            raise ProtocolError("it refuses the stripes that it has")
        self._offers.drop(peer.incarnation)
        self._fall_back(peer, legible(reason))

    def _open(self, peer: Peer, sockets: Sequence[socket.socket]) -> None:
        """All stripes are there: use them."""

        def failed(reason: str) -> None:
            if not stripes.peer_leaves:
                self._loop.call_later(
                    _GRACE_SECONDS, self._lose, peer, f"a stripe of its connection {reason}"
                )

        def malformed(what: str) -> None:
            self._agent.connections.lose(peer, f"it sent a malformed message over a stripe: {what}")

        def deliver(what: Any, segments: list[memoryview]) -> None:
            kind, call_id, header = what
            if peer.lost is None:  # else this worker is about to leave
                self._agent.frames_received(peer, [Frame(kind, call_id, header, segments)])

        sender = StripeSender(
            self._loop,
            sockets,
            f"worker '{peer.name}'",
            Outgoing(peer.member.max_message_bytes),
            lambda number, opening: self._announce(peer, number, opening),
            failed,
            self._agent.options.send_queue_bytes,
        )
        arrivals = Arrivals(self._max_message_bytes, allocate)
        receiver = StripeReceiver(self._loop, sockets, arrivals, deliver, failed, malformed)
        stripes = self._stripes[peer.incarnation] = _Stripes(sockets, sender, receiver)
        logger.debug("large messages for worker '%s' go over %d stripes", peer.name, len(sockets))

    # ---- the end

    def _lose(self, peer: Peer, reason: str) -> None:
        if self._stripes.get(peer.incarnation) is not None:
            self._agent.connections.lose(peer, reason)

    async def finish(self) -> None:
        """This worker leaves: wait until all that went over stripes has arrived, but not for ever."""
        self._closed = True
        for task in self._connecting.values():
            task.cancel()
        for incarnation, stripes in self._stripes.items():
            peer = self._agent.peer_by_incarnation(incarnation)
            if stripes is not None and peer is not None:
                self._left[incarnation] = self._loop.create_future()
                stripes.sender.finish(lambda peer=peer: self._say(peer, {"leaving": True}))  # type: ignore[misc]
        if self._left:
            await asyncio.wait(self._left.values(), timeout=FAREWELL_SECONDS)

    def _leaving(self, peer: Peer, _: object) -> None:
        stripes = self._stripes.get(peer.incarnation)
        if stripes is None:
            raise ProtocolError("it takes leave of stripes that it does not have")
        stripes.peer_leaves = True
        stripes.receiver.when_idle(lambda: self._say(peer, {"left": True}))

    def _has_left(self, peer: Peer, _: object) -> None:
        left = self._left.get(peer.incarnation)
        if left is None:
            raise ProtocolError("it lets this worker go, which does not leave")
        if not left.done():
            left.set_result(None)

    def peer_gone(self, peer: Peer, reason: str) -> None:
        """A worker is gone: so are the stripes to it."""
        incarnation = peer.incarnation
        task = self._connecting.pop(incarnation, None)
        if task is not None:
            task.cancel()
        self._offers.drop(incarnation)
        stripes = self._stripes.get(incarnation)
        self._stripes[incarnation] = None
        if stripes is not None:
            stripes.close()
        left = self._left.get(incarnation)
        if left is not None and not left.done():
            left.set_result(None)

    def close(self) -> None:
        """This worker has left."""
        for incarnation in {*self._stripes, *self._had_offer, *self._connecting}:
            peer = self._agent.peer_by_incarnation(incarnation)
            if peer is not None:
                self.peer_gone(peer, "")

    def abandon(self) -> None:
        """In a forked child: let go of what the parent goes on using, without taking a lock."""
        for connection in self._under_way:
            connection.abandon()
        for sock in [
            *self._offers.sockets(),
            *(sock for stripes in self._stripes.values() if stripes is not None for sock in stripes.sockets),
        ]:
            with contextlib.suppress(OSError):
                os.close(sock.detach())
