"""Bytes in both directions over one gRPC call whose requests and responses are both streams.

A message is a ``ConnectRequest`` or ``ConnectResponse`` of ``proto/farcall/v1/worker.proto``, encoded and
decoded by hand, since protobuf would copy its content once more: it is a sequence of fields, each of them a
tag, a length and bytes. The concatenation of several messages is a message, too, so small ones that wait are
sent as one.

The writing thread only queues messages; the loop's thread, to which gRPC's calls belong, sends them, one at a
time, as gRPC accepts them. The queues of unsent and of unread messages are bounded.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Protocol

import grpc

from farcall.grpc import forking

__all__ = ["MESSAGE_BYTES", "Call", "GrpcStream", "as_os_error", "os_error_of"]

_TAG: Final = 0x0A
"""Tag of field 1, which has a length."""

_WRITE_BYTES: Final = 1 << 20
"""Maximum size in bytes of one message. Larger ones are not faster (measured), and delay small frames."""

MESSAGE_BYTES: Final = _WRITE_BYTES + (64 << 10)
"""Maximum size in bytes of a whole message, including tags and lengths."""

_LEFT_BYTES: Final = 1 << 20
"""Number of queued bytes at which no more are queued: enough that gRPC has something to send while the next
message is made.
"""

_TOGETHER_BYTES: Final = 64 << 10
"""Size in bytes up to which waiting messages are joined."""


class Call(Protocol):
    """One end of a call, at the client or the server, with gRPC's methods."""

    async def read(self) -> Any:
        """Return the next message, or ``grpc.aio.EOF``."""

    async def write(self, message: bytes) -> None:
        """Send one; returns when there is room for the next."""


class GrpcStream:
    """A ``ByteStream`` over a call, for as long as ``run`` runs.

    ``write`` may be called from any thread, by one at a time, everything else on the loop's.

    Args:
        remote: address that its channel has connected to, if this side has connected.
    """

    descriptor: int | None = None

    def __init__(
        self, loop: asyncio.AbstractEventLoop, call: Call, remote: Collection[forking.Place] = ()
    ) -> None:
        self._loop = loop
        self._call = call
        self._remote = remote
        self._readable: Callable[[], object] | None = None
        self._writable: Callable[[], object] | None = None
        self._left: deque[tuple[bytes, int]] = deque()
        self._given = 0
        """Number of bytes that were ever written here, changed by ``write``; the next one is changed by the
        loop.
        """
        self._taken = 0
        self._is_idle = False
        """Whether the sender waits to be woken."""
        self._woken: asyncio.Future[None] | None = None
        self._come: deque[memoryview] = deque()
        self._was_read: asyncio.Future[None] | None = None
        self._at_end = False
        self._error: OSError | None = None
        self._closed = False

    # ---- the ByteStream

    @property
    def is_flushed(self) -> bool:
        return self._taken == self._given

    def on_readable(self, callback: Callable[[], object] | None) -> None:
        self._readable = callback
        if callback is not None:
            self._loop.call_soon(self._tell_readable)

    def on_writable(self, callback: Callable[[], object] | None) -> None:
        self._writable = callback
        if callback is not None:
            self._loop.call_soon(self._tell_writable)

    def write(self, pieces: Sequence[bytes | memoryview]) -> int:
        if self._error is not None:
            raise self._error
        if self._given - self._taken >= _LEFT_BYTES:
            return 0
        size = sum(map(len, pieces))
        if size > _WRITE_BYTES:
            pieces, size = _first(pieces, _WRITE_BYTES), _WRITE_BYTES
        message = b"".join((_head(size), *pieces))
        self._given += size
        self._left.append((message, size))
        if self._is_idle:
            self._is_idle = False
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError as error:
                raise ConnectionAbortedError(errno.ECONNABORTED, "the agent's loop has ended") from error
        return size

    def read_into(self, buffers: Sequence[memoryview]) -> int | None:
        filled = 0
        for buffer in buffers:
            at = 0
            while at < len(buffer) and self._come:
                data = self._come[0]
                count = min(len(data), len(buffer) - at)
                if count == len(data):
                    buffer[at : at + count] = data
                    self._come.popleft()
                else:
                    buffer[at : at + count] = data[:count]
                    self._come[0] = data[count:]
                at += count
            filled += at
        if not self._come and self._was_read is not None and not self._was_read.done():
            self._was_read.set_result(None)
        if filled:
            return filled
        if self._error is not None:
            raise self._error
        return 0 if self._at_end else None

    def shut_down(self) -> None:
        self._at_end = True
        self._tell_readable()

    def close(self) -> None:
        self._closed = True
        self._come.clear()
        self._readable = self._writable = None
        if self._was_read is not None and not self._was_read.done():
            self._was_read.set_result(None)
        self._wake()

    def abandon(self) -> None:
        self._closed = True
        forking.abandon(self, remote=self._remote)

    # ---- the call

    async def run(self) -> None:
        """Send and receive until this side has closed the stream and all that was written is sent, or the
        call has failed.
        """
        receiving = self._loop.create_task(self.receive())
        try:
            await self.send()
        finally:  # it is cancelled when the other side is gone
            receiving.cancel()
            self.shut_down()

    async def send(self) -> None:
        """Send what is written, until the stream is closed and all is sent, or the call has failed."""
        while True:
            while not self._left:
                if self._closed or self._error is not None:
                    return
                self._woken = self._loop.create_future()
                self._is_idle = True
                if not self._left:  # else it was left before that
                    await self._woken
                self._is_idle = False
            message, size = self._left.popleft()
            if self._left and size < _TOGETHER_BYTES:
                message, size = self._together(message, size)
            try:
                await self._call.write(message)
            except Exception as error:  # gRPC has many classes for a call that is over
                self.fail(as_os_error(error))
                return
            self._taken += size
            self._tell_writable()

    def _together(self, message: bytes, size: int) -> tuple[bytes, int]:
        messages = [message]
        while self._left and size + self._left[0][1] <= _TOGETHER_BYTES:
            message, more = self._left.popleft()
            messages.append(message)
            size += more
        return b"".join(messages), size

    async def receive(self) -> None:
        """Receive until the other side has ended the call, or it has failed."""
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                if self._closed:
                    continue
                self._come.extend(_fields(message))
                self._tell_readable()
                if self._come and not self._closed:
                    self._was_read = self._loop.create_future()
                    await self._was_read
            self.shut_down()
        except Exception as error:
            if _is_end(error):
                self.shut_down()
            else:
                self.fail(as_os_error(error))

    def fail(self, error: OSError) -> None:
        """End after the call has failed: received data is still read, and nothing more is written."""
        if self._error is None and not self._at_end:
            self._error = error
        self._tell_writable()
        self._tell_readable()
        self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def _tell_readable(self) -> None:
        if self._readable is not None and (self._come or self._at_end or self._error is not None):
            self._readable()

    def _tell_writable(self) -> None:
        if self._writable is not None:
            self._writable()


