"""``send`` and ``recv`` that keep the interpreter.

``socket.send`` lets go of the GIL round the system call, and in a process whose other threads compute, it
gets the GIL back a switch interval later: milliseconds for a call that takes two microseconds. A
non-blocking send or receive of a small message never waits, so here it is made through ``ctypes.PyDLL``,
which keeps the GIL. Large transfers, which copy for long, go through the socket and let others run.

Each function returns -1 whenever the call did not succeed, whatever the reason; the caller then asks the
socket itself, which says whether it would block or is broken. That keeps ``errno`` out of the fast path.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import select
import socket
import sys
from collections.abc import Callable
from ctypes import c_size_t
from typing import Any, Final

__all__ = [
    "AVAILABLE",
    "ONE",
    "Number",
    "ReceiveBuffer",
    "Watch",
    "raise_event",
    "receive",
    "send_bytes",
    "send_noting",
]

AVAILABLE: Final = sys.platform == "linux"
"""Whether the calls below can be made; elsewhere use the socket."""

_FLAGS: Final[int] = getattr(socket, "MSG_DONTWAIT", 0) | getattr(socket, "MSG_NOSIGNAL", 0)

# Neither function gets ``argtypes``: converting through them costs more than the calls do. All integers
# passed fit a C int, or are wrapped.
_libc = ctypes.PyDLL(None) if AVAILABLE else None
_send = _libc["send"] if _libc else None
_recv = _libc["recv"] if _libc else None
_epoll_ctl = _libc["epoll_ctl"] if _libc else None

receive: Any = _recv
"""``counts.extend(map(receive, (number,), *buffer.whole))`` receives once, and notes how much.

All of that happens within C code: no signal handler, and so no exception and no change of the ``Number``
that names the socket, comes between the look at it, the system call, and the note.
"""

Number: Final = ctypes.c_int

raise_event: Any = _libc["eventfd_write"] if _libc else None
"""Takes the number of an eventfd, and ``ONE``, and makes it readable.

Keeping the interpreter, it leaves no time between the caller's look at the number and the system call, in
which another thread could close it and the number become somebody else's.
"""

ONE: Final = ctypes.c_uint64(1)


def send_bytes(descriptor: int, data: bytes) -> int:
    """Send what the kernel takes of ``data`` at once (less than 2 GiB).

    Allocates nothing that could start a garbage collection, and with it a finalizer that sends too.

    Args:
        descriptor: an open stream socket's; the caller makes sure that it is not closed meanwhile.
        data: a ``bytes`` object, not another buffer.

    Returns:
        The number of bytes taken, or -1: ask the socket.
    """
    assert _send is not None
    count: int = _send(descriptor, data, len(data), _FLAGS)
    return count


def send_noting(descriptor: int, data: bytes, counts: list[int]) -> None:
    """As ``send_bytes``, but append what that returns to ``counts``.

    That happens within the C code that sends, before a signal handler can run and raise.
    """
    counts.extend(map(_send, (descriptor,), (data,), (len(data),), (_FLAGS,)))  # type: ignore[arg-type]


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

    __slots__ = ("_epoll", "descriptor", "resume", "suspend")

    def __init__(self, socket_descriptor: int) -> None:
        self._epoll = select.epoll()
        self._epoll.register(socket_descriptor, select.EPOLLIN)
        self.descriptor = self._epoll.fileno()
        assert _epoll_ctl is not None
        change = functools.partial(_epoll_ctl, self.descriptor, _EPOLL_CTL_MOD, socket_descriptor)
        self.suspend: Callable[[], int] = functools.partial(change, _NOTHING)
        self.resume: Callable[[], int] = functools.partial(change, _READABLE)

    def close(self) -> None:
        """Close the epoll object; what follows does nothing."""
        self.suspend = self.resume = _nothing
        self._epoll.close()


def _nothing() -> int:
    return -1


class ReceiveBuffer:
    """Receives repeatedly into one writable buffer, whose address is looked up once."""

    __slots__ = ("_address", "whole")

    def __init__(self, buffer: bytearray) -> None:
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        self.whole: tuple[Any, ...] = (
            (ctypes.c_void_p(self._address),),
            (c_size_t(len(buffer)),),
            (_FLAGS,),
        )
        """For ``receive``: to the beginning of the buffer, as much as it holds."""

    def receive(self, descriptor: int, offset: int, capacity: int) -> int:
        """Receive at most ``capacity`` bytes to ``offset``; the caller makes sure that they fit.

        Returns:
            The number of bytes received, 0 at the end of the stream, or -1: ask the socket.
        """
        assert _recv is not None
        count: int = _recv(descriptor, ctypes.c_void_p(self._address + offset), c_size_t(capacity), _FLAGS)
        return count
