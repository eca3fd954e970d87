"""The life of the connection between this worker and another, as a table.

Everything that affects the order of its states is here; ``Peer`` steps through it, ``Connections`` acts on
it. A connection that breaks is made again, by whichever side is first, and messages go on where they were
(``session``). A worker is gone for good when its address refuses, when another incarnation answers there,
when it has given this one up, or when all attempts fail for as long as the option ``reconnect_within`` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

__all__ = ["CONNECTING", "TRANSITIONS", "Event", "State"]


class State(Enum):
    """Where the connection stands, as seen from this side."""

    UNCONNECTED = "nothing was sent yet"
    DIALLING = "this worker tries the other's addresses"
    HANDSHAKING = "this worker has said hello"
    CROSSED = "the other connects as well, and its attempt counts: it is awaited"
    ESTABLISHED = "frames flow"
    BROKEN = "it broke, or an attempt failed: another follows"
    LEFT = "this worker has said goodbye"
    LOST = "the other worker is gone"


class Event(Enum):
    """What happens to it."""

    DIAL = "something is to be sent"
    REACH = "somebody listens at one of the other's addresses; an earlier hello counts no more"
    WELCOME = "the other side has accepted this side's attempt"
    CROSS = "the other side has refused it, since it connects itself"
    ACCEPT = "this side has accepted the other's attempt"
    BREAK = "the connection is lost, or the attempt has failed, and the other worker may live"
    LEAVE = "this worker leaves"
    LOSE = "the other worker has died, left, said nonsense, cannot be reached, or refuses"


_END: Final = {Event.LEAVE: State.LEFT, Event.LOSE: State.LOST}

TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = {
    State.UNCONNECTED: {Event.DIAL: State.DIALLING, Event.ACCEPT: State.ESTABLISHED, **_END},
    State.DIALLING: {
        Event.REACH: State.HANDSHAKING,
        Event.ACCEPT: State.ESTABLISHED,
        Event.BREAK: State.BROKEN,
        **_END,
    },
    State.HANDSHAKING: {
        Event.REACH: State.HANDSHAKING,
        Event.WELCOME: State.ESTABLISHED,
        Event.CROSS: State.CROSSED,
        Event.ACCEPT: State.ESTABLISHED,
        Event.BREAK: State.BROKEN,
        **_END,
    },
    State.CROSSED: {Event.ACCEPT: State.ESTABLISHED, Event.BREAK: State.BROKEN, **_END},
    State.ESTABLISHED: {Event.BREAK: State.BROKEN, **_END},
    State.BROKEN: {Event.DIAL: State.DIALLING, Event.ACCEPT: State.ESTABLISHED, **_END},
    State.LEFT: {},
    State.LOST: {},
}
"""What is not in a row changes nothing in that state: an attempt whose end comes too late is dropped."""

CONNECTING: Final = frozenset({State.DIALLING, State.HANDSHAKING})
"""An attempt of this worker is under way, and may succeed: one that has crossed another will not."""
