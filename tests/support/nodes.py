"""A worker reduced to its connections: ``Connections``, peers, and a record of what they are told."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pytest

from rpc.errors import ProtocolError
from rpc.group.connections import Connections
from rpc.group.handshake import Stream
from rpc.group.membership import Membership
from rpc.group.peer import Peer
from rpc.group.workers import Member, WorkerInfo
from rpc.runtime.loop import LoopThread
from rpc.runtime.tasks import Task
from rpc.transport.authentication import TokenAuthenticator
from rpc.transport.base import Connection, Transport, TransportContext
from rpc.transport.registry import transports
from rpc.wire.frames import Frame, Kind, encode_small
from tests.support.members import codec
from tests.support.streams import SOON

GROUP = "job/1"
MESSAGE = Kind.EXTENSION


class MakeNode(Protocol):
    """What the fixture ``make_node`` gives."""

    def __call__(
        self,
        name: str,
        incarnation: int | None = None,
        host: str = "host",
        reach: dict[str, Transport] | None = None,
        authenticator: TokenAuthenticator | None = None,
    ) -> Node: ...


class Node:
    """One worker's links, on a loop that may be its own or shared.

    Args:
        name, worker_id, incarnation: who it is.
        loop: where the links live.
        on_loop: how to run a function there.
        reach: the transports; by default those of this machine.
        host: identity of its host: Unix sockets are for workers on the same.
        listen_on: where to listen.
        authenticator: what has others prove that they belong to the job.
    """

    def __init__(
        self,
        name: str,
        worker_id: int,
        incarnation: int,
        loop: asyncio.AbstractEventLoop,
        on_loop: Callable[..., Any],
        *,
        reach: dict[str, Transport] | None = None,
        host: str = "host",
        listen_on: str = "127.0.0.1",
        authenticator: TokenAuthenticator | None = None,
    ) -> None:
        self.loop = loop
        self.thread: LoopThread | None = None
        self.on_loop = on_loop
        self.view: Membership
        self.peers: dict[int, Peer] = {}
        self.received: list[tuple[str, int]] = []
        """Received messages with their senders, in the order of arrival."""
        self.gone: list[tuple[str, str]] = []
        """Workers that are gone, with the reasons."""
        self._changed = threading.Condition()
        if reach is None:
            reach = transports(TransportContext(loop, 1 << 20))
        self.connections = Connections(loop, reach, 1 << 30, authenticator)
        self.connections.serve(self)
        addresses = on_loop(self.connections.listen, listen_on, 0)
        self.member = Member(WorkerInfo(name, worker_id), incarnation, host, tuple(addresses))

    @classmethod
    def on(cls, thread: LoopThread, name: str, worker_id: int, incarnation: int, **options: Any) -> Node:
        """A worker whose links live on a thread of their own."""
        node = cls(name, worker_id, incarnation, thread.loop, thread.call, **options)
        node.thread = thread
        return node

    def form_group(self, *others: Member, static: bool = True) -> None:
        """Take part in a group with these others."""

        def form() -> None:
            self.view = Membership(self.member, static=static)
            for other in others:
                self.view.join(other)
                self.peer_for(other)
            self.connections.join_group(self.view, GROUP)

        self.on_loop(form)

    # ---- what links ask and tell (ConnectionEvents)

    def peer_for(self, member: Member) -> Peer:
        peer = self.peers.get(member.incarnation)
        if peer is None:
            peer = self.peers[member.incarnation] = Peer(
                member, codec(), self._connect, near=member.host == self.member.host
            )
        return peer

    def _connect(self, peer: Peer) -> None:
        self.loop.call_soon_threadsafe(self.connections.dialler.connect, peer)

    def frames_received(self, peer: Peer, frames: list[Frame]) -> None:
        with self._changed:
            for frame in frames:
                if frame.kind == Kind.GOODBYE:
                    self.connections.goodbye_received(peer, frame)
                else:
                    self.received.append((peer.name, frame.call_id))
            self._changed.notify_all()

    def stream_came(self, connection: Connection, stream: Stream) -> Callable[[], object]:
        raise ProtocolError("a bulk stream, which this worker does not take")

    def find_target(self, peer: Peer, kind: int, call_id: int, sizes: Sequence[int]) -> None:
        pass

    def take_inline(self, peer: Peer, frames: list[Frame], *, keep: bool) -> Task | None:
        return None

    def peer_broke(self, peer: Peer) -> None:
        pass

    def peer_gone(self, peer: Peer, reason: str) -> None:
        self.view.leave(peer.incarnation, reason)
        with self._changed:
            self.gone.append((peer.name, reason))
            self._changed.notify_all()

    # ---- what tests do

    def send(self, to: Node, number: int) -> None:
        """Send one message, from any thread."""
        self.peers[to.member.incarnation].send_small(encode_small(MESSAGE, number, {}, ()), False)

    def numbers_from(self, sender: Node) -> list[int]:
        """The messages that came from one worker."""
        return [number for name, number in self.received if name == sender.member.name]

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait for messages or deaths."""
        with self._changed:
            assert self._changed.wait_for(condition, SOON), (self.received, self.gone)

    def wait_gone(self) -> tuple[str, str]:
        """Return the first worker that is gone, with the reason; waits for it."""
        self.wait_until(lambda: self.gone)
        return self.gone[0]

    def leave(self, reason: str = "the test is over") -> None:
        """Say goodbye and close everything; for a worker on a thread of its own."""
        assert self.thread is not None
        self.thread.wait_for(self.connections.close(list(self.peers.values()), reason), SOON)

    def open_connections(self) -> list[Connection]:
        """Everything that is open, listeners left out."""
        found: list[Any] = self.on_loop(self.connections.connections, self.peers.values())
        return [each for each in found if hasattr(each, "owner")]


def pair(make_node: MakeNode, host: str = "host") -> tuple[Node, Node]:
    """Two workers of one static group."""
    left, right = make_node("left", host=host), make_node("right", host=host)
    left.form_group(right.member)
    right.form_group(left.member)
    return left, right


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged about those who were turned away."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.getMessage().startswith("refused")
    ]
