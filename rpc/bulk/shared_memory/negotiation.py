"""The negotiation of shared memory between two workers, in one direction: the states of either end as tables.
Pure.

The *sender* is the worker that has a large message for a worker on the same host. It asks once, and uses the
socket meanwhile::

    sender                                                        receiver
    NEW --need--> ASKED          ask: True                  --->  NEW --ask--> LISTENING
                                 come: [name, token, limits] <---
    ASKED --come--> CONNECTED    connects, sends the token  --->
                                 sends a ledger with a nonce
                                 proof: nonce               <---  LISTENING --entered--> SHARED
    CONNECTED --proof--> SHARED  drop: [segments]           --->  SHARED --drop--> SHARED

The proof shows that both have mapped the same ledger, and that the descriptor channel is the peer's. A side
that cannot continue sends ``refuse`` with the reason, or stops by itself; then everything goes through the
socket. A message in a state whose table does not have it is a ``ProtocolError``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from rpc.errors import ProtocolError

__all__ = ["RECEIVER", "SENDER", "Event", "Negotiation", "OfferState"]


class OfferState(Enum):
    """The state of one end."""

    NEW = "nothing was said"
    ASKED = "it has asked"
    CONNECTED = "it has connected, and waits for the proof"
    LISTENING = "it waits for the sender to connect"
    SHARED = "there is shared memory"
    SOCKET = "there is none, and will be none"


class Event(Enum):
    """An event: a message of the peer, by its name, or a local one."""

    ASK = "ask"
    COME = "come"
    PROOF = "proof"
    REFUSE = "refuse"
    DROP = "drop"
    NEED = "a message is large"
    ENTERED = "the sender has connected"
    FAILED = "something failed here"
    GONE = "the peer is gone"


Table = Mapping[OfferState, Mapping[Event, OfferState]]

_GONE: Final = {Event.GONE: OfferState.SOCKET}
_REFUSED: Final = {Event.REFUSE: OfferState.SOCKET, **_GONE}
_FAILED: Final = {Event.FAILED: OfferState.SOCKET, **_GONE}

SENDER: Final[Table] = {
    OfferState.NEW: {Event.NEED: OfferState.ASKED, **_FAILED},
    OfferState.ASKED: {Event.COME: OfferState.CONNECTED, **_REFUSED},
    OfferState.CONNECTED: {Event.PROOF: OfferState.SHARED, **_REFUSED, **_FAILED},
    OfferState.SHARED: _FAILED,
    OfferState.SOCKET: _GONE,
}

RECEIVER: Final[Table] = {
    OfferState.NEW: {Event.ASK: OfferState.LISTENING, **_GONE},
    OfferState.LISTENING: {Event.ENTERED: OfferState.SHARED, **_FAILED},
    OfferState.SHARED: {Event.DROP: OfferState.SHARED, **_GONE},
    OfferState.SOCKET: _GONE,
}


class Negotiation:
    """One end of a negotiation."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.state = OfferState.NEW

    def on(self, event: Event) -> None:
        """Handle an event. Raises ``ProtocolError`` if it is impossible in this state."""
        following = self._table[self.state].get(event)
        if following is None:
            raise ProtocolError(f"'{event.value}' about shared memory, where {self.state.value}")
        self.state = following
