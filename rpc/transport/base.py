"""The interface of a transport: it listens and connects, and both give connections that carry frames.

``unix.py`` and ``tcp.py`` are transports, gRPC's is ``farcall.grpc``; all of them use the
``StreamConnection`` of ``stream.py``. ``rpc.testing`` has a transport in memory. ``registry.py`` finds
transports by name. An address is ``SCHEME:REST``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from rpc.errors import RpcError
from rpc.options import RpcBackendOptions
from rpc.runtime.blocking import INFINITE
from rpc.runtime.tasks import Task
from rpc.transport.authentication import TokenAuthenticator
from rpc.transport.inline_read import InlineReader, Spinners
from rpc.transport.session import Session
from rpc.transport.tls import TlsContexts
from rpc.wire.frames import Frame
from rpc.wire.targets import Target

__all__ = [
    "CAPTURED_BYTES",
    "CLOSED_BY_PEER",
    "INFINITE",
    "SMALL_BYTES",
    "Accepted",
    "Connection",
    "ConnectionClosed",
    "ConnectionOwner",
    "DirectConnection",
    "Listener",
    "QueueFull",
    "Transport",
    "TransportContext",
    "Unreachable",
]

CAPTURED_BYTES: Final = 1 << 20
"""Maximum size in bytes of a tensor that is copied when it is sent to another host. Larger ones are sent in
place, and must not change meanwhile.
"""

SMALL_BYTES: Final = 64 << 10
"""Maximum size in bytes of a message that is sent as a frame in one piece: copying it costs less than sending
pieces. Such frames arrive in the order in which they were sent.
"""

CLOSED_BY_PEER: Final = "the connection was closed by the other side"
"""Reason of a lost connection that the other side has closed."""


@dataclass(frozen=True, slots=True)
class TransportContext:
    """The arguments that all transports of one agent are made with.

    Attributes:
        loop: the agent's loop.
        send_queue_bytes: maximum number of bytes that may be queued for a peer before callers wait.
        spinners: the threads that may spin.
        tls: encryption for connections over a network.
        tickets: issues the job's tickets, of which transports that have a place for them present one when
            they connect, so that strangers are refused early; the handshake requires a proof in any case.
        options: options of the agent, some of which concern transports only.
    """

    loop: asyncio.AbstractEventLoop
    send_queue_bytes: int
    spinners: Spinners = field(default_factory=Spinners)
    tls: TlsContexts | None = None
    tickets: TokenAuthenticator | None = None
    options: RpcBackendOptions | None = None


class ConnectionClosed(RpcError):
    """A frame was given to a connection that is closed. The peer's state has the reason."""


class Unreachable(ConnectionError):
    """Nothing answers at an address where something other than the worker listens for it, such as a proxy.
    This does not prove that the worker has ended, as it would if the worker itself listened there.
    """


class QueueFull(RpcError):
    """The peer does not accept what is queued for it within the time that the sender waits."""


class ConnectionOwner:
    """The object that a connection reports to; this one ignores everything.

    Connections with a ``reader`` call ``take_inline`` on any thread; all other methods are called on the
    loop's thread.
    """

    def frames_received(self, connection: Connection, frames: list[Frame]) -> None:
        """Called with frames that the loop has received."""

    def take_inline(self, frames: list[Frame], *, keep: bool) -> Task | None:
        """See ``Receiver``."""
        return None

    def find_target(self, kind: int, call_id: int, sizes: Sequence[int]) -> Target | None:
        """Return the target of a large message that begins to arrive; None if the message gets memory of its
        own.

        Args:
            kind: kind of its frame.
            call_id: call id of its frame.
            sizes: sizes of its buffers in bytes.
        """
        return None

    def connection_lost(self, connection: Connection, reason: str) -> None:
        """Called exactly once; nothing is received afterwards."""


