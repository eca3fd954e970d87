"""Bytes to and from another process, whatever is below: what stream transports are made of.

A ``ByteStream`` is non-blocking, so any thread may use it, and tells the loop when there is something to do.
``SocketStream`` is the one over a socket, ``TlsStream`` that over one which encrypts; others need no socket.

*System calls that keep the interpreter.* ``socket.send`` lets go of the GIL round the system call, and in a
process whose other threads compute, it gets the GIL back a switch interval later: milliseconds for a call
that takes two microseconds. A non-blocking send or receive of a small message never waits, so here it is made
through ``ctypes.PyDLL``, which keeps the GIL. Large transfers, which copy for long, go through the socket and
let others run. Each such call returns -1 when it did not succeed, and ``errno`` says why: the kernel tells of
what broke a connection once, so that who asked again would find a mere end.
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
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

__all__ = [
    "AVAILABLE",
    "ONE",
    "ByteStream",
    "DescriptorStream",
    "Number",
    "ReceiveBuffer",
    "SocketStream",
    "Watch",
    "raise_event",
    "receive",
]

AVAILABLE: Final = sys.platform == "linux"
"""Whether there are calls that keep the interpreter; elsewhere use the socket."""

_JOINED_BYTES: Final = 16 << 10
"""So little is quicker copied into one piece than written by a call that lets go of the interpreter."""

_FLAGS: Final[int] = getattr(socket, "MSG_DONTWAIT", 0) | getattr(socket, "MSG_NOSIGNAL", 0)

# No function gets ``argtypes``: converting through them costs more than the calls do. All integers passed
# fit a C int, or are wrapped.
_libc = ctypes.PyDLL(None) if AVAILABLE else None
_libc_with_errno = ctypes.PyDLL(None, use_errno=True) if AVAILABLE else None
_send: Any = _libc_with_errno["send"] if _libc_with_errno else None
_receive: Any = _libc_with_errno["recv"] if _libc_with_errno else None
_epoll_ctl: Any = _libc["epoll_ctl"] if _libc else None

receive: Any = _libc["recv"] if _libc else None
"""``counts.extend(map(receive, (number,), *buffer.whole))`` receives once, and notes how much.

All of that happens within C code: no signal handler, and so no exception and no change of the ``Number``
that names the socket, comes between the look at it, the system call, and the note. Nor does ``errno``: for
who knows that there is something to receive, and no error.
"""

_NOT_NOW: Final = frozenset((errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR))

Number: Final = ctypes.c_int

raise_event: Any = _libc["eventfd_write"] if _libc else None
"""Takes the number of an eventfd, and ``ONE``, and makes it readable.

Keeping the interpreter, it leaves no time between the caller's look at the number and the system call, in
which another thread could close it and the number become somebody else's.
"""

ONE: Final = ctypes.c_uint64(1)


class ByteStream(Protocol):
    """An ordered, reliable stream of bytes in both directions. No method blocks."""

    @property
    def is_flushed(self) -> bool:
        """Whether what was written is out of this process's hands: nothing that happens to it matters now."""

    @property
    def descriptor(self) -> int | None:
        """One on which that comes which ``read_into`` returns, so that a thread may receive it there itself;
        None if there is none.
        """

    def on_readable(self, callback: Callable[[], object] | None) -> None:
        """Call this on the loop's thread whenever there may be something to read; None: no more. On that
        thread, as what follows.
        """

    def on_writable(self, callback: Callable[[], object] | None) -> None:
        """As ``on_readable``, for when something may be written, or what was written may be flushed."""

    def write(self, pieces: Sequence[bytes | memoryview]) -> int:
        """Write as much as is taken now; returns how many bytes that are. ``OSError`` if the stream is
        broken.
        """

    def read_into(self, buffers: Sequence[memoryview]) -> int | None:
        """Read at most what the buffers hold, into one after the other; returns how many bytes, 0 at the end,
        None if there are none now. ``OSError`` if the stream is broken.
        """

    def shut_down(self) -> None:
        """Have whoever reads find the end of the stream."""

    def close(self) -> None:
        """Let go of it. Nobody may be in another method."""

    def abandon(self) -> None:
        """In a forked child: let go of what the parent goes on using."""


class DescriptorStream:
    """What streams over a socket have in common: they own it, and the loop watches its descriptor."""

    is_flushed = True
    """The kernel has what was written."""
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
    """A connected stream socket, which it owns. Small writes keep the interpreter."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        super().__init__(loop, sock)
        self.descriptor = self._descriptor

    def write(self, pieces: Sequence[bytes | memoryview]) -> int:
        size = len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces))
        if AVAILABLE and size <= _JOINED_BYTES:
            # Allocates nothing that could start a garbage collection, and with it a finalizer that sends too.
            count: int = _send(self._descriptor, b"".join(pieces), size, _FLAGS)
            if count < 0:
                _raise_what_broke()
            return max(0, count)
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
        """For ``receive``: to the beginning of the buffer, as much as it holds."""

    def receive(self, descriptor: int, offset: int, capacity: int) -> int | None:
        """Receive at most ``capacity`` bytes, which must fit, to ``offset``; returns how many, 0 at the end
        of the stream, None if there are none now. ``OSError`` if the stream is broken.
        """
        where, room = ctypes.c_void_p(self._address + offset), ctypes.c_size_t(capacity)
        count: int = _receive(descriptor, where, room, _FLAGS)
        if count >= 0:
            return count
        _raise_what_broke()
        return None


def _raise_what_broke() -> None:
    """A call has returned -1: ``OSError``, unless the next may succeed."""
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
    """An epoll object for one socket, to be watched in its place: readable when the socket is.

    ``suspend`` makes it not so, ``resume`` so again: from any thread, in half a microsecond, and without
    letting go of the interpreter. The end of the stream shows also while it is suspended.
    """

    def __init__(self, socket_descriptor: int) -> None:
        self._epoll = select.epoll()
        self._epoll.register(socket_descriptor, select.EPOLLIN)
        self.descriptor = self._epoll.fileno()
        change = functools.partial(_epoll_ctl, self.descriptor, _EPOLL_CTL_MOD, socket_descriptor)
        self.suspend: Callable[[], int] = functools.partial(change, _NOTHING)
        self.resume: Callable[[], int] = functools.partial(change, _READABLE)

    def close(self) -> None:
        """Close the epoll object; what follows does nothing."""
        self.suspend = self.resume = int
        self._epoll.close()
