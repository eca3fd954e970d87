"""Memory that processes share: creating it, checking what another process has created, mapping it.

A segment is a *memfd*: memory without a name, which is freed when no process maps it or has its descriptor
any more, however these processes end. It is *sealed*: its size cannot be changed, so no access to a mapping
can fail (with ``SIGBUS``). Its pages are allocated before it is first used, so that a lack of memory is an
error then, and not a signal later. ``mmap`` is called directly, because Python's own mappings cannot be
replaced in place (see ``Mapping.make_private``).

The *ledger* is a page that two workers share beside their segments. It holds a nonce, which proves that they
do, and one word for each segment, which only the receiver writes: the number of the use that is over. So
returning a segment is a store into memory. A finalizer may do it, on any thread, and it needs no message. The
sender reads the ledger when it needs a segment. A word is eight bytes and aligned, so it is never read half
written. The thread that drops the last reference to a tensor has finished with its memory before, since all
processors keep this order for reference counts.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import sys
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

from rpc.errors import RpcError

__all__ = [
    "AVAILABLE",
    "LEDGER_BYTES",
    "REFUSED",
    "RETIRED",
    "SLOTS",
    "Access",
    "Ledger",
    "Mapping",
    "SegmentRefused",
    "check",
    "create",
]

AVAILABLE: Final = sys.platform == "linux" and hasattr(os, "memfd_create")
"""Whether this system has memfds."""

LEDGER_BYTES: Final = 4096
_NONCE_BYTES: Final = 32
_WORDS_AT: Final = 64

SLOTS: Final = (LEDGER_BYTES - _WORDS_AT) // 8
"""Number of segments that a ledger has words for."""

RETIRED: Final = (1 << 64) - 1
"""Value in place of the number of a use: the receiver keeps this segment forever; it must not be written
again.
"""

REFUSED: Final = (1 << 64) - 2
"""Value in place of the number of a use: the receiver could not map this segment."""

_NAME: Final = "farcall"
_MAP_FIXED: Final = 0x10
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

_SHRINK: Final[int] = getattr(fcntl, "F_SEAL_SHRINK", 0)
_GROW: Final[int] = getattr(fcntl, "F_SEAL_GROW", 0)
_SEAL: Final[int] = getattr(fcntl, "F_SEAL_SEAL", 0)

_libc = ctypes.CDLL(None, use_errno=True) if AVAILABLE else None
if _libc is not None:
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class SegmentRefused(RpcError):
    """A descriptor is not that of a valid segment."""


def create(size: int) -> int:
    """Create a sealed segment of ``size`` bytes, all zero, which takes no memory yet; returns its descriptor.
    Raises ``OSError`` if no descriptor is left, or the system does not support it.
    """
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SHRINK | _GROW | _SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check(descriptor: int, size: int) -> None:
    """Raise ``SegmentRefused`` unless a descriptor is that of a sealed segment of ``size`` bytes."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise SegmentRefused(f"what it sent is no memory segment ({error.strerror})") from error
    if seals & (_SHRINK | _GROW) != _SHRINK | _GROW:
        raise SegmentRefused("it sent a segment that could still change its size")
    actual = os.fstat(descriptor).st_size
    if actual != size:
        raise SegmentRefused(f"it sent a segment of {actual} bytes and said that it has {size}")


class Access(Enum):
    """What a mapping is for: flags and protection of ``mmap``."""

    WRITE = mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
    READ = mmap.MAP_SHARED, mmap.PROT_READ
    """A write ends the process with ``SIGSEGV``."""
    COPY = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
    """Pages that this process writes to become its own; other processes do not see what it writes."""


class Mapping:
    """A segment mapped into this process, until the object is gone.

    With ``keep`` it owns the descriptor and keeps it open, for ``allocate`` or ``make_private``. Otherwise,
    and after an ``OSError``, the descriptor stays the caller's. The memory begins at ``address``; ``memory``
    must not be used longer than the object lives.
    """

    def __init__(
        self, descriptor: int, size: int, *, keep: bool = False, access: Access = Access.WRITE
    ) -> None:
        self.address = 0
        self._descriptor = -1
        self.size = size
        flags, protection = access.value
        self.address = _map(None, size, flags, descriptor, protection)
        self.memory = memoryview((ctypes.c_char * size).from_address(self.address)).cast("B")
        if keep:
            self._descriptor = descriptor

    def allocate(self) -> None:
        """Allocate all pages, unless that is done. Raises ``OSError`` if there is not enough memory."""
        if self._descriptor >= 0:
            os.posix_fallocate(self._descriptor, 0, self.size)
            self._close()

    def make_private(self) -> None:
        """Make what this process or its forked children write from now on visible to the writer only.

        The memory stays where it is and keeps its content. What other processes have written is visible until
        this process writes there. Raises ``OSError`` if that is impossible.
        """
        if self._descriptor >= 0:
            _map(self.address, self.size, mmap.MAP_PRIVATE | _MAP_FIXED, self._descriptor)
            self._close()

    def _close(self, close: Callable[[int], None] = os.close) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            close(descriptor)

    def __del__(self, unmap: Any = _libc and _libc.munmap) -> None:
        # The function's needs are defaults, since globals may be gone when the interpreter ends.
        if self.address:
            unmap(self.address, self.size)
            self.address = 0
        self._close()


def _map(
    address: int | None,
    size: int,
    flags: int,
    descriptor: int,
    protection: int = mmap.PROT_READ | mmap.PROT_WRITE,
) -> int:
    assert _libc is not None
    found: int | None = _libc.mmap(address, size, protection, flags, descriptor, 0)
    if found is None or found == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found


class Ledger:
    """A mapped ledger. ``words`` has, by slot, the number of the use that was returned last, ``RETIRED`` or
    ``REFUSED``.
    """

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping
        self.words = (ctypes.c_uint64 * SLOTS).from_address(mapping.address + _WORDS_AT)

    def write_nonce(self) -> None:
        """Write a new nonce, which only processes that share this memory can know."""
        ctypes.memmove(self._mapping.address, secrets.token_bytes(_NONCE_BYTES), _NONCE_BYTES)

    def nonce(self) -> bytes:
        """The nonce that is in it."""
        return ctypes.string_at(self._mapping.address, _NONCE_BYTES)
