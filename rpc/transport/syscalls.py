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
import socket
import sys
from ctypes import c_size_t
from typing import Final

__all__ = ["AVAILABLE", "ReceiveBuffer", "send_bytes"]

AVAILABLE: Final = sys.platform == "linux"
"""Whether the calls below can be made; elsewhere use the socket."""

_FLAGS: Final[int] = getattr(socket, "MSG_DONTWAIT", 0) | getattr(socket, "MSG_NOSIGNAL", 0)

# Neither function gets ``argtypes``: converting through them costs more than the calls do. All integers
# passed fit a C int, or are wrapped.
_libc = ctypes.PyDLL(None) if AVAILABLE else None
_send = _libc["send"] if _libc else None
_recv = _libc["recv"] if _libc else None


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


class ReceiveBuffer:
    """Receives repeatedly into one writable buffer, whose address is looked up once."""

    __slots__ = ("_address",)

    def __init__(self, buffer: bytearray) -> None:
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))

    def receive(self, descriptor: int, offset: int, capacity: int) -> int:
        """Receive at most ``capacity`` bytes to ``offset``; the caller makes sure that they fit.

        Returns:
            The number of bytes received, 0 at the end of the stream, or -1: ask the socket.
        """
        assert _recv is not None
        count: int = _recv(descriptor, ctypes.c_void_p(self._address + offset), c_size_t(capacity), _FLAGS)
        return count
