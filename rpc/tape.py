"""Extension point: something that notes which tensors that require grad a message carries, at both its ends.

With a tape, distributed autograd can be built on the agent without the agent knowing what it is: the sender
notes what it sent, under a key of the message's header; the receiver makes the received tensors part of a
graph of its own.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from rpc.peer import Peer
from rpc.serialization import Connect, Payload, take_back

__all__ = ["Tape", "note"]


class Tape(Protocol):
    """Called from any thread."""

    key: str
    """Its place in the header: not that of any interceptor or carrier."""

    def calling(self) -> Any:
        """What a call made now, on this thread, is noted in; None if it isn't noted."""

    def answering(self, header: dict[str, Any], to: Peer) -> Any:
        """What the answer to a request of ``to`` with this header is noted in; None if it isn't noted."""

    def sent(self, noted_in: Any, tensors: list[Tensor], to: Peer) -> Any:
        """Note the tensors of a message that is about to be sent.

        Args:
            noted_in: what ``calling`` or ``answering`` returned.
            tensors: those that require grad, at least one.
            to: who gets the message.

        Returns:
            What its header is to say, as msgpack can encode it.
        """

    def received(self, value: Any, source: Peer) -> Connect | None:
        """How the tensors of a message are to be received whose header says ``value``; None for as leaves."""


def note(tape: Tape, noted_in: Any, tensors: list[Tensor], payload: Payload, to: Peer) -> None:
    """Note the tensors, if there are any, of a message that is about to be sent, and say so in its header."""
    if not tensors:
        return
    try:
        payload.header[tape.key] = tape.sent(noted_in, tensors, to)
    except BaseException:
        take_back(payload.header, to)
        raise
