"""What a transport is: it listens, it connects, and either way yields connections that carry frames.

``unix`` and ``tcp`` each are one file beside this one, gRPC's is ``farcall.grpc``; all yield the
``StreamConnection`` of ``stream.py``. ``rpc.testing`` has one in memory. ``registry.py`` finds them by name.
An address is ``SCHEME:REST``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from rpc.errors import RpcError
from rpc.options import RpcBackendOptions
from rpc.runtime.blocking import INFINITE
from rpc.runtime.tasks import Task
from rpc.transport.inline_read import InlineReader, Receiver, Spinners
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
    "SilentOwner",
    "Tickets",
    "Transport",
    "TransportContext",
    "Unreachable",
]

CAPTURED_BYTES: Final = 1 << 20
"""Across hosts, larger tensors are sent from where they are, and must not change meanwhile."""

SMALL_BYTES: Final = 64 << 10
"""What has no more bytes goes out as a frame in one piece: to copy so little costs less than to send it in
pieces. Such frames arrive in the order in which they were sent.
"""

CLOSED_BY_PEER: Final = "the connection was closed by the other side"
"""Why a connection is lost at whose end the other side has closed it."""


class Tickets(Protocol):
    """What a transport that has a place for it shows when it connects, so that strangers get no further. The
    handshake asks for a proof all the same.
    """

    def ticket(self) -> str:
        """One that is good for this job, in printable ASCII."""

    def is_ticket(self, text: str) -> bool:
        """Whether a worker of this job has made it."""


@dataclass(frozen=True, slots=True)
class TransportContext:
    """What all transports of one agent are made with: its loop, how many bytes may be queued for a peer
    before callers wait, its threads that spin, how to encrypt what goes over a network, if at all, what shows
    that a connection is the job's, and the options, for what is a transport's own affair.
    """

    loop: asyncio.AbstractEventLoop
    send_queue_bytes: int
    spinners: Spinners = field(default_factory=Spinners)
    tls: TlsContexts | None = None
    tickets: Tickets | None = None
    options: RpcBackendOptions | None = None


class ConnectionClosed(RpcError):
    """A frame was given to a connection that is closed. The peer's state says why."""


class Unreachable(ConnectionError):
    """Nobody answers at an address where something else listens for the worker, such as a proxy: that is no
    proof of its end, as it would be where the worker listens itself.
    """


class QueueFull(RpcError):
    """The other side does not take what is queued for it, and the sender's patience is over."""


class ConnectionOwner(Receiver, Protocol):
    """Who a connection reports to. ``take_inline`` is called by connections with a ``reader``, on any thread;
    everything else on the loop's.
    """

    def frames_received(self, connection: Connection, frames: list[Frame]) -> None: ...

    def find_target(self, kind: int, call_id: int, sizes: Sequence[int]) -> Target | None:
        """Where a large message goes that begins to come; None for memory of its own.

        Args:
            kind: of its frame, and so the call id.
            sizes: of its buffers, in bytes.
        """

    def connection_lost(self, connection: Connection, reason: str) -> None:
        """Called exactly once; nothing is received after it."""


class SilentOwner:
    """Owner of a connection whose fate interests nobody, or not yet."""

    followed: Collection[int] = ()

    def frames_received(self, connection: Connection, frames: list[Frame]) -> None:
        pass

    def find_target(self, kind: int, call_id: int, sizes: Sequence[int]) -> Target | None:
        return None

    def take_inline(self, frames: list[Frame], *, keep: bool) -> Task | None:
        return None

    def connection_lost(self, connection: Connection, reason: str) -> None:
        pass


