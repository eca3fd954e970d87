"""Headers of frames: maps in msgpack, to bytes and back, without I/O."""

from __future__ import annotations

from typing import Any, Final

import msgpack

from rpc.errors import ProtocolError
from rpc.wire.header_check import check_entries

__all__ = ["pack_header", "unpack_header"]

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
