"""The memory of versions: the segments of a store, and how processes of one host map them.

A segment is a sealed memfd (``rpc/bulk/shared_memory/memory.py``), which has no name in any file system and
is freed with the last process that uses it. Another process opens it by the keeper's entry in ``/proc``,
which the kernel permits to processes of the same user, and checks that it is the segment that was meant.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from farcall.weights.versions import Freed
from rpc.bulk.shared_memory.memory import AVAILABLE, Access, Mapping, check, create
from rpc.errors import NoMemoryError
from rpc.runtime.control_groups import GROUPS, MEMBERSHIP, control_groups

__all__ = [
    "AVAILABLE",
    "Access",
    "Mapped",
    "Segment",
    "Segments",
    "identity_of",
    "map_segment",
    "open_segment",
]

_MEMINFO: Final = Path("/proc/meminfo")

_numbers: Final = itertools.count(1)


class Segment:
    """A segment that this process has made.

    Attributes:
        tensor: its bytes.
        place: its descriptor, and what distinguishes it from all others of this host; None without shared
            memory.

    Raises:
        NoMemoryError: there is not enough memory for it.
    """

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self._descriptor = -1
        self.place: list[Any] | None = None
        available = available_bytes()
        if available is not None and size > available:
            raise NoMemoryError(f"{size} bytes are needed, and this host has {available} available")
        try:
            if AVAILABLE:
                self._descriptor = create(size)
                os.posix_fallocate(self._descriptor, 0, size)
                self.tensor = map_segment(self._descriptor, size, Access.WRITE).data
                self.place = [self._descriptor, identity_of(self._descriptor)]
            else:
                self.tensor = torch.zeros(size, dtype=torch.uint8, device="cpu")
        except (OSError, MemoryError, RuntimeError) as error:
            self.close()
            raise NoMemoryError(f"{size} bytes are needed, and the system says: {error}") from error

    def close(self) -> None:
        """Close the descriptor, and release the tensor; the memory lives as long as others use it."""
        descriptor, self._descriptor = self._descriptor, -1
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        if descriptor >= 0:
            os.close(descriptor)


class Segments:
    """The segments of one store. From any thread.

    Args:
        run_soon: runs functions on another thread.
    """

    def __init__(self, run_soon: Callable[[list[tuple[Any, Any]]], object]) -> None:
        self._run_soon = run_soon
        self._lock = threading.RLock()
        self._used: dict[int, Segment] = {}
        self._spare: list[Segment] = []

    @property
    def bytes(self) -> int:
        """Size of all segments in bytes."""
        with self._lock:
            return sum(each.size for each in (*self._used.values(), *self._spare))

    @property
    def live(self) -> list[int]:
        """The segments that versions use or will use again, so that others need not map them anew."""
        with self._lock:
            return [*self._used, *(each.number for each in self._spare)]

    def described(self, memory: Iterable[int]) -> list[list[Any]]:
        """Return number, size and place of segments, as other processes map them."""
        return [[number, self._used[number].size, self._used[number].place] for number in memory]

    def tensors(self, memory: Iterable[int]) -> list[Tensor]:
        """Return the bytes of segments."""
        return [self._used[number].tensor for number in memory]

    def add(self, sizes: Sequence[int]) -> list[int]:
        """Return segments of these sizes, spare ones where they fit. After an error, none is taken.

        Raises:
            NoMemoryError: there is not enough memory.
        """
        taken: list[Segment] = []
        try:
            for size in sizes:
                taken.append(self._take(size))  # noqa: PERF401  # those before an error are kept
        except BaseException:
            with self._lock:
                self._spare += taken
            raise
        with self._lock:
            self._used |= {each.number: each for each in taken}
        return [each.number for each in taken]

    def _take(self, size: int) -> Segment:
        with self._lock:
            fitting = [each for each in self._spare if size <= each.size <= size + (size >> 3)]
            if fitting:
                self._spare.remove(fitting[0])
                return fitting[0]
            closed, self._spare = self._spare, []
        _close(closed)
        return Segment(next(_numbers), size)

    def free(self, freed: Iterable[Freed], most: int) -> None:
        """Close memory that no version uses, or keep it: at most ``most`` segments, with those in use."""
        closed: list[Segment] = []
        with self._lock:
            for number, reusable in freed:
                segment = self._used.pop(number)
                (self._spare if reusable else closed).append(segment)
            while self._spare and len(self._used) + len(self._spare) > most:
                closed.append(self._spare.pop(0))
        if closed:
            self._run_soon([(_close, closed)])  # the system may take long to free it

    def close(self) -> None:
        """Release all memory."""
        with self._lock:
            closed = [*self._used.values(), *self._spare]
            self._used, self._spare = {}, []
        _close(closed)

    def abandon(self) -> None:
        """Close the descriptors in a forked child."""
        _close([*self._used.values(), *self._spare])


def _close(segments: Iterable[Segment]) -> None:
    for segment in segments:
        segment.close()


def available_bytes(groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """Return how much memory this process can still use without swapping, by the host and by its control
    groups; None if the system does not say. For the arguments, see ``control_groups``.
    """
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) << 10)
    for group, version in control_groups("memory", groups, membership):
        with contextlib.suppress(OSError, ValueError):  # no such group, or no limit
            found.append(_left(group, version))
    return min(found, default=None)


def _left(group: Path, version: int) -> int:
    """Return how much memory a control group can still use; its page cache can be taken."""
    limit, used = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
    counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    cache = sum(int(counts.get(f"{'total_' * (version == 1)}{kind}active_file", 0)) for kind in ("", "in"))
    return int((group / f"memory.{limit}").read_text()) - int((group / f"memory.{used}").read_text()) + cache


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


def open_segment(process: int, descriptor: int, identity: list[int], size: int) -> int:
    """Return a descriptor of a segment of another process of this host, which the caller has to close.

    Args:
        process: its id.
        descriptor: the segment's descriptor in that process.
        identity: see ``Segment``.
        size: of the segment in bytes.

    Raises:
        OSError: there is no such process here, it is another user's, or no descriptors are left.
    """
    found = os.open(f"/proc/{process:d}/fd/{descriptor:d}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if identity_of(found) != identity:
            raise FileNotFoundError(errno.ENOENT, "the process of that id is another one")
        check(found, size)
    except BaseException:
        os.close(found)
        raise
    return found


def identity_of(descriptor: int) -> list[int]:
    """Return what no other segment of this host has."""
    status = os.fstat(descriptor)
    return [status.st_dev, status.st_ino]
