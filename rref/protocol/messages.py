"""Messages of the reference protocol to other workers, and its actions for the shell.

Messages travel as msgpack lists, with the kind first. ``MESSAGES`` lists all of them; ``parse`` accepts no
others. Who sends which message, and when, is described at the head of ``rref.protocol.machine``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from rpc.errors import ProtocolError

__all__ = [
    "CREATOR_LOST",
    "Action",
    "Confirmed",
    "Descriptor",
    "Failed",
    "Fence",
    "ForkId",
    "Free",
    "Message",
    "Peer",
    "RRefId",
    "Ref",
    "Send",
    "State",
    "parse",
    "parse_descriptor",
]

Peer = int
"""A worker's incarnation."""
RRefId = tuple[int, int]
"""Id of an object: the incarnation that created the reference, and a number."""
ForkId = tuple[int, int]
"""Id of a fork: the incarnation that forked it, and a number."""
Ref = tuple[int, int]
"""Id of a local reference, which is released once. Unique, whatever the object."""
Descriptor = tuple[Peer, RRefId, ForkId]
"""Describes a reference in a message: owner, object, fork."""
Message = list[Any]
"""A control message, as msgpack encodes it."""


_LONGEST_TEXT: Final = 500
"""Maximum length of a reason, in characters."""


class State(IntEnum):
    """State of a local reference; one not yet released is ``PENDING``, ``CONFIRMED`` or ``FAILED``."""

    __hash__ = int.__hash__  # an enum's own is slow, and the tables are looked up often

    PENDING = 1
    """Held; the owner has not answered yet."""
    CONFIRMED = 2
    """Held; the owner counts it (or this worker is the owner)."""
    ORPHANED = 3
    """Released before the owner's answer, which is awaited."""
    LINGERING = 4
    """Released and confirmed; kept because it has children."""
    FAILED = 5
    """Held, but not usable; there is a reason."""
    GONE = 6
    """Neither held nor remembered."""


@dataclass(frozen=True, slots=True)
class Send:
    """Deliver ``message`` to ``peer`` exactly once. If that is impossible, report ``peer`` as lost."""

    peer: Peer
    message: Message


@dataclass(frozen=True, slots=True)
class Confirmed:
    """``ref``, pending until now, is counted by its owner: code that waits for it may run."""

    ref: Ref


@dataclass(frozen=True, slots=True)
class Failed:
    """``ref`` cannot be used (any more), for ``reason``; it is still to be released."""

    ref: Ref
    reason: str


@dataclass(frozen=True, slots=True)
class Free:
    """No reference to the object ``rref`` is left anywhere: drop it. Given once."""

    rref: RRefId


@dataclass(frozen=True, slots=True)
class Fence:
    """Another worker found ``peer`` dead: close the link to it, discard unread frames, call ``peer_lost``."""

    peer: Peer
    reason: str


Action = Send | Confirmed | Failed | Free | Fence


def _id(value: Any) -> tuple[int, int]:
    creator, number = value
    if type(creator) is not int or type(number) is not int:
        raise TypeError
    return creator, number


def _peer(value: Any) -> Peer:
    if type(value) is not int:
        raise TypeError
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError
    return value[:_LONGEST_TEXT]


CREATOR_LOST: Final = "its creator was lost before the creation arrived"
"""Beginning of the reason of a reference that failed because its creator was lost."""

MESSAGES: Final[dict[str, tuple[Callable[[Any], Any], ...]]] = {
    # user to owner
    "confirm": (_id, _id),  # rref, fork: count my fork, and answer
    "delete": (_id, _id),  # rref, fork: my fork is gone
    "abandon": (_id, _text),  # rref, reason: its creation failed at me, the creator
    # owner to user
    "confirmed": (_id,),  # fork
    "refused": (_id, _text),  # fork, reason
    # owner to the creator of an object that it knows only from third parties, and back
    "wanted": (_id,),  # rref: is its creation on the way?
    "unknown": (_id,),  # rref: no
    # the receiver of a fork to its sender
    "accepted": (_id,),  # fork: it no longer needs its parent
    # about dead workers
    "bereaved": (_peer,),  # any to owner: a child of your object's fork was at that peer
    "fence": (_peer, _text),  # owner to all: discard its unread messages, settle those that were read
    "fenced": (_peer,),  # the answer, when done
    "cleared": (_peer,),  # owner to the bereaved: all have answered, release the child
}


def parse(message: object) -> tuple[str, tuple[Any, ...]]:
    """Parse a received message into its kind and arguments, with ids as tuples.

    Raises:
        ProtocolError: it is not one of ``MESSAGES``.
    """
    try:
        if type(message) is list:
            kind, *fields = message
            checks = MESSAGES[kind]
            return kind, tuple([check(field) for check, field in zip(checks, fields, strict=True)])
    except (KeyError, TypeError, ValueError):
        pass
    raise ProtocolError(f"a peer sent a reference message that cannot be: {str(message)[:200]}")


def parse_descriptor(descriptor: object) -> Descriptor:
    """Parse a received descriptor, with its ids as tuples.

    Raises:
        ProtocolError: it is not a descriptor.
    """
    try:
        if isinstance(descriptor, list | tuple):
            owner, rref, fork = descriptor
            return _peer(owner), _id(rref), _id(fork)
    except (TypeError, ValueError):
        pass
    raise ProtocolError(f"a peer sent a reference that cannot be: {str(descriptor)[:200]}")
