"""TLS 1.3 below a connection, with certificates on both sides.

Python's ``ssl`` reads and writes the socket itself, without blocking. The caller keeps what a write did not
accept; a read may leave decrypted data for the next read, so reads continue until there is none. Only one
thread at a time may use it (it releases the interpreter lock while it computes), hence the lock. Only the
loop's thread reads, since the data on the socket is not what ``read_into`` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from rpc.errors import InvalidOptionError
from rpc.options import TlsOptions
from rpc.runtime.regular_files import read_regular_file
from rpc.transport.byte_stream import DescriptorStream
from rpc.wire.frames import PREAMBLE, Kind, encode

__all__ = ["Acceptor", "TlsContexts", "TlsStream", "pem_file", "shake_hands", "why_no_tls"]

_AT_ONCE: Final = 64 << 10
"""Maximum size in bytes of one write, which ``ssl`` divides into records of up to 16 KiB."""
_PER_CALL: Final = 256 << 10
"""Number of bytes after which other connections have their turn."""
_HANDSHAKE_SECONDS: Final = 5.0
_MAX_HANDSHAKES: Final = 256
_SLOW_SECONDS: Final = 1.0
_LARGEST_FILE: Final = 4 << 20
"""Maximum size in bytes of a PEM file; the certificates of all public authorities take a quarter of a MiB."""

_NOT_NOW: Final = (ssl.SSLWantReadError, ssl.SSLWantWriteError)

_ALL_OR_NONE: Final = "Give the option tls= to all workers of a group, or to none"
_SAME_AUTHORITY: Final = (
    "All certificates of a group must be valid, and signed by the authority that ca= of TlsOptions names"
)
_NOT_TLS: Final = frozenset(("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "BAD_RECORD_TYPE"))
"""Reasons of OpenSSL's errors when the other side sends something other than TLS."""


def why_no_tls(error: OSError) -> str:
    """Explain why there is no TLS connection, and what to do: for logs and errors."""
    reason = str(getattr(error, "reason", None) or error.strerror or error) or "it takes too long"
    if reason in _NOT_TLS:
        return f"{reason}: it does not speak TLS, and this worker does. {_ALL_OR_NONE}"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{reason}: its certificate is refused here, {error.verify_message}. {_SAME_AUTHORITY}"
    _, alert, what = reason.partition("_ALERT_")
    if alert and any(
        word in what for word in ("CERTIFICATE", "UNKNOWN_CA", "DECRYPT_ERROR", "ACCESS_DENIED")
    ):
        return f"{reason}: it refuses this worker's certificate. {_SAME_AUTHORITY}"
    return reason


@dataclass(frozen=True, slots=True)
class TlsContexts:
    """Contexts that connections are made with: ``server`` for incoming ones, ``client`` for outgoing ones.

    Certificates must be signed by the job's authority. The names in them are not checked: workers are known
    by address, and prove in the handshake of ``rpc.group`` who they are.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext
    options: TlsOptions
    """The files that they were made of."""

    @classmethod
    def of(cls, options: TlsOptions) -> TlsContexts:
        """Make contexts from the options. Raises ``InvalidOptionError`` if a file is not valid."""
        for name in ("cert", "key", "ca"):
            pem_file(name, getattr(options, name))
        server, client = (ssl.SSLContext(side) for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
        client.check_hostname = False
        server.num_tickets = 0
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            wrong = "cert and key are not in PEM, or do not belong together"
            try:
                context.load_cert_chain(options.cert, options.key, password=_refuse_to_ask)
                wrong = "ca is not in PEM"
                context.load_verify_locations(options.ca)
            except ssl.SSLError as error:
                raise InvalidOptionError(f"{options}: {wrong}: {error.strerror}") from error
        return cls(server, client, options)

    def own_name(self) -> str:
        """Return the name in this worker's certificate, found by a handshake with itself: the first DNS name,
        or else the first address, or else the common name. Raises ``InvalidOptionError`` if there is none, or
        the authority has not signed it.
        """
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self.client.wrap_bio(to_client, to_server)
        server = self.server.wrap_bio(to_server, to_client, server_side=True)
        try:
            for side in (client, server, client, server):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
            certificate: dict[str, Any] = client.getpeercert() or {}
        except (ssl.SSLError, ValueError) as error:
            raise InvalidOptionError(f"{self.options}: the certificate is not good: {error}") from error
        names = [*certificate.get("subjectAltName", ()), *chain(*certificate.get("subject", ()))]
        for wanted in ("DNS", "IP Address", "commonName"):
            for kind, name in names:
                if kind == wanted:
                    return str(name)
        raise InvalidOptionError(f"{self.options}: the certificate has no name")


def pem_file(name: str, path: str) -> bytes:
    """Return the content of a file with certificates or a key; ``name`` is the option, for errors.

    Raises:
        InvalidOptionError: the file cannot be read, is not a regular file, or is too large.
    """
    try:
        return read_regular_file(path, _LARGEST_FILE)
    except OSError as error:
        raise InvalidOptionError(f"TLS: {name} {path!r} cannot be read: {error.strerror or error}") from error


def _refuse_to_ask() -> str:
    """Refuse a key with a password: OpenSSL would ask for it on the terminal, and wait."""
    raise InvalidOptionError(
        "TLS: the key is encrypted, and must not be: openssl pkey -in KEY -out PLAIN_KEY"
    )


class TlsStream(DescriptorStream):
    """A ``ByteStream`` over a socket whose TLS handshake is over, which it owns. From any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: ssl.SSLSocket) -> None:
        super().__init__(loop, sock)
        self.socket: ssl.SSLSocket = sock
        self._lock = threading.RLock()  # a finalizer that runs while it is held may send
        self._begun = 0
        """Number of bytes that ``ssl`` has begun to write: it must be given the same bytes again. They are
        taken from the caller again, which may have copied them meanwhile, so that the original memory can be
        released.
        """
        self._broken: OSError | None = None
        """Error that the next read raises."""

    def write(self, pieces: Sequence[bytes | memoryview]) -> int:
        written, total = 0, sum(map(len, pieces))
        with self._lock:
            while written < min(total, _PER_CALL):
                data = _next(pieces, written, self._begun or _AT_ONCE)
                try:
                    self.socket.send(data)
                except _NOT_NOW:
                    self._begun = len(data)
                    break
                self._begun = 0
                written += len(data)
        return written

    def read_into(self, buffers: Sequence[memoryview]) -> int | None:
        filled = 0
        with self._lock:
            if self._broken is not None:
                raise self._broken
            for buffer in buffers:
                rest = buffer[: _PER_CALL - filled]
                while rest:
                    try:
                        count = self.socket.recv_into(rest)
                    except _NOT_NOW:
                        return filled or None
                    except OSError as error:
                        if not filled:
                            raise
                        # What arrived before it goes to the caller first.
                        self._broken = error.with_traceback(None)
                        return filled
                    if not count:
                        return filled
                    filled += count
                    rest = rest[count:]
        return filled


