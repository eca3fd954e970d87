"""The content of a worker's state file: bytes to values and back. Pure. ``docs/state_files.md`` specifies it.

A file is written whole to another name and renamed, so a reader finds either this look's state or the one
before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import msgpack

__all__ = [
    "MAX_FILE_BYTES",
    "MAX_SNAPSHOT_BYTES",
    "Beat",
    "LayoutError",
    "State",
    "pack_snapshot",
    "pack_state",
    "unpack_state",
]

VERSION: Final = 2
_MAGIC: Final = b"FARCALLS"

MAX_SNAPSHOT_BYTES: Final = 768 << 10
MAX_FILE_BYTES: Final = 2 * MAX_SNAPSHOT_BYTES + 4096
"""Maximum size of a snapshot, and of the whole file, in bytes."""

_NONE: Final = bytes(msgpack.packb(None))


class LayoutError(ValueError):
    """A file is not a state file, or has an unknown version."""


@dataclass(frozen=True, slots=True)
class Beat:
    """The heartbeat that a worker writes at each look.

    Attributes:
        number: number of the look.
        monotonic, wall: time of the look, on the worker's monotonic clock and in seconds since 1970.
        calls: number of calls made so far.
        requests: number of requests received so far.
        processor: CPU seconds used by the process so far.
        call_rate, request_rate: calls made and requests received per second, since the previous look.
    """

    number: int
    monotonic: float
    wall: float
    calls: int
    requests: int
    processor: float
    call_rate: float = 0.0
    request_rate: float = 0.0

    @classmethod
    def of(cls, values: object) -> Beat | None:
        """Return the heartbeat with these values, in order; None if there is none with them."""
        if not isinstance(values, list) or not all(isinstance(each, int | float) for each in values):
            return None
        return cls(*values) if len(values) == len(cls.__slots__) and all(map(math.isfinite, values)) else None


@dataclass(frozen=True, slots=True)
class State:
    """The content of a file.

    Attributes:
        beat: the heartbeat of the last look.
        snapshot: the last snapshot.
        earlier: the one before it; None if there is none.
    """

    beat: Beat | None
    snapshot: dict[str, Any]
    earlier: dict[str, Any] | None


def pack_snapshot(snapshot: dict[str, Any]) -> bytes | None:
    """Pack a snapshot; None if it is too large."""
    packed = bytes(msgpack.packb(snapshot, unicode_errors="backslashreplace"))
    return packed if len(packed) <= MAX_SNAPSHOT_BYTES else None


def pack_state(beat: Beat, snapshot: bytes | None, earlier: bytes | None) -> bytes:
    """Return the content of a file, with snapshots from ``pack_snapshot``."""
    values = [getattr(beat, name) for name in Beat.__slots__]
    head = bytes([*_MAGIC, 0x94]) + msgpack.packb(VERSION) + msgpack.packb(values)  # a list of four
    return bytes(head + (snapshot or _NONE) + (earlier or _NONE))


def unpack_state(data: bytes) -> State:
    """Return what a file has.

    Raises:
        LayoutError: it is damaged, has another version, or has no snapshot.
    """
    if not data.startswith(_MAGIC):
        raise LayoutError("it is not a state file of a worker")
    try:
        version, *parts = msgpack.unpackb(data[len(_MAGIC) :], strict_map_key=False, unicode_errors="replace")
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise LayoutError("it is not a state file of this version of farcall, or damaged") from error
    if version != VERSION or len(parts) != 3:
        raise LayoutError(f"it has version {version!r:.20}, and this farcall reads version {VERSION}")
    beat, snapshot, earlier = parts
    if not isinstance(snapshot, dict):
        raise LayoutError("it has no snapshot")
    return State(Beat.of(beat), snapshot, earlier if isinstance(earlier, dict) else None)
