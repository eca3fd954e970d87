"""The memory of versions: segments, their tensors, and how processes of one host get their descriptors.

A segment is a sealed memfd (``rpc/bulk/shared_memory/memory.py``), which has no name in any file system and
is freed with the last process that uses it. A process gets a descriptor from the keeper's, over a socket in
Linux's abstract namespace: it shows the keeper's token and the number of the segment. Only processes of the
same user get one, and the token travels in calls only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import secrets
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rpc.bulk.shared_memory import fd_channel
from rpc.bulk.shared_memory.memory import AVAILABLE, Access, Mapping, SegmentRefused, check, create
from rpc.errors import NoMemoryError

__all__ = ["AVAILABLE", "Access", "DescriptorServer", "Mapped", "Segment", "fetch_descriptor", "map_segment"]

logger = logging.getLogger(__name__)

_TOKEN_BYTES: Final = 16
_NUMBER: Final = struct.Struct("<q")
_PATIENCE_SECONDS: Final = 10.0
"""Maximum time in seconds for one exchange on the socket, on either side."""

_GONE: Final = b"gone"
_BACKLOG: Final = 128
"""Maximum number of connections that have not been accepted. Further ones are refused at once."""

_PAUSE_SECONDS: Final = 0.1
"""How long to wait after an error of ``accept``."""

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


class Segment:
    """A segment that this process has made. ``tensor`` is its bytes.

    Raises:
        NoMemoryError: there is not enough memory for it.
    """

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self._descriptor = -1
        available = available_bytes()
        if available is not None and size > available:
            raise NoMemoryError(f"{size} bytes are needed, and this host has {available} available")
        try:
            if AVAILABLE:
                self._descriptor = create(size)
                os.posix_fallocate(self._descriptor, 0, size)
                self.tensor = map_segment(self._descriptor, size, Access.WRITE).data
            else:
                self.tensor = torch.zeros(size, dtype=torch.uint8)
        except (OSError, MemoryError, RuntimeError) as error:
            self.close()
            raise NoMemoryError(f"{size} bytes are needed, and the system says: {error}") from error

    def duplicate(self) -> int:
        """Return a new descriptor of it, which is the caller's; -1 if it is closed."""
        return -1 if self._descriptor < 0 else os.dup(self._descriptor)

    def close(self) -> None:
        """Close the descriptor, and release the tensor; the memory lives as long as others use it."""
        descriptor, self._descriptor = self._descriptor, -1
        self.tensor = torch.empty(0, dtype=torch.uint8)
        if descriptor >= 0:
            os.close(descriptor)


def available_bytes() -> int | None:
    """Return how much memory this process can still use without swapping; None if the system does not say."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) << 10)
    with contextlib.suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        found.append(limit - int((_CGROUP / "memory.current").read_text()) + _reclaimable())
    return min(found, default=None)


def _reclaimable() -> int:
    """Return the size of this group's page cache, which its limit counts."""
    lines = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    return int(lines.get("inactive_file", 0)) + int(lines.get("active_file", 0))


class Mapped(NamedTuple):
    """A mapped segment: its bytes, and what they lie in; that is alive while a tensor uses it."""

    data: Tensor
    memory: weakref.ref[Any]


def map_segment(descriptor: int, size: int, access: Access) -> Mapped:
    """Map a segment until no tensor uses its bytes any more. The descriptor stays the caller's.

    Raises:
        OSError: it cannot be mapped.
    """
    mapping = Mapping(descriptor, size, access=access)
    memory = (ctypes.c_char * size).from_address(mapping.address)
    memory.mapping = mapping  # type: ignore[attr-defined]  # the tensor refers to ``memory``
    return Mapped(torch.frombuffer(memory, dtype=torch.uint8), weakref.ref(memory))


class DescriptorServer:
    """Gives descriptors of segments to processes of this host, on a thread of its own.

    Args:
        find: returns a new descriptor of a segment by its number, which is closed here, or -1.
    """

    def __init__(self, find: Callable[[int], int]) -> None:
        self._find = find
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._listener, self._name = fd_channel.listen()
        self._listener.listen(_BACKLOG)
        self._ended = threading.Event()
        self._listener.setblocking(True)
        self._thread = threading.Thread(target=self._serve, name="farcall-weights", daemon=True)
        self._thread.start()

    @property
    def address(self) -> list[object]:
        """What other processes need to get descriptors."""
        return [self._name, self._token]

    def close(self) -> None:
        """Stop."""
        self._ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listener.close()

    def abandon(self) -> None:
        """Close the descriptor in a forked child."""
        os.close(self._listener.detach())

    def _serve(self) -> None:
        while True:
            try:
                sock = fd_channel.accept(self._listener)
            except OSError as error:
                if self._listener.fileno() < 0 or error.errno not in _PASSING:
                    return
                logger.warning("a process of this host waits for memory of weights: %s", error)
                # its connection stays pending, so that ``accept`` fails at once, also after ``shutdown``
                if self._ended.wait(_PAUSE_SECONDS):
                    return
                continue
            if sock is not None:
                with sock, contextlib.suppress(OSError):
                    self._answer(sock)

    def _answer(self, sock: socket.socket) -> None:
        sock.settimeout(_PATIENCE_SECONDS)
        record, descriptor = fd_channel.receive(sock)
        if descriptor is not None:
            os.close(descriptor)
        token, number = record[:_TOKEN_BYTES], record[_TOKEN_BYTES:]
        if secrets.compare_digest(token, self._token) and len(number) == _NUMBER.size:
            found = self._find(*_NUMBER.unpack(number))
            if found < 0:
                sock.send(_GONE)
                return
            try:
                fd_channel.send(sock, b"here", found)
            finally:
                os.close(found)


_PASSING: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ECONNABORTED)
"""Errors of ``accept`` after which the next one may succeed."""


def fetch_descriptor(name: str, token: bytes, number: int, size: int) -> int:
    """Get the descriptor of a segment from the process that made it; the caller has to close it.

    Raises:
        TimeoutError, BlockingIOError: the process is busy, or one of both has no descriptors left.
        OSError: the process cannot be reached that way: it is on another host, or another user's.
        SegmentRefused: the segment is not there any more, or is none.
    """
    with fd_channel.connect(name, _PATIENCE_SECONDS) as sock:
        sock.send(token + _NUMBER.pack(number))
        record, descriptor = fd_channel.receive(sock)
    if record == _GONE:
        raise SegmentRefused(f"there is no segment {number}")
    if descriptor is None:
        raise BlockingIOError(errno.EAGAIN, "this process or the one that made it has no descriptors left")
    try:
        check(descriptor, size)
    except SegmentRefused:
        os.close(descriptor)
        raise
    return descriptor
