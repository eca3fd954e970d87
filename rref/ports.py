"""The parts of the agent that remote references use, by role; see ``rpc.agent.ports``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rpc.agent.answer_sender import Answer
from rpc.agent.calls import PendingCall
from rpc.agent.device_ports import SharedWork
from rpc.agent.futures import Future
from rpc.agent.received_requests import Request
from rpc.agent.request_runner import Call
from rpc.agent.tape import Observation, Recording
from rpc.group.membership import WorkerReference
from rpc.group.peer import Peer
from rpc.group.workers import Member
from rpc.runtime.tasks import Task
from rpc.serialization.payload import Payload

__all__ = ["Answers", "ReferenceCalls", "Requests", "Runner", "View", "Workers"]


class ReferenceCalls(Protocol):
    """Makes calls; see ``rpc.agent.caller.Caller``."""

    def dump_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], peer: Peer
    ) -> Payload: ...

    def attach(self, header: dict[str, Any], peer: Peer) -> None: ...

    def request(
        self,
        peer: Peer,
        kind: int,
        payload: Payload,
        timeout: float,
        what: object,
        *,
        coalesce: bool = False,
    ) -> PendingCall: ...

    def inquire(self, peer: Peer, kind: int, payload: Payload, timeout: float, what: object) -> Any: ...

    def transmit(self, call: PendingCall, kind: int, payload: Payload) -> None: ...

    def drop(self, call: PendingCall) -> bool: ...

    def future(self, call: PendingCall) -> Future[Any]: ...

    def effective_timeout(self, timeout: float) -> float: ...


class Requests(Protocol):
    """Requests that are not answered yet; see ``rpc.agent.received_requests.ReceivedRequests``."""

    def object_ready(self) -> SharedWork | None: ...

    def enter(self, peer: Peer, frame: Any) -> Request: ...

    def count(self) -> None: ...

    def accept(self, request: Request, run: Callable[[Request], None]) -> Task | None: ...


class Runner(Protocol):
    """Runs requests; see ``rpc.agent.request_runner.RequestRunner``."""

    def run(self, request: Request, load: Callable[[Request], Call] | None = None) -> None: ...

    def load(self, request: Request) -> Call: ...

    def start(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        request: Request,
        answer: Answer | None = None,
    ) -> Any: ...


class Answers(Protocol):
    """Answers requests; see ``rpc.agent.answer_sender.AnswerSender``."""

    def replier(self, request: Request, function: object = None) -> Answer: ...

    def reply(
        self,
        peer: Peer,
        call_id: int,
        value: Any,
        of: object = None,
        recording: Recording | Observation | None = None,
    ) -> None: ...

    def answer(self, peer: Peer, kind: int, call_id: int, payload: Payload) -> None: ...

    def fail(self, peer: Peer, call_id: int, error: BaseException) -> None: ...


class View(Protocol):
    """The membership of the group; see ``rpc.group.membership.Membership``."""

    @property
    def static(self) -> bool: ...

    def join(self, member: Member) -> bool: ...

    def leave(self, incarnation: int, reason: str) -> object: ...

    def gone_reason(self, incarnation: int) -> str | None: ...


class Workers(Protocol):
    """The workers of the group, this one (``own``) included; see ``rpc.group.peer.PeerTable``."""

    @property
    def own(self) -> Peer: ...

    @property
    def view(self) -> View: ...

    @property
    def by_incarnation(self) -> Callable[[int], Peer | None]: ...

    def find(self, worker: WorkerReference) -> Peer: ...

    def ensure(self, member: Member) -> Peer: ...

    def gone(self, member: Member, reason: str) -> Peer: ...
