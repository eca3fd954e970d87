"""What the reference protocol says to other workers, and what it asks of its own shell.

Messages travel as msgpack lists, the kind first. ``MESSAGES`` is the whole vocabulary; ``parse`` admits
nothing else. Who says what to whom, and when, stands at the head of ``rref.protocol.machine``.
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
"""Which object: the incarnation that created the reference, and a number."""
ForkId = tuple[int, int]
"""Which use of it: the incarnation that forked it, and a number."""
Ref = tuple[int, int]
"""One local reference, to be released once. Never the same for two, whatever their objects."""
Descriptor = tuple[Peer, RRefId, ForkId]
"""What a message carries for each reference in it: owner, object, fork."""
Message = list[Any]
"""A control message, as msgpack sees it."""


_LONGEST_TEXT: Final = 500
"""Characters of a reason that are kept."""


class State(IntEnum):
    """How a local reference stands; one not yet released is ``PENDING``, ``CONFIRMED`` or ``FAILED``."""

    __hash__ = int.__hash__  # of an enum, it is slow, and the tables are looked up often

    PENDING = 1
    """Held; the owner has not answered yet."""
    CONFIRMED = 2
    """Held; the owner counts it (or this worker is the owner)."""
    ORPHANED = 3
    """Released before the owner's answer, which is awaited."""
    LINGERING = 4
    """Released and confirmed; stays for its children."""
    FAILED = 5
    """Held, and good for nothing: there is a reason."""
    GONE = 6
    """Neither held nor remembered."""


@dataclass(frozen=True, slots=True)
class Send:
    """Deliver ``message`` to ``peer`` exactly once. If that cannot be, ``peer`` is lost: say so."""

    peer: Peer
    message: Message


@dataclass(frozen=True, slots=True)
class Confirmed:
    """``ref``, pending until now, is counted by its owner: what waits for it may run."""

    ref: Ref


@dataclass(frozen=True, slots=True)
class Failed:
    """``ref`` will never be of use (again), for ``reason``; it is still to be released."""

    ref: Ref
    reason: str


@dataclass(frozen=True, slots=True)
class Free:
    """No reference to the object ``rref`` is left anywhere: drop it. Said once."""

    rref: RRefId


@dataclass(frozen=True, slots=True)
class Fence:
    """Another worker found ``peer`` dead: close the link to it, discard the unread, call ``peer_lost``."""

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
"""What the reason of a reference that failed so begins with."""

MESSAGES: Final[dict[str, tuple[Callable[[Any], Any], ...]]] = {
    # user to owner
    "confirm": (_id, _id),  # rref, fork: count my fork and tell me
    "delete": (_id, _id),  # rref, fork: my fork is gone
    "abandon": (_id, _text),  # rref, reason: its creation failed at me, the creator
    # owner to user
    "confirmed": (_id,),  # fork
    "refused": (_id, _text),  # fork, reason
    # owner to the creator of an object that it only knows by hearsay, and back
    "wanted": (_id,),  # rref: is its creation on the way?
    "unknown": (_id,),  # rref: it is not
    # the receiver of a fork to its sender
    "accepted": (_id,),  # fork: it needs its parent no longer
    # about the dead
    "bereaved": (_peer,),  # any to owner: a child of your object's fork was at that peer
    "fence": (_peer, _text),  # owner to all: discard what is unread of it, settle what was read
    "fenced": (_peer,),  # the answer, when done
    "cleared": (_peer,),  # owner to the bereaved: all have done so, let the child go
}


def parse(message: object) -> tuple[str, tuple[Any, ...]]:
    """A received message as its kind and arguments, ids as tuples.

    Raises:
        ProtocolError: it is no message of this vocabulary.
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
    """A received descriptor with its ids as tuples.

    Raises:
        ProtocolError: it is no descriptor.
    """
    try:
        if isinstance(descriptor, list | tuple):
            owner, rref, fork = descriptor
            return _peer(owner), _id(rref), _id(fork)
    except (TypeError, ValueError):
        pass
    raise ProtocolError(f"a peer sent a reference that cannot be: {str(descriptor)[:200]}")
