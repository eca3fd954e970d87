"""The workers, as seen by one of them: how to send frames to them, and whether they are present."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any, Final

from rpc.errors import RpcError, SerializationError, WorkerLostError
from rpc.group.link import Link
from rpc.group.membership import Membership, WorkerReference
from rpc.group.workers import Member
from rpc.runtime import file_limit
from rpc.runtime.blocking import Condition, wait_while
from rpc.runtime.events import Events
from rpc.runtime.interrupts import protected
from rpc.serialization.payload import PeerDevices
from rpc.serialization.serializer import OwnCodec
from rpc.transport.base import CAPTURED_BYTES, INFINITE, Connection, ConnectionClosed, QueueFull
from rpc.transport.inline_read import Awaited, InlineReader
from rpc.transport.session import Session
from rpc.wire.frames import Kind, encode_small

__all__ = ["MAX_DEPARTED", "RESUMED", "Peer", "PeerTable"]

RESUMED: Final = 2
"""Codec of an ``ALIVE`` frame: the messages that an earlier connection lost were sent again."""

MAX_DEPARTED: Final = 100
"""Maximum number of workers of a dynamic group that are remembered by name after they are gone."""


class Peer:
    """Another worker: its description, the link to it, and the frames that wait for a connection.

    Methods that send, acknowledge or wait may be called on any thread, those that change the link on the
    loop's thread. Attributes may be read on any
    thread, and only methods change them.

    Args:
        member: the worker.
        codec: serializes calls and values for it.
        connect: called on the sending thread when a frame waits for a connection; it must not block, and
            calling it twice must do no harm.
        send_queue_bytes: callers of ``send`` wait while more than this waits for the connection, in bytes.
        near: whether it is on this host.
        is_self: whether it is this worker.

    Attributes:
        link: state of the connection, and data about earlier ones.
        session: counts and keeps messages, so that each arrives once.
        connection: the open connection, or None.
        reader: where an idle thread may wait for a task, or None.
        lost: why the worker is gone for good, or None.
        has_left: whether it is gone because it left and said goodbye.
        devices: the agreement with it about devices; None if tensors on devices cannot be sent.
    """

    devices: PeerDevices | None = None

    def __init__(
        self,
        member: Member,
        codec: OwnCodec,
        connect: Callable[[Peer], None],
        *,
        send_queue_bytes: int = 64 << 20,
        near: bool = True,
        is_self: bool = False,
    ) -> None:
        self.member = member
        self.name = member.name
        self.main = member.main
        self.incarnation = member.incarnation
        self.codec = codec
        self.near = near
        self.is_self = is_self
        self.link = Link()
        self.session = Session()
        self.connection: Connection | None = None
        self.reader: InlineReader | None = None
        self.lost: str | None = None
        self.has_left = False
        self._connect = connect
        self._lock = threading.RLock()  # a finalizer that runs while it is held may send
        self._waiting: list[tuple[list[Any], int]] = []
        self._waiting_bytes = 0
        self._queue_limit = send_queue_bytes
        self._room: Condition | None = None
        """Made by the first thread that waits for room, since it is large, and there may be thousands of
        workers.
        """
        self._unsent: list[bytes] = []
        self._last_connection: Connection | None = None

    def __repr__(self) -> str:
        return f"<Peer '{self.member.name}' (id {self.member.id})>"

    @property
    def connected(self) -> bool:
        return self.connection is not None

    @property
    def is_quiet(self) -> bool:
        """Whether all data of the last connection, which broke, has been processed."""
        return self._last_connection is None or self._last_connection.is_quiet

    def agree_on_devices(self, devices: PeerDevices, codec: OwnCodec) -> None:
        """Record the agreement with the worker about devices, and the codec that serializes for it from
        now on.
        """
        self.devices = devices
        self.codec = codec

    def acknowledge(self) -> None:
        """Acknowledge the number of received messages to the worker. From any thread."""
        self._send_heartbeat(self.session.acknowledging(), 0)

    def large_came(self, number: int) -> None:
        """Acknowledge a message that arrived in chunks, which has no number in the session, before it is
        processed.
        """
        with contextlib.suppress(RpcError):  # the worker is gone, which will be recorded soon
            self.send_small(encode_small(Kind.ARRIVED, number, {}, ()), 0)

    def send_heartbeat(self, wants: int) -> None:
        """Send a heartbeat; ``wants`` is the codec of the ``Kind.ALIVE`` frame. From any thread."""
        self._send_heartbeat(self.session.received, wants)

    def _send_heartbeat(self, received: int, wants: int) -> None:
        connection = self.connection
        if connection is not None and not self.is_self:
            connection.send_unnumbered(encode_small(Kind.ALIVE, received, {}, (), wants), newest=not wants)

    # ---- waiting for messages from it: any thread

    def wait(self, awaited: Awaited, deadline: float, *, reads: bool = True) -> None:
        """Wait for ``awaited`` from this worker by reading the connection, if the thread may.
        A signal handler may interrupt it.

        It returns early if another thread reads, or takes over: ``awaited.sleep`` must follow if ``awaited``
        has no outcome then.

        Args:
            deadline: deadline on the monotonic clock, in seconds.
            reads: whether the thread may read; false in a finalizer or signal handler, which may wait in the
                middle of the thread's own reading, which ends then.
        """
        reader = self.reader
        if reader is None or awaited.outcome is not None:
            return
        if not reads:
            reader.leave()
            return
        turn = reader.claim()
        if turn is not None:
            reader.wait_for(awaited, deadline, turn)

    def lost_error(self, consequence: str = "") -> WorkerLostError:
        """Return a new error for an operation that the worker's loss prevents; ``consequence``
        describes it.
        """
        reason = self.lost or "the connection to it was closed"
        gone = f"worker '{self.name}' (id {self.member.id}) is gone: {reason}"
        return WorkerLostError(f"{gone}. {consequence}" if consequence else gone, self.name, reason)

    def check_size(self, size: int) -> None:
        """Raise ``SerializationError`` if the worker does not accept messages of ``size`` bytes."""
        limit = self.member.max_message_bytes
        if size > limit:
            raise SerializationError(
                f"a message of {size} bytes to worker '{self.name}' is over the limit of {limit} that it "
                "accepts: raise max_message_bytes in its options"
            )

    def send(
        self, buffers: Sequence[Any], size: int, *, aliased: bool = False, wait: float = INFINITE
    ) -> None:
        """Send one frame, or keep it until there is a connection; see ``Connection.send``. Raises
        ``WorkerLostError`` if the worker is gone, ``QueueFull`` if its queue is full.
        """
        connection = self.connection
        while True:
            if connection is None:
                connection = self._keep(buffers, size, aliased, wait)
                if connection is None:
                    return
            try:
                connection.send(buffers, size, aliased=aliased, wait=wait)
                return
            except ConnectionClosed:
                connection = self._keep(buffers, size, aliased, wait, connection)
                if connection is None:
                    return

    def send_small(self, frame: bytes, wait: float, *, coalesce: bool = False) -> None:
        """Like ``send``, for a frame in one piece, as most calls are. See ``Connection.send_small``."""
        connection = self.connection
        if connection is None:
            self.send((frame,), len(frame), wait=wait)
            return
        try:
            connection.send_small(frame, wait, coalesce=coalesce)
        except ConnectionClosed:
            self.send((frame,), len(frame), wait=wait)

    def send_patiently(self, frame: bytes) -> None:
        """Like ``send_small`` without waiting, for a frame that may itself wait behind a long chunk."""
        connection = self.connection
        if connection is None:
            self.send((frame,), len(frame), wait=0)
            return
        try:
            connection.send_small(frame, 0, patient=True)
        except ConnectionClosed:
            self.send((frame,), len(frame), wait=0)

    def flush(self) -> None:
        """Send the coalesced frames."""
        connection = self.connection
        if connection is not None:
            connection.flush()

    @protected
    def _keep(
        self,
        buffers: Sequence[Any],
        size: int,
        aliased: bool,
        wait: float,
        closed: Connection | None = None,
    ) -> Connection | None:
        """Queue the frame until there is a connection; returns the connection if there is one by now, other
        than the ``closed`` one.
        """
        pieces = [self._capture(buffer) for buffer in buffers] if aliased else list(buffers)
        deadline = monotonic() + wait
        with self._lock:
            if wait and not self._wait_for_room(deadline):
                raise QueueFull(f"there is no connection to worker '{self.name}' yet, and too much waits")
            if self.connection is not None and self.connection is not closed:
                return self.connection
            if self.lost is not None:
                raise self.lost_error()
            is_first = not self._waiting
            self._waiting.append((pieces, size))
            self._waiting_bytes += size
            if is_first:
                self._connect(self)
        return None

    def _wait_for_room(self, deadline: float) -> bool:
        if not self._is_full():
            return True
        self._room = room = self._room or Condition(self._lock)
        return wait_while(self._is_full, room, deadline)

    def _is_full(self) -> bool:
        waits = self.connection is None and self.lost is None
        return waits and self._waiting_bytes > self._queue_limit

    def _capture(self, buffer: Any) -> Any:
        """Capture a buffer as a transport would with a connection: see ``Connection.send``."""
        if type(buffer) is bytes:
            return buffer
        large = memoryview(buffer).nbytes > CAPTURED_BYTES
        return buffer if large and not self.near else bytes(buffer)

    def established(self, connection: Connection, number: int = 1, received: int = 0) -> None:
        """Handle a new connection: first send the waiting frames, in order.

        Args:
            number: number of connections so far, including this one.
            received: number of messages that the other side has received. Raises ``ProtocolError`` if
            impossible.
        """
        with self._lock:
            again = self.session.connect(number, received, self._unsent)
            self._unsent, self._last_connection = [], None
            if not self.is_self:
                connection.carry(self.session)
            for frame in again:
                connection.send_small(frame, 0)
            waiting = self._take_waiting()
            for buffers, size in waiting:
                try:
                    connection.send(buffers, size, wait=False)
                except ConnectionClosed:  # it has broken already: large messages wait for the next one
                    self._waiting.append((buffers, size))
                    self._waiting_bytes += size
            if number > 1:  # after the last messages that a bulk stream has recorded
                connection.send_unnumbered(encode_small(Kind.ALIVE, self.session.received, {}, (), RESUMED))
            self.connection, self.reader = connection, connection.reader

    def send_by(self, connection: Connection) -> None:
        """Send by this connection from now on; it passes frames on to the present one."""
        self.connection = connection

    def disconnected(self) -> None:
        """Record that the connection is closed, though the worker may live. ``is_quiet`` says when
        ``session.received`` is final.
        """
        with self._lock:
            connection, self.connection, self.reader = self.connection, None, None
            if connection is not None:
                self._unsent += connection.remains()
                self._last_connection = connection

    def gone(self, reason: str, *, left: bool = False) -> Connection | None:
        """Record that the worker is gone for good; returns the connection, to be closed."""
        with self._lock:
            if self.lost is None:
                self.lost, self.has_left = reason, left
            dropped = self._take_waiting()
            self._unsent, self._last_connection, self.session = [], None, Session()
            connection, self.connection, self.reader = self.connection, None, None
        del dropped  # without the lock, as this may run code of the user's
        return connection

    def _take_waiting(self) -> list[tuple[list[Any], int]]:
        """Take out the waiting frames, with the lock held."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if self._room is not None:
            self._room.notify_all()
        return waiting


