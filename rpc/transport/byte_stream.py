"""Streams of bytes to and from another process, which connections are built on.

A ``ByteStream`` is non-blocking, so any thread may use it, and notifies the loop when it is readable or
writable. ``SocketStream`` uses a socket, ``TlsStream`` a socket with encryption; others need no socket.

*System calls that keep the interpreter lock.* ``socket.send`` releases the lock during the system call. In a
process whose other threads compute, it gets the lock back a switch interval later: milliseconds for a call
that takes two microseconds. A non-blocking send or receive of a small message never waits, so here it is made
through ``ctypes.PyDLL``, which keeps the lock. Large transfers, which take longer, go through the socket and
let other threads run. Each such call returns -1 if it fails, and ``errno`` has the reason: the kernel reports
the error that broke a connection only once, and a second call would see the end of the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import functools
import os
import platform
import select
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

__all__ = [
    "ONE",
    "TCP_NOTSENT_LOWAT",
    "ByteStream",
    "DescriptorStream",
    "Number",
    "ReceiveBuffer",
    "SocketStream",
    "Watch",
    "raise_event",
    "receive",
]

_JOINED_BYTES: Final = 16 << 10
"""Maximum size in bytes of pieces that are joined before they are written: copying them costs less than a
call that releases the interpreter lock.
"""

TCP_NOTSENT_LOWAT: Final = 25
"""Socket option for the number of unsent bytes that the kernel keeps; Python 3.11 does not name it."""

_FLAGS: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL

# No function has ``argtypes``, since converting through them costs more than the calls. All integers passed
# fit a C int, or are wrapped.
_libc = ctypes.PyDLL(None)
_libc_with_errno = ctypes.PyDLL(None, use_errno=True)
_send: Any = _libc_with_errno["send"]
_receive: Any = _libc_with_errno["recv"]
_epoll_ctl: Any = _libc["epoll_ctl"]

receive: Any = _libc["recv"]
"""``counts.extend(map(receive, (number,), *buffer.whole))`` receives once and appends the number of bytes.

All of it happens within C code: no signal handler, and so no exception and no change of the ``Number`` that
holds the descriptor, comes between reading the descriptor, the system call, and the result. Does not return
``errno``: for callers that know that there is data and no error.
"""

_NOT_NOW: Final = frozenset((errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR))

Number: Final = ctypes.c_int

raise_event: Any = _libc["eventfd_write"]
"""Make an eventfd readable; the arguments are its ``Number``, and ``ONE``.

