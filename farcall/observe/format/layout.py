"""The layout of a worker's state file: bytes to values and back. Pure. ``docs/state_files.md`` specifies it.

A file has a header, a heartbeat, two snapshots of which the newer valid one counts, and a ring of records.
Writers never change what a reader may rely on: a snapshot overwrites the older of the two, and each block
carries a number and a checksum. A block that was torn by a crash, or that is being written, is skipped.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import msgpack

__all__ = [
    "BEAT_OFFSET",
    "BLOCK_BYTES",
    "FILE_BYTES",
    "HEADER_BYTES",
    "MAX_RECORD_BYTES",
    "RING_SLOTS",
    "SNAPSHOT_BYTES",
    "Beat",
    "LayoutError",
    "Record",
    "block_size",
    "pack_beat",
    "pack_header",
    "pack_record",
    "pack_snapshot",
    "record_offset",
    "snapshot_offset",
    "snapshots_in",
    "unpack_beat",
    "unpack_header",
    "unpack_records",
    "unpack_snapshots",
]

VERSION: Final = 1
_MAGIC: Final = b"FARCALLS"

HEADER_BYTES: Final = 4096
BEAT_OFFSET: Final = 512
SNAPSHOT_BYTES: Final = 768 << 10
RING_SLOTS: Final = 2048
_SLOT_BYTES: Final = 256
FILE_BYTES: Final = HEADER_BYTES + 2 * SNAPSHOT_BYTES + RING_SLOTS * _SLOT_BYTES
"""Size of the whole file, in bytes."""

_HEADER: Final = struct.Struct("<8sIIIIII")
_BEAT: Final = struct.Struct("<QddQQddd")
_BLOCK: Final = struct.Struct("<QII")
_CHECK: Final = struct.Struct("<I")

MAX_RECORD_BYTES: Final = _SLOT_BYTES - _BLOCK.size


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


@dataclass(frozen=True, slots=True)
class Record:
    """An entry of the ring.

    Attributes:
        number: number in the order of all records of the file, from 1.
        fields: recorded values, by name.
    """

    number: int
    fields: dict[str, Any]


def snapshot_offset(number: int) -> int:
    """Return the offset of the snapshot with a number."""
    return HEADER_BYTES + (number % 2) * SNAPSHOT_BYTES


def record_offset(number: int) -> int:
    """Return the offset of the record with a number."""
    return HEADER_BYTES + 2 * SNAPSHOT_BYTES + (number % RING_SLOTS) * _SLOT_BYTES


def _pack(value: object) -> bytes:
    return bytes(msgpack.packb(value, unicode_errors="backslashreplace"))


def _unpack(packed: bytes) -> Any:
    return msgpack.unpackb(packed, strict_map_key=False, unicode_errors="replace")


def pack_header() -> bytes:
    """Return the header, which names the parts of the file."""
    return _HEADER.pack(
        _MAGIC, VERSION, HEADER_BYTES, BEAT_OFFSET, SNAPSHOT_BYTES, RING_SLOTS, _SLOT_BYTES
    ).ljust(BEAT_OFFSET, b"\0")


def unpack_header(data: bytes) -> None:
    """Raise ``LayoutError`` unless a file that begins with these bytes can be read."""
    if len(data) < HEADER_BYTES or data[:8] != _MAGIC:
        raise LayoutError("it is not a state file of a worker")
    _, version, *sizes = _HEADER.unpack_from(data)
    if version != VERSION or sizes != [HEADER_BYTES, BEAT_OFFSET, SNAPSHOT_BYTES, RING_SLOTS, _SLOT_BYTES]:
        raise LayoutError(f"it has version {version} of the layout, and this farcall reads version {VERSION}")


def pack_beat(beat: Beat) -> bytes:
    """Return a heartbeat with its checksum."""
    packed = _BEAT.pack(
        beat.number,
        beat.monotonic,
        beat.wall,
        beat.calls,
        beat.requests,
        beat.processor,
        beat.call_rate,
        beat.request_rate,
    )
    return packed + _CHECK.pack(zlib.crc32(packed))


def unpack_beat(data: bytes) -> Beat | None:
    """Return the heartbeat of a file that begins with these bytes; None if it is torn."""
    packed = data[BEAT_OFFSET : BEAT_OFFSET + _BEAT.size]
    check = data[BEAT_OFFSET + _BEAT.size : BEAT_OFFSET + _BEAT.size + _CHECK.size]
    if len(check) < _CHECK.size or _CHECK.unpack(check)[0] != zlib.crc32(packed):
        return None
    return Beat(*_BEAT.unpack(packed))


BLOCK_BYTES: Final = _BLOCK.size
"""Size in bytes of the head of a block."""


def block_size(head: bytes) -> int:
    """Return the size of a block, as its head says."""
    _, length, _ = _BLOCK.unpack(head)
    return BLOCK_BYTES + int(length)


def _block(number: int, packed: bytes) -> bytes:
    return _BLOCK.pack(number, len(packed), zlib.crc32(packed, number & 0xFFFFFFFF)) + packed


def _read_block(data: bytes, offset: int, size: int) -> tuple[int, bytes] | None:
    """Return the number and the content of a block; None if it is empty, torn or damaged."""
    if offset + _BLOCK.size > len(data):
        return None
    number, length, check = _BLOCK.unpack_from(data, offset)
    if not number or length > size - _BLOCK.size:
        return None
    packed = data[offset + _BLOCK.size : offset + _BLOCK.size + length]
    if len(packed) < length or zlib.crc32(packed, number & 0xFFFFFFFF) != check:
        return None
    return number, packed


def pack_snapshot(number: int, snapshot: dict[str, Any]) -> bytes | None:
    """Pack a snapshot as a block; None if it is larger than its place."""
    packed = _block(number, _pack(snapshot))
    return packed if len(packed) <= SNAPSHOT_BYTES else None


def unpack_snapshots(data: bytes) -> list[dict[str, Any]]:
    """Return the valid snapshots of a file, the newest first."""
    return snapshots_in([data[begin : begin + SNAPSHOT_BYTES] for begin in map(snapshot_offset, (0, 1))])


def snapshots_in(blocks: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the valid snapshots among the blocks of a file, the newest first."""
    read = [_read_block(each, 0, SNAPSHOT_BYTES) for each in blocks]
    values = [_read(packed) for _, packed in sorted((each for each in read if each), reverse=True)]
    return [each for each in values if isinstance(each, dict)]


def pack_record(
    number: int, fields: dict[str, Any], cut: Callable[[dict[str, Any]], dict[str, Any]]
) -> bytes:
    """Pack a record as a slot of the ring. ``cut`` shortens fields that do not fit."""
    packed = _pack(fields)
    if len(packed) > MAX_RECORD_BYTES:
        packed = _pack(cut(fields))
    if len(packed) > MAX_RECORD_BYTES:
        packed = _pack({"kind": fields.get("kind"), "at": fields.get("at")})
    return _block(number, packed).ljust(_SLOT_BYTES, b"\0")


def unpack_records(data: bytes) -> list[Record]:
    """Return the valid records of a file, the oldest first."""
    found: list[Record] = []
    for slot in range(RING_SLOTS):
        block = _read_block(data, record_offset(slot), _SLOT_BYTES)
        if block is not None and block[0] % RING_SLOTS == slot:
            fields = _read(block[1])
            if isinstance(fields, dict):
                found.append(Record(block[0], fields))
    return sorted(found, key=lambda record: record.number)


def _read(packed: bytes) -> Any:
    try:
        return _unpack(packed)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
        return None
