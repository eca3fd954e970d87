"""How two workers come to share memory, one way: the states of either end as tables. Pure.

The *sender* is who has something large for a worker on the same host. It asks once, and sends through the
socket meanwhile::

    sender                                                        receiver
    NEW --need--> ASKED          ask: True                  --->  NEW --ask--> LISTENING
                                 come: [name, token, limits] <---
    ASKED --come--> CONNECTED    connects, shows the token  --->
                                 sends a ledger with a nonce
                                 proof: nonce               <---  LISTENING --entered--> SHARED
    CONNECTED --proof--> SHARED  drop: [segments]           --->  SHARED --drop--> SHARED

The proof shows that both have mapped the same ledger, and that the descriptor channel is the peer's. Whoever
cannot go on says ``refuse`` with the reason, or falls back by itself; then all goes through the socket.
Anything said in a state whose table does not have it is a ``ProtocolError``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from rpc.errors import ProtocolError

__all__ = ["RECEIVER", "SENDER", "Event", "Negotiation", "OfferState"]


class OfferState(Enum):
    """Where one end is."""

    NEW = "nothing was said"
    ASKED = "it has asked"
    CONNECTED = "it has connected, and waits for the proof"
    LISTENING = "it waits for the sender to connect"
    SHARED = "there is shared memory"
    SOCKET = "there is none, and will be none"


class Event(Enum):
    """What happens: what a peer says, by the name it has there, or what is found out here."""

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
    """One end."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.state = OfferState.NEW

    def on(self, event: Event) -> None:
        """Something happens. Raises ``ProtocolError`` if it cannot in this state."""
        following = self._table[self.state].get(event)
        if following is None:
            raise ProtocolError(f"'{event.value}' about shared memory, where {self.state.value}")
        self.state = following
