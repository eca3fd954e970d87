"""What one worker asks of another about objects that live there: the kinds of message, and their words.

A request is a frame whose header names the object: ``create`` with the ids of a creation, ``object`` with the
one that is to be fetched, or whose ``method`` is to be called.
"""

from __future__ import annotations

from typing import Any, Final

from rpc.errors import ProtocolError
from rpc.wire import Kind
from rref.messages import ForkId, RRefId

__all__ = ["CREATE", "FETCH", "INVOKE", "created_ids", "method_of_object", "object_id"]

CREATE: Final = Kind.EXTENSION
"""Call a function and keep its value."""
FETCH: Final = Kind.EXTENSION + 1
"""Send an object, or its type."""
INVOKE: Final = Kind.EXTENSION + 2
"""Call a method of an object."""


def method_of_object(*args: Any, **kwargs: Any) -> Any:
    """Stands, in a message, for the method that the header names, of the object that it names."""
    raise TypeError("the method of a remote object is called on its owner, in a message that names both")


def object_id(header: dict[str, Any]) -> RRefId | None:
    """The object that a request is for; none if it names none."""
    named = header.get("object")
    return None if named is None else _id(named)


def created_ids(header: dict[str, Any]) -> tuple[RRefId, ForkId]:
    """Under which ids a creation is to be kept."""
    match header.get("create"):
        case [rref, fork]:
            return _id(rref), _id(fork)
        case other:
            raise ProtocolError(f"a creation names itself by {str(other)[:80]}")


def _id(value: Any) -> tuple[int, int]:
    match value:
        case [int(creator), int(number)]:
            return creator, number
    raise ProtocolError(f"a message names an object by {str(value)[:80]}, which is no id")