It keeps the interpreter lock, so no other thread can close the descriptor, and have its number reused,
between the moment in which it is read and the system call.
"""

ONE: Final = ctypes.c_uint64(1)


class ByteStream(Protocol):
    """An ordered, reliable stream of bytes in both directions. No method blocks."""

    @property
    def is_flushed(self) -> bool:
        """Whether what was written has left this process, and so arrives even if the process ends."""

    @property
    def descriptor(self) -> int | None:
        """Descriptor from which ``read_into`` receives, so that a thread may receive from it itself; None if
        there is none.
        """

    def on_readable(self, callback: Callable[[], object] | None) -> None:
        """Call this on the loop's thread whenever the stream may be readable; None: no longer. Must be called
        on the loop's thread, like the methods below.
        """

    def on_writable(self, callback: Callable[[], object] | None) -> None:
        """Like ``on_readable``, for when the stream may be writable, or what was written may be flushed."""

    def write(self, pieces: Sequence[bytes | memoryview]) -> int:
        """Write as much as is accepted now; returns the number of bytes. Raises ``OSError`` if the stream is
        broken.
        """

    def read_into(self, buffers: Sequence[memoryview]) -> int | None:
        """Read into the buffers, one after the other; returns the number of bytes, 0 at the end of the
        stream, None if there is no data now. Raises ``OSError`` if the stream is broken.
        """

    def shut_down(self) -> None:
        """Make reading threads find the end of the stream."""

    def close(self) -> None:
        """Release its resources. No thread may be in another method."""

    def abandon(self) -> None:
        """Release its descriptors in a forked child; the parent continues to use its own."""


class DescriptorStream:
    """Base of streams over a socket, which they own; the loop watches its descriptor."""

    is_flushed = True
    """Always true: the kernel has what was written."""
    descriptor: int | None = None

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._loop = loop
        self._descriptor = sock.fileno()

    def on_readable(self, callback: Callable[[], object] | None) -> None:
        if callback is None:
            self._loop.remove_reader(self._descriptor)
        else:
            self._loop.add_reader(self._descriptor, callback)

    def on_writable(self, callback: Callable[[], object] | None) -> None:
        if callback is None:
            self._loop.remove_writer(self._descriptor)
        else:
            self._loop.add_writer(self._descriptor, callback)

    def shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()

    def abandon(self) -> None:
        descriptor = self.socket.detach()
        if descriptor >= 0:
            os.close(descriptor)


class SocketStream(DescriptorStream):
    """A connected stream socket, which it owns. Small writes keep the interpreter lock."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        super().__init__(loop, sock)
        self.descriptor = self._descriptor

    def write(self, pieces: Sequence[bytes | memoryview]) -> int:
        size = len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces))
        if size <= _JOINED_BYTES:
            # Allocates nothing that could start a garbage collection, and with it a finalizer that sends too.
            count: int = _send(self._descriptor, b"".join(pieces), size, _FLAGS)
            if count < 0:
                _raise_what_broke()
                return 0
            return count
        try:
            return self.socket.sendmsg(pieces)
        except (BlockingIOError, InterruptedError):
            return 0

    def read_into(self, buffers: Sequence[memoryview]) -> int | None:
        try:
            return self.socket.recvmsg_into(buffers)[0]
        except (BlockingIOError, InterruptedError):
            return None


class ReceiveBuffer:
    """Receives repeatedly into one writable buffer, whose address is looked up once."""

    def __init__(self, buffer: bytearray) -> None:
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        self.whole: tuple[Any, ...] = (
            (ctypes.c_void_p(self._address),),
            (ctypes.c_size_t(len(buffer)),),
            (_FLAGS,),
        )
        """Arguments for ``receive``: the beginning and the capacity of the buffer."""

    def receive(self, descriptor: int, offset: int, capacity: int) -> int | None:
        """Receive at most ``capacity`` bytes, which must fit, to ``offset``; returns the number of bytes, 0
        at the end of the stream, None if there is no data now. Raises ``OSError`` if the stream is broken.
        """
        where, room = ctypes.c_void_p(self._address + offset), ctypes.c_size_t(capacity)
        count: int = _receive(descriptor, where, room, _FLAGS)
        if count >= 0:
            return count
        _raise_what_broke()
        return None


def _raise_what_broke() -> None:
    """Raise ``OSError`` for a call that has returned -1, unless the next call may succeed."""
    number = ctypes.get_errno()
    if number not in _NOT_NOW:
        raise OSError(number, os.strerror(number))


class _EpollEvent(ctypes.Structure):
    _pack_ = 1 if platform.machine() == "x86_64" else 0
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


_EPOLL_CTL_MOD: Final = 3
_READABLE: Final = ctypes.byref(_EpollEvent(1, 0))
_NOTHING: Final = ctypes.byref(_EpollEvent(0, 0))


class Watch:
    """An epoll object that is watched in place of one socket, and is readable when the socket is.

    ``suspend`` stops that, ``resume`` restores it: from any thread, in half a microsecond, and without
    releasing the interpreter lock. The end of the stream is also visible while it is suspended.
    """

    def __init__(self, socket_descriptor: int) -> None:
        self._epoll = select.epoll()
        self._epoll.register(socket_descriptor, select.EPOLLIN)
        self.descriptor = self._epoll.fileno()
        change = functools.partial(_epoll_ctl, self.descriptor, _EPOLL_CTL_MOD, socket_descriptor)
        self.suspend: Callable[[], int] = functools.partial(change, _NOTHING)
        self.resume: Callable[[], int] = functools.partial(change, _READABLE)

    def close(self) -> None:
        """Close the epoll object; later calls have no effect."""
        self.suspend = self.resume = int
        self._epoll.close()