class Connection(Protocol):
    """An ordered, reliable stream of frames between this process and one other. The defaults are those of a
    ``DirectConnection``.
    """

    owner: ConnectionOwner
    """The object that it reports to once started. To replace it, assign another on the loop's thread."""

    description: str
    """Text for logs that names the other end."""

    scheme: str = "self"
    """Scheme of its transport; "self" for the connection of a worker to itself."""

    @property
    def queued_bytes(self) -> int:
        """Number of bytes that have not been written yet."""
        return 0

    reader: InlineReader | None = None
    """Reads the connection on other threads than the loop's; None if the transport does not support this."""

    over_network: bool = False
    """Whether it may lead over a network, where several connections may have a higher throughput than one."""

    @property
    def has_streams(self) -> bool:
        """Whether the largest messages are sent over bulk streams instead of this connection."""
        return False

    process: int | None = None
    """The process at the other end, if it is on this host and known."""

    malformed: bool = False
    """Whether it was closed because the other end had violated the protocol."""

    @property
    def is_quiet(self) -> bool:
        """Whether no other thread is handling frames of it; such a thread may go on for a moment after it was
        closed.
        """
        return True

    received_anything: bool = True
    """Whether a byte has arrived from the other end. A program that only probes the port sends none."""

    def start(self, owner: ConnectionOwner) -> None:
        """Start to receive, and report to ``owner``."""
        self.owner = owner

    def set_frame_limits(self, received: int, sent: int) -> None:
        """Set the maximum size in bytes of messages from the peer and to it, which is small until the peer is
        known.
        """

    def send(
        self,
        buffers: Sequence[Any],
        size: int,
        *,
        aliased: bool = False,
        wait: float = INFINITE,
        last: bool = False,
    ) -> None:
        """Send one frame of ``size`` bytes. From any thread.

        Frames that are not too large arrive in the order in which they were sent; large ones may arrive after
        frames that were sent later.

        Args:
            buffers: the frame's pieces, in order.
            size: sum of the lengths of the pieces in bytes.
            aliased: whether some pieces are memory that the user may change once this returns, or, if they
                are large and the transport says so, once the call that the frame belongs to is over.
            wait: maximum time in seconds to block while the send queue is over its limit; 0 on the loop's
                thread.
            last: whether this frame must arrive after all others; nothing is sent after it.

        Raises:
            ConnectionClosed: the connection is closed; the frame was not sent.
            QueueFull: the send queue has no room; the frame was not sent.
        """

    def send_small(self, frame: bytes, wait: float, *, coalesce: bool = False, patient: bool = False) -> None:
        """Like ``send``, for a frame in one piece: at most ``SMALL_BYTES`` besides a prefix and a header.

        Args:
            coalesce: whether it may be sent together with frames that follow within moments, or at ``flush``.
            patient: whether it may wait behind a long chunk of a large message.
        """

    def send_unnumbered(self, frame: bytes, *, newest: bool = False) -> None:
        """Like ``send_small``, for a frame that belongs to this connection: it has no number in the session
        and is not sent again. If it cannot be sent now, it is dropped.

        Args:
            newest: whether it supersedes earlier frames of its kind, and so may replace one that is queued.
        """

    def carry(self, session: Session) -> None:
        """Note in ``session``, in order, what is sent from now on."""

    def remains(self) -> list[bytes]:
        """Return the frames of a closed connection that were not begun to be written, in order. On the loop's
        thread.
        """
        return []

    def flush(self) -> None:
        """Send what was coalesced, if anything. From any thread."""

    def close(self, reason: str, *, flush: bool = False) -> None:
        """Close, and notify the owner. On the loop's thread; with ``flush``, once the queue is sent."""

    def abandon(self) -> None:
        """Close the descriptor in a forked child; the parent continues to use its own."""


class DirectConnection(Connection):
    """A connection within this process: what is sent is copied at once, and never waits.

    Subclasses define ``pass_on``, which takes the bytes of one frame, and ``close``.
    """

    def __init__(self, description: str) -> None:
        self._session: Session | None = None
        self.description = description
        self.open = True

    def pass_on(self, frame: bytearray) -> None:
        """Deliver a frame to the other end."""
        raise NotImplementedError

    def send(
        self,
        buffers: Sequence[Any],
        size: int,
        *,
        aliased: bool = False,
        wait: float = INFINITE,
        last: bool = False,
    ) -> None:
        if not self.open:
            raise ConnectionClosed(f"the connection to {self.description} is closed")
        frame = bytearray().join(buffers)
        if self._session is not None:
            self._session.note(bytes(frame))
        self.pass_on(frame)

    def send_small(self, frame: bytes, wait: float, *, coalesce: bool = False, patient: bool = False) -> None:
        self.send((frame,), len(frame))

    def set_frame_limits(self, received: int, sent: int) -> None:
        pass

    def flush(self) -> None:
        pass

    def send_unnumbered(self, frame: bytes, *, newest: bool = False) -> None:
        if self.open:
            self.pass_on(bytearray(frame))

    def carry(self, session: Session) -> None:
        self._session = session

    def close(self, reason: str, *, flush: bool = False) -> None:
        if self.open:
            self.open = False
            self.owner.connection_lost(self, reason)

    def abandon(self) -> None:
        self.open = False


Accepted = Callable[[Connection], None]


class Listener(Protocol):
    """Accepts connections until it is closed."""

    address: str

    def close(self) -> None:
        """Stop listening. On the loop's thread."""

    def abandon(self) -> None:
        """Close the descriptor in a forked child; the parent continues to use its own."""


class Transport(Protocol):
    """A way to reach other processes, made with a ``TransportContext``."""

    scheme: str

    def listen(self, host: str, port: int, accepted: Accepted) -> Listener:
        """Listen on ``host`` and ``port``, and pass each new connection, not yet started, to the callback.

        With port 0 the system chooses one. Transports without hosts and ports ignore both.
        """

    async def connect(self, address: str) -> Connection:
        """Connect to an address that a listener of this scheme has returned; the connection is not started
        yet. Raises ``OSError`` if nothing listens there, or it cannot be reached.
        """