class Connection(Protocol):
    """An ordered, reliable stream of frames between this process and one other."""

    owner: ConnectionOwner
    """Whom it reports to, once started; another takes over by being put here, on the loop's thread."""

    description: str
    """Names the other end in logs."""

    scheme: str
    """Scheme of its transport; "self" for the connection of a worker to itself."""

    @property
    def queued_bytes(self) -> int:
        """Number of bytes that wait to be written."""

    reader: InlineReader | None
    """How threads may read it themselves: a capability of sockets; None if only the loop's does."""

    over_network: bool
    """Whether it may lead over a network, where several at once may get more of it than one does."""

    @property
    def has_streams(self) -> bool:
        """Whether the largest messages go over bulk streams and not over this connection."""

    process: int | None
    """The process at the other end, where it is known and of this host."""

    malformed: bool
    """Whether it was closed since the other end has sent what the protocol does not allow."""

    @property
    def is_quiet(self) -> bool:
        """Whether no other thread is taking in anything of it, as may be for a moment after it was closed."""

    received_anything: bool
    """Whether a byte has come from the other end: who only looks whether somebody listens sends none."""

    def start(self, owner: ConnectionOwner) -> None:
        """Begin to receive, reporting to ``owner``."""

    def set_frame_limits(self, received: int, sent: int) -> None:
        """How many bytes a message from the peer, and one to it, may have: few until it is known."""

    def send(
        self,
        buffers: Sequence[Any],
        size: int,
        *,
        aliased: bool = False,
        wait: float = INFINITE,
        last: bool = False,
    ) -> None:
        """Send the ``size`` bytes of one frame. From any thread.

        Frames that are not too large arrive in the order in which they were sent; large ones may arrive
        after some that were sent later.

        Args:
            buffers: the frame's pieces, in order.
            size: the sum of their lengths.
            aliased: some pieces are memory that the caller's user may change: once this returns, or, if
                they are large and the transport says so, once the call that the frame belongs to is over.
            wait: seconds to block at most while the send queue is over its limit; 0 on the loop's thread.
            last: this frame is to arrive after all others, and nothing is sent after it.

        Raises:
            ConnectionClosed: the connection is closed; the frame was not sent.
            QueueFull: there is no room in the send queue; the frame was not sent.
        """

    def send_small(self, frame: bytes, wait: float, *, coalesce: bool = False, patient: bool = False) -> None:
        """As ``send``, for a frame in one piece: of ``SMALL_BYTES``, and what a prefix and a header take.

        Args:
            coalesce: it may go out with those that follow, moments later, or at ``flush``.
            patient: it may wait behind a long chunk of a large message.
        """

    def send_sign(self, frame: bytes, *, newest: bool = False) -> None:
        """As ``send_small``, for a frame that belongs to this connection: it has no number in the session,
        and is not sent again. What cannot be sent now never is.

        Args:
            newest: it says what those like it have said and more, so it may take the place of one that waits.
        """

    def carry(self, session: Session) -> None:
        """From now on, note in ``session`` what is sent, in order."""

    def remains(self) -> list[bytes]:
        """Once it is closed: what was not begun to be written, in order. On the loop's thread."""

    def flush(self) -> None:
        """Send what was coalesced, if anything. From any thread."""

    def close(self, reason: str, *, flush: bool = False) -> None:
        """Close, telling the owner. On the loop's thread; with ``flush`` once the queue is sent."""

    def abandon(self) -> None:
        """In a forked child: let go of the descriptor, which the parent goes on using."""


class DirectConnection:
    """A ``Connection`` within this process: what is sent is copied at once, and never waits.

    Derived classes have ``pass_on``, which takes the bytes of one frame, and ``close``.
    """

    owner: ConnectionOwner
    reader: InlineReader | None = None
    over_network = False
    has_streams = False
    scheme = "self"
    queued_bytes = 0
    process: int | None = None
    malformed = False
    is_quiet = True
    received_anything = True

    def __init__(self, description: str) -> None:
        self._session: Session | None = None
        self.description = description
        self.open = True

    def pass_on(self, frame: bytearray) -> None:
        """Bring a frame to the other end."""
        raise NotImplementedError

    def start(self, owner: ConnectionOwner) -> None:
        self.owner = owner

    def set_frame_limits(self, received: int, sent: int) -> None:
        pass

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

    def send_sign(self, frame: bytes, *, newest: bool = False) -> None:
        if self.open:
            self.pass_on(bytearray(frame))

    def carry(self, session: Session) -> None:
        self._session = session

    def remains(self) -> list[bytes]:
        return []

    def flush(self) -> None:
        pass

    def close(self, reason: str, *, flush: bool = False) -> None:
        if self.open:
            self.open = False
            self.owner.connection_lost(self, reason)

    def abandon(self) -> None:
        self.open = False


Accepted = Callable[[Connection], None]


class Listener(Protocol):
    """Accepts connections until closed."""

    address: str

    def close(self) -> None:
        """Stop listening. On the loop's thread."""

    def abandon(self) -> None:
        """In a forked child: let go of the descriptor, which the parent goes on using."""


class Transport(Protocol):
    """One way to reach another process. Made with a ``TransportContext``."""

    scheme: str

    def listen(self, host: str, port: int, accepted: Accepted) -> Listener:
        """Listen on ``host`` and ``port``, and hand over each connection, not yet started, as it comes.

        Port 0 is any. Transports that have no hosts and ports ignore both.
        """

    async def connect(self, address: str) -> Connection:
        """Connect to where a listener of this scheme said it listens; the result is not yet started.
        ``OSError`` if nobody listens there, or it cannot be reached.
        """
