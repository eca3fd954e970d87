"""What remote references need of the agent that they stand on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from rpc.agent.caller import Caller
from rpc.agent.calls import CallTable
from rpc.agent.device_ports import RequestDevices
from rpc.agent.dispatcher import Dispatcher, KindHandler
from rpc.agent.hooks import Hooks
from rpc.agent.request_runner import RequestRunner
from rpc.agent.tape import Observation, Recording
from rpc.group.connections import Connections
from rpc.group.control import Control
from rpc.group.membership import Membership, WorkerReference
from rpc.group.peer import Peer
from rpc.group.workers import Member, WorkerInfo
from rpc.runtime.executor import Executor
from rpc.runtime.mailbox import Counter, Mailbox
from rpc.serialization.payload import Payload
from rpc.serialization.serializer import Serializer

__all__ = ["Group", "Serving"]


class _Common(Protocol):
    info: WorkerInfo
    mailbox: Mailbox
    executor: Executor
    devices: RequestDevices | None

    @property
    def on_gone(self) -> Callable[[Callable[[Peer, str], None]], object]:
        """Have a function called, on the loop's thread, when a worker is gone for good."""


class Group(_Common, Protocol):
    """For the references of this worker: who is there, messages to them, and calls."""

    incarnation: int
    closed: bool
    hooks: Hooks
    loop: asyncio.AbstractEventLoop
    view: Membership
    connections: Connections
    control: Control
    calls: CallTable
    caller: Caller

    @property
    def own_peer(self) -> Peer: ...

    @property
    def is_static_group(self) -> bool: ...

    @property
    def peer(self) -> Callable[[WorkerReference], Peer]: ...

    @property
    def peer_for(self) -> Callable[[Member], Peer]: ...

    @property
    def gone_peer(self) -> Callable[[Member, str], Peer]: ...

    @property
    def peer_by_incarnation(self) -> Callable[[int], Peer | None]: ...

    @property
    def on_joined(self) -> Callable[[Callable[[Peer], None]], object]: ...

    @property
    def on_closed(self) -> Callable[[Callable[[], object]], object]: ...


class Serving(_Common, Protocol):
    """For those who serve: requests, and their answers."""

    serializer: Serializer
    dispatcher: Dispatcher
    runner: RequestRunner
    postponed: Counter

    def on(
        self, kind: int, handler: KindHandler, *, any_thread: bool = False, followed: bool = False
    ) -> None: ...

    def recording_of(self, header: dict[str, Any], source: Peer, /) -> Recording | Observation | None: ...

    @property
    def something_ended(self) -> Callable[[], object]: ...

    @property
    def answer(self) -> Callable[[Peer, int, int, Payload], None]: ...

    @property
    def reply(self) -> Callable[..., None]: ...

    @property
    def fail(self) -> Callable[[Peer, int, BaseException], None]: ...
