"""Determines how much memory a request takes once it is parsed, without parsing it.

A field of two bytes becomes an object of many, so a parser would use a multiple of the request's size before
anything could be checked. Here the fields are only counted, message by message, in protobuf's wire format.
Malformed requests are left to the parser, which refuses them.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import grpc
from google.protobuf.descriptor import FieldDescriptor

from farcall.serving.errors import Refused

__all__ = ["check_memory"]

_FIELD_BYTES: Final = 64
"""Memory of a field in bytes, whatever its content."""
_PACKED_FACTORS: Final = {
    FieldDescriptor.CPPTYPE_INT64: 16,
    FieldDescriptor.CPPTYPE_UINT64: 16,
    FieldDescriptor.CPPTYPE_INT32: 8,
    FieldDescriptor.CPPTYPE_UINT32: 8,
}
"""Memory per byte of packed numbers, while the parser grows its buffer. A small integer has one byte."""
_PACKED_FACTOR: Final = 2
"""The same for other numbers."""
_GROWTH: Final = _FIELD_BYTES // 2
"""Maximum factor of growth, for a request that consists of fields of two bytes."""
_SMALL: Final = 64 << 10
"""Size in bytes up to which a request is not checked."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_GROUPS: Final = (3, 4)
_LONGEST_VARINT: Final = 10


def check_memory(descriptor: Any, request: bytes, limit: int) -> None:
    """Check how much memory a request takes when it is parsed.

    Args:
        descriptor: descriptor of the message.
        request: its bytes.
        limit: maximum memory in bytes for its fields.

    Raises:
        Refused: they take more.
    """
    if len(request) <= max(_SMALL, limit // _GROWTH):
        return
    left, at, end, lengths = limit, 0, len(request), _lengths(descriptor)
    around: list[tuple[int, int, dict[int, Any]]] = []
    while True:
        if at >= end:
            if not around:
                return
            at, end, lengths = around.pop()
            continue
        tag, at = _varint(request, at, end)
        left -= _FIELD_BYTES
        wire = tag & 7
        if wire == _LENGTH:
            size, at = _varint(request, at, end)
            within = lengths.get(tag >> 3)
            if within is None:
                at += size
            elif isinstance(within, int):
                left -= size * within
                at += size
            else:
                around.append((at + size, end, lengths))
                end, lengths = min(at + size, end), _lengths(within)
        elif wire == _VARINT:
            _, at = _varint(request, at, end)
        elif wire in (_FIXED64, _FIXED32):
            at += 8 if wire == _FIXED64 else 4
        elif wire not in _GROUPS:  # the content of a group counts as if it were outside
            at = end
        if left < 0:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the values in the request would take more than the {limit} bytes of memory that one may "
                "take here. Send a tensor or bytes instead of many small values, or several requests",
            )


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return a number, and where it ends; beyond ``end`` if it is malformed."""
    if at < end and data[at] < 128:
        return data[at], at + 1
    value = shift = 0
    for each in range(at, min(at + _LONGEST_VARINT, end)):
        byte = data[each]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, each + 1
        shift += 7
    return 0, end + 1


@cache
def _lengths(descriptor: Any) -> dict[int, Any]:
    """What is in those fields of a message that have a length, by their numbers: the descriptor of the
    message there, or how much memory a byte of packed numbers takes. Texts and bytes are left out.
    """
    found: dict[int, Any] = {}
    for field in descriptor.fields:
        if field.message_type is not None:
            found[field.number] = field.message_type
        elif field.is_packed:
            found[field.number] = _PACKED_FACTORS.get(field.cpp_type, _PACKED_FACTOR)
    return found
