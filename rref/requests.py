"""Requests about remote objects: the kinds of message, and their encoding.

Requests to create and to fetch begin their first segment with numbers of 64 bits, little-endian: a creation
with one for its reference and one for its fork, both made by the sender and followed by the pickle of the
call; a fetch with the two of the object's id. If a method is called, the header contains the ``object`` and
the ``method``. The answer to the first fetch of an object by its creator may answer the creation, too: then
its first segment begins with the call ids of the creation and of the fetch.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, Final

from rpc.errors import ProtocolError
from rpc.serialization.payload import Payload
from rpc.wire.frames import Frame, Kind
from rref.protocol.messages import ForkId, Peer, RRefId
from rref.turns import Turns

__all__ = [
    "CREATE",
    "FETCH",
    "FETCHED",
    "INVOKE",
    "creation",
    "fetch",
    "fetched_id",
    "fetched_with_creation",
    "method_of_object",
    "name_answered",
    "name_creation",
    "object_id",
    "turns_of_object",
]

CREATE: Final = Kind.EXTENSION
"""Call a function and keep its value."""
FETCH: Final = Kind.EXTENSION + 1
"""Send an object, or its type."""
INVOKE: Final = Kind.EXTENSION + 2
"""Call a method of an object."""
FETCHED: Final = Kind.EXTENSION + 3
"""The answer to a fetch, and to the creation of the object."""

_NUMBERS: Final = Struct("<QQ")


def method_of_object(*args: Any, **kwargs: Any) -> Any:
    """Represents, in a message, the method that the header names, of the object that it names."""
    raise TypeError("the method of a remote object is called on its owner, in a message that names both")


def object_id(header: dict[str, Any]) -> RRefId | None:
    """Return the object that a request is for, or None if it names none."""
    named = header.get("object")
    return None if named is None else _id(named)


def turns_of_object(header: dict[str, Any]) -> Turns | None:
    """Return the ``Turns`` of the object that a creation makes, if the number of concurrent methods is
    limited.
    """
    limit = header.get("concurrency")
    if limit is None:
        return None
    if type(limit) is not int or limit < 1:
        raise ProtocolError(f"a creation says that {limit!r:.60} methods of its object may run at a time")
    return Turns(limit)


def name_creation(payload: Payload, rref: RRefId, fork: ForkId) -> None:
    """Turn the message of a call into a creation with these ids."""
    payload.buffers[0] = _NUMBERS.pack(rref[1], fork[1]) + payload.buffers[0]


def creation(frame: Frame, creator: Peer) -> tuple[RRefId, ForkId, Frame]:
    """Return the ids under which the object of a creation is kept, and the call that creates it.

    Args:
        creator: incarnation of the sender.
    """
    kind, call_id, header, segments, codec = frame
    rref, fork = _numbers(segments)
    segments[0] = memoryview(segments[0])[_NUMBERS.size :]
    return (creator, rref), (creator, fork), Frame(kind, call_id, header, segments, codec)


def fetch(rref: RRefId) -> Payload:
    """Return the message that asks for an object."""
    return Payload({}, [_NUMBERS.pack(*rref)])


def fetched_id(frame: Frame) -> RRefId:
    """Return the id of the object that a message asks for."""
    return _numbers(frame.buffers)


def name_answered(payload: Payload, creation_id: int, fetch_id: int) -> None:
    """Turn the answer to a fetch into one to a creation and a fetch, with these call ids."""
    payload.buffers[0] = _NUMBERS.pack(creation_id, fetch_id) + payload.buffers[0]


def fetched_with_creation(frame: Frame) -> tuple[int, Frame]:
    """Return the call id of the creation that a message answers, and the answer to the fetch."""
    _, _, header, segments, codec = frame
    creation_id, fetch_id = _numbers(segments)
    value = memoryview(segments[0])[_NUMBERS.size :]
    return creation_id, Frame(Kind.REPLY, fetch_id, header, [value, *segments[1:]], codec)


def _numbers(segments: list[Any]) -> tuple[int, int]:
    if not segments or len(segments[0]) < _NUMBERS.size:
        raise ProtocolError("a message does not say which object or call it is about")
    first, second = _NUMBERS.unpack_from(segments[0])
    return first, second


def _id(value: Any) -> tuple[int, int]:
    match value:
        case [int(creator), int(number)]:
            return creator, number
    raise ProtocolError(f"a message names an object by {str(value)[:80]}, which is no id")