class PeerTable:
    """The peers of one agent. Lookups are for any thread, everything else for the loop's.

    Args:
        make: makes the peer of a member.
        connect: starts connecting to a peer; may be called from any thread, and repeatedly.
        joined: called with each new peer, in order.
        on_loop: calls a function on the loop's thread, and returns its result.

    Attributes:
        view, own: the membership, and this worker's peer for itself; set by ``form``.
        by_incarnation: returns a peer, present or gone; None if it was never in the group, or is forgotten.
    """

    view: Membership
    own: Peer

    def __init__(
        self,
        make: Callable[[Member], Peer],
        connect: Callable[[Peer], None],
        joined: Iterable[Callable[[Peer], object]],
        events: Events,
        on_loop: Callable[..., Peer],
    ) -> None:
        self._make = make
        self._connect = connect
        self._joined = joined
        self._events = events
        self._on_loop = on_loop
        self._peers: dict[int, Peer] = {}
        self._by_name: dict[str, Peer] = {}
        self._departed: deque[int] = deque()
        self.by_incarnation: Callable[[int], Peer | None] = self._peers.get

    def form(self, view: Membership, own: Peer) -> None:
        """Set the group that was formed; from any thread, since no other uses it yet."""
        self.view = view
        self._peers[own.incarnation] = self.own = own

    def find(self, worker: WorkerReference) -> Peer:
        """Return the peer with a name, an id or a ``WorkerInfo``; see ``Membership.resolve``."""
        if type(worker) is str:  # no other type: 1.0 and True would be found under 1
            peer = self._by_name.get(worker)
            if peer is not None and peer.lost is None:  # otherwise another worker may have the name now
                return peer
        member = self.view.resolve(worker)
        peer = self._peers.get(member.incarnation)
        if peer is None:  # the loop has just accepted it, and is about to make its peer
            peer = self._on_loop(self.ensure, member)
        self._by_name[peer.name] = peer
        return peer

    def ensure(self, member: Member) -> Peer:
        """Return the peer of a member, which is made if necessary."""
        peer = self._peers.get(member.incarnation)
        if peer is None:
            file_limit.provide_for(len(self._peers))
            peer = self._peers[member.incarnation] = self._make(member)
            self._by_name.clear()
            for handler in self._joined:
                handler(peer)
            tell = self._events.peer_joined
            if tell is not None:
                tell(member.name, member.id)
        return peer

    def gone(self, member: Member, reason: str) -> Peer:
        """Return a peer for a member that is gone and was never met, or is forgotten. It is not in
        the table.
        """
        peer = self._make(member)
        peer.link.lose()
        peer.gone(reason)
        return peer

    def leave(self, peer: Peer, reason: str) -> None:
        """Record that a worker is gone for good."""
        self.view.leave(peer.incarnation, reason)
        self._by_name.clear()
        self._departed.append(peer.incarnation)
        if len(self._departed) > MAX_DEPARTED and not self.view.static:
            forgotten = self._departed.popleft()
            self.view.forget(forgotten)
            self._peers.pop(forgotten, None)

    def watch_over(self, peer: Peer) -> None:
        """Stay connected to a peer from now on, so that its death is detected although nothing is
        sent to it.
        """
        if not peer.connected:
            self._connect(peer)

    def present(self) -> list[Peer]:
        """Return all workers that are in the group now."""
        return [self.ensure(member) for member in self.view.present()]

    def all(self) -> list[Peer]:
        """Return all workers that have ever been in the group, except those that are forgotten."""
        return list(self._peers.values())