def _head(size: int) -> bytes:
    """Return tag and length of a field."""
    head = bytearray((_TAG,))
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head)


def _first(pieces: Sequence[bytes | memoryview], limit: int) -> list[bytes | memoryview]:
    """Return the first ``limit`` bytes of a longer sequence."""
    taken: list[bytes | memoryview] = []
    for piece in pieces:
        taken.append(piece if len(piece) <= limit else memoryview(piece)[:limit])
        limit -= len(taken[-1])
        if not limit:
            break
    return taken


def _fields(message: bytes) -> list[memoryview]:
    """Return the nonempty fields of a message. ``ProtocolError`` if it is malformed."""
    view, found, at, end = memoryview(message), list[memoryview](), 0, len(message)
    while at < end:
        tag, size, shift = message[at], 0, 0
        at += 1
        while True:
            if tag != _TAG or at >= end or shift > 28:
                raise OSError(errno.EPROTO, "what came is no message of farcall's")
            byte = message[at]
            at += 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte <= 0x7F:
                break
        if size > end - at:
            raise OSError(errno.EPROTO, "what came is no message of farcall's")
        if size:
            found.append(view[at : at + size])
        at += size
    return found


_ENDS: Final = ("socket closed", "connection reset", "broken pipe", "goaway", "connection aborted")
"""Parts of gRPC's text for a connection that the other process has closed, or whose process has died."""

_NUMBERS: Final = {
    os.strerror(number).lower(): number
    for number in (
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.ENETDOWN,
        errno.EHOSTDOWN,
        errno.ETIMEDOUT,
        errno.EMFILE,
        errno.ENFILE,
        errno.EPIPE,
    )
}


def _is_end(error: Exception) -> bool:
    if not isinstance(error, grpc.RpcError) or error.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    details = str(error.details()).lower()
    return any(each in details for each in _ENDS)


def as_os_error(error: Exception) -> OSError:
    """Convert gRPC's error to an ``OSError``."""
    if isinstance(error, OSError):
        return error
    if not isinstance(error, grpc.RpcError):
        return ConnectionResetError(errno.ECONNRESET, f"the call is over ({type(error).__name__}: {error})")
    return os_error_of(error.code(), str(error.details()))


def os_error_of(code: Any, details: str) -> OSError:
    """Convert the status of a call, with the number of a socket's error if it names one."""
    for text, number in _NUMBERS.items():
        if text in details.lower():
            return OSError(number, f"{os.strerror(number)} ({details})")
    if re.search("handshake failed|certificate", details, re.IGNORECASE):
        return ConnectionError(f"no TLS with it: {details}")
    if code is grpc.StatusCode.UNAVAILABLE:
        return OSError(errno.ECONNRESET, details)
    return ConnectionError(f"{code.name}: {details}")
