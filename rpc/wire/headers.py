"""Headers of frames: maps in msgpack, to bytes and back, without I/O.

Decoding a few bytes of msgpack can take very much memory: it trusts the lengths of lists and maps before it
has seen their entries, and an empty list takes one byte there and 64 here. So the entries of headers that are
large, or have a large list, are counted first, without decoding.
"""

from __future__ import annotations

from typing import Any, Final

import msgpack

from rpc.errors import ProtocolError

__all__ = ["MAX_ENTRIES", "check_entries", "pack_header", "unpack_header"]

MAX_ENTRIES: Final = 1 << 20
"""Maximum number of entries of a header: values, keys, lists and maps together."""

_MAX_DEPTH: Final = 100

# By the first byte of a value in msgpack: the number of bytes that follow; how many of them contain the
# number of bytes after these; and how many contain the number of values. Maps have two values per entry.
# Extensions have one more byte, their type; their size is given here if no byte contains it.
_FIXED: Final = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_SIZED: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_EXTENSIONS: Final = {0xC7: (1, 0), 0xC8: (2, 0), 0xC9: (4, 0)} | {
    0xD4 + power: (0, 1 << power) for power in range(5)
}
_COUNTED: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}

_SMALL_HEADER_BYTES: Final = 64 << 10
_FEW_ENTRIES: Final = 1024
"""Maximum number of entries of lists in a small header that is not checked, since it cannot take
much memory.
"""

_ANY_TEXT: Final = "surrogatepass"  # texts of users' exceptions need not be valid Unicode

_packers: Final[list[Any]] = []
"""Packers that are not in use: each has a buffer that takes longer to allocate than most headers take to
pack. A thread removes the one that it uses, so that a finalizer or another thread cannot get the same one.
"""


def pack_header(header: dict[str, Any]) -> bytes:
    """Encode a header."""
    try:
        packer = _packers.pop()
    except IndexError:
        packer = msgpack.Packer(unicode_errors=_ANY_TEXT)
    packed: bytes = packer.pack(header)
    _packers.append(packer)
    return packed


def _unpack_small(packed: memoryview) -> Any:
    try:
        return msgpack.unpackb(
            packed,
            strict_map_key=False,
            unicode_errors=_ANY_TEXT,
            max_array_len=_FEW_ENTRIES,
            max_map_len=_FEW_ENTRIES,
        )
    except ValueError as error:
        if "exceeds max_" not in str(error):
            raise
    check_entries(packed)
    return msgpack.unpackb(packed, strict_map_key=False, unicode_errors=_ANY_TEXT)


def unpack_header(packed: memoryview) -> dict[str, Any]:
    """Decode a frame's header. Raises ``ProtocolError`` if it is not a map in msgpack."""
    try:
        if len(packed) > _SMALL_HEADER_BYTES:
            check_entries(packed)
            header = msgpack.unpackb(packed, strict_map_key=False, unicode_errors=_ANY_TEXT)
        else:
            header = _unpack_small(packed)
    except (ProtocolError, MemoryError):
        raise
    except Exception as error:  # msgpack raises a handful of unrelated types for malformed input
        raise ProtocolError(f"a frame's header is not msgpack: {type(error).__name__} {error}") from error
    if not isinstance(header, dict):
        raise ProtocolError(f"a frame's header is a {type(header).__name__}, not a map")
    return header


def _following() -> list[int]:
    """Return the number of bytes that follow, for all kinds whose first byte determines it; -1 for the
    others.
    """
    table = [-1] * 256
    for first in (*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3):
        table[first] = 0
    for first in range(0xA0, 0xC0):
        table[first] = first - 0xA0
    for first, count in _FIXED.items():
        table[first] = count
    return table


_FOLLOWING: Final = _following()


def check_entries(
    packed: memoryview, what: str = "a frame's header", most: int = MAX_ENTRIES, deepest: int = _MAX_DEPTH
) -> None:
    """Raise ``ProtocolError`` if ``what`` has more entries, is nested too deeply, is incomplete, or has an
    extension of msgpack's own, such as a timestamp.
    """
    data = bytes(packed)
    end = len(data)
    position = entries = 0
    above: list[int] = []
    left = 1
    while left or above:
        if not left:
            left = above.pop()
            continue
        left -= 1
        entries += 1
        if position >= end:
            raise ProtocolError(f"{what} is not msgpack: it ends too soon")
        first = data[position]
        position += 1
        skipped = _FOLLOWING[first]
        if skipped >= 0:
            position += skipped
            continue
        if first < 0xA0:
            count = (first & 0x0F) * (2 if first < 0x90 else 1)
        elif first in _COUNTED:
            size, each = _COUNTED[first]
            count = int.from_bytes(data[position : position + size]) * each
            position += size
        elif first in _SIZED:
            size = _SIZED[first]
            position += size + int.from_bytes(data[position : position + size])
            continue
        elif first in _EXTENSIONS:
            size, skipped = _EXTENSIONS[first]
            kind = data[position + size : position + size + 1]
            if kind > b"\x7f":
                raise ProtocolError(f"{what} has the extension {kind[0] - 256}, which is msgpack's own")
            position += size + 1 + (skipped or int.from_bytes(data[position : position + size]))
            continue
        else:
            raise ProtocolError(f"{what} is not msgpack")
        above.append(left)
        left = count
        if left > end - position:
            raise ProtocolError(f"{what} is not msgpack: it ends too soon")
        if entries + left > most:
            raise ProtocolError(f"{what} has more than {most} entries")
        if len(above) > deepest:
            raise ProtocolError(f"{what} is nested more than {deepest} deep")
    if position > end:
        raise ProtocolError(f"{what} is not msgpack: it ends too soon")
