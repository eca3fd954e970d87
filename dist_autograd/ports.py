"""The parts of the agent that distributed autograd uses, by role; see ``rpc.agent.ports``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rpc.agent.calls import PendingCall
from rpc.agent.device_ports import RequestDevices
from rpc.agent.received_requests import Request
from rpc.group.membership import WorkerReference
from rpc.group.peer import Peer
from rpc.runtime.tasks import Task
from rpc.serialization.payload import Payload

__all__ = ["Answers", "BackwardCalls", "Requests", "Workers"]


class BackwardCalls(Protocol):
    """Makes calls; see ``rpc.agent.caller.Caller``."""

    def call(
        self,
        to: WorkerReference,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
    ) -> PendingCall: ...

    def request(
        self, peer: Peer, kind: int, payload: Payload, timeout: float, what: object
    ) -> PendingCall: ...

    def transmit(self, call: PendingCall, kind: int, payload: Payload) -> None: ...

    def drop(self, call: PendingCall) -> bool: ...


class Requests(Protocol):
    """Requests that are not answered yet; see ``rpc.agent.received_requests.ReceivedRequests``."""

    @property
    def devices(self) -> RequestDevices | None: ...

    def accept(self, request: Request, run: Callable[[Request], None]) -> Task | None: ...


class Answers(Protocol):
    """Answers requests; see ``rpc.agent.answer_sender.AnswerSender``."""

    def answer(self, peer: Peer, kind: int, call_id: int, payload: Payload) -> None: ...

    def fail(self, peer: Peer, call_id: int, error: BaseException) -> None: ...


class Workers(Protocol):
    """The workers of the group, this one (``own``) included; see ``rpc.group.peer.PeerTable``."""

    @property
    def own(self) -> Peer: ...

    @property
    def by_incarnation(self) -> Callable[[int], Peer | None]: ...
