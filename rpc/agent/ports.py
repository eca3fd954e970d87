"""Interfaces between the agent's parts, and of the agent to packages that build on it.

Each port is a role that one part has, and names methods: ``CallTable`` implements ``CallsUnderWay``. ``rref``
and ``dist_autograd`` define further ones for themselves, and are given those that they use and not the agent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol, TypeVar

from rpc.agent.calls import PendingCall
from rpc.agent.dispatcher import KindHandler
from rpc.group.peer import Peer
from rpc.serialization.payload import Payload

__all__ = ["CANCEL", "CallsUnderWay", "ControlMessages", "Kinds", "SendMessage"]

C = TypeVar("C", bound=PendingCall)

CANCEL: Final = "cancel"
"""Topic of control messages with the id of a call that its caller cancels."""


class SendMessage(Protocol):
    """``Sender.send``."""

    def __call__(
        self,
        peer: Peer,
        kind: int,
        call_id: int,
        payload: Payload,
        /,
        *,
        wait: float = ...,
        coalesce: bool = ...,
    ) -> object: ...


class Kinds(Protocol):
    """Registers further kinds of messages; see ``Messages``."""

    def on(self, kind: int, handler: KindHandler, *, any_thread: bool = False) -> None: ...


class ControlMessages(Protocol):
    """Small messages that must arrive; see ``rpc.group.control.Control``."""

    def post(self, peer: Peer, topic: str, body: Any) -> None: ...

    def on(self, topic: str, handler: Callable[[Peer, Any], None]) -> None: ...

    def on_batch(self, topic: str, handler: Callable[[Peer, list[Any]], None]) -> None: ...


class CallsUnderWay(Protocol):
    """The calls of this worker that are under way; see ``rpc.agent.calls.CallTable``."""

    def open(
        self,
        peer: Peer,
        what: object,
        timeout: float,
        kind: type[C],
        header: dict[str, Any] | None = None,
        how: str = "async",
    ) -> C: ...

    def watch(self, call: PendingCall) -> None: ...

    def waiting(self) -> Iterable[PendingCall]: ...