def _next(pieces: Sequence[bytes | memoryview], skipped: int, limit: int) -> bytes | memoryview:
    """Return up to ``limit`` bytes behind those that are skipped; large pieces are not copied."""
    together: list[bytes | memoryview] = []
    size = 0
    for piece in pieces:
        if skipped >= len(piece):
            skipped -= len(piece)
            continue
        part = memoryview(piece)[skipped : skipped + limit - size]
        skipped = 0
        together.append(part)
        size += len(part)
        if size == limit:
            break
    return together[0] if len(together) == 1 else b"".join(together)


async def shake_hands(
    loop: asyncio.AbstractEventLoop, context: ssl.SSLContext, sock: socket.socket
) -> ssl.SSLSocket:
    """Make a TLS handshake over a connected socket. Raises ``OSError`` if the other side has no valid
    certificate or does not use TLS; the socket is closed then.
    """
    sock.setblocking(False)
    server_side = context.protocol == ssl.PROTOCOL_TLS_SERVER
    wrapped = context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
    descriptor = wrapped.fileno()
    try:
        while True:
            try:
                wrapped.do_handshake()
                return wrapped
            except ssl.SSLWantReadError:
                await _ready(loop, descriptor, loop.add_reader, loop.remove_reader)
            except ssl.SSLWantWriteError:
                await _ready(loop, descriptor, loop.add_writer, loop.remove_writer)
    except BaseException:
        wrapped.close()
        raise


async def _ready(
    loop: asyncio.AbstractEventLoop,
    descriptor: int,
    watch: Callable[..., object],
    unwatch: Callable[[int], object],
) -> None:
    ready: asyncio.Future[None] = loop.create_future()
    watch(descriptor, _done, ready)
    try:
        await ready
    finally:
        unwatch(descriptor)


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _speaks_plainly(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> bool:
    """Whether the other side begins like a worker without TLS. What it has sent stays in the socket."""
    await _ready(loop, sock.fileno(), loop.add_reader, loop.remove_reader)
    return sock.recv(1, socket.MSG_PEEK) == PREAMBLE[:1]


async def _refuse_plainly(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    """Answer the hello of a worker without TLS, so that its error says what is missing."""
    reason = f"it uses TLS, and the connection does not. {_ALL_OR_NONE}"
    buffers, _ = encode(Kind.REFUSED, 0, {"code": "tls", "reason": reason}, ())
    await loop.sock_sendall(sock, PREAMBLE + b"".join(buffers))
    sock.shutdown(socket.SHUT_WR)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SLOW_SECONDS):
            while await loop.sock_recv(sock, 1 << 12):  # otherwise the kernel would reset the connection
                pass


class Acceptor:
    """Makes handshakes with connecting workers, and passes their connections on. On the loop's thread.

    If there are too many at a time, the slow one that has tried for longest is closed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: ssl.SSLContext,
        accepted: Callable[[socket.socket], None],
        failed: Callable[[str, OSError], None],
    ) -> None:
        self._loop = loop
        self._context = context
        self._accepted = accepted
        self._failed = failed
        self._under_way: dict[asyncio.Task[None], float] = {}

    def accept(self, sock: socket.socket, description: str) -> None:
        """Begin the handshake over an accepted connection."""
        now = self._loop.time()
        if len(self._under_way) >= _MAX_HANDSHAKES:
            oldest, began = next(iter(self._under_way.items()))
            if now - began > _SLOW_SECONDS:
                oldest.cancel()
        task = self._loop.create_task(self._shake_hands(sock, description))
        self._under_way[task] = now
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.pop(task, None)

    async def _shake_hands(self, sock: socket.socket, description: str) -> None:
        try:
            sock.setblocking(False)
            async with asyncio.timeout(_HANDSHAKE_SECONDS):
                if await _speaks_plainly(self._loop, sock):
                    await _refuse_plainly(self._loop, sock)
                    raise ConnectionError(f"it does not use TLS, and this worker does. {_ALL_OR_NONE}")
                sock = await shake_hands(self._loop, self._context, sock)
            self._accepted(sock)
        except OSError as error:  # a timeout is one
            sock.close()
            self._failed(description, error)

    def close(self) -> None:
        """Accept no more connections."""
        for task in self._under_way:
            task.cancel()
