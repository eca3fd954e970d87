"""What the agent's parts need of it and of each other: the agent composes them and is no part of any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rpc.agent.call_table import CallTable
from rpc.agent.tape import Recording, Tape
from rpc.bulk.striping import Striping
from rpc.group.membership import WorkerReference
from rpc.group.peer import Peer
from rpc.group.workers import WorkerInfo
from rpc.runtime.events import Events
from rpc.runtime.executor import Executor
from rpc.runtime.mailbox import Counter
from rpc.runtime.tasks import Task
from rpc.serialization.payload import Payload
from rpc.serialization.serializer import Serializer

__all__ = ["Answers", "Dispatching", "Running", "Sending"]


class _Common(Protocol):
    serializer: Serializer
    events: Events

    def something_ended(self) -> None:
        """This worker may have become idle, which interests who waits to leave."""


class Sending(_Common, Protocol):
    """What the caller and the outbox need."""

    rpc_timeout: float
    tape: Tape | None
    calls: CallTable
    info: WorkerInfo

    def peer(self, callee: WorkerReference, /) -> Peer:
        """The peer that a callee names."""

    striping: Striping

    def share(self, peer: Peer, kind: int, call_id: int, payload: Payload, wait: float, /) -> bool:
        """Send a message through shared memory, if it can be."""


class Answers(Protocol):
    """How requests are answered: the outbox's half of it."""

    def reply(
        self,
        peer: Peer,
        call_id: int,
        value: Any,
        of: object = None,
        recording: Recording | None = None,
        codec: int = 0,
    ) -> None: ...

    def dump_reply(
        self, peer: Peer, value: Any, of: object, recording: Recording | None, codec: int = 0
    ) -> Payload: ...

    def fail(self, peer: Peer, call_id: int, error: BaseException) -> None: ...

    def answer(self, peer: Peer, kind: int, call_id: int, payload: Payload) -> None: ...


class Running(_Common, Protocol):
    """What the request runner needs."""

    executor: Executor
    postponed: Counter
    info: WorkerInfo

    def recording_of(self, header: dict[str, Any], source: Peer, /) -> Recording | None:
        """What a request with this header is noted in."""


class Dispatching(_Common, Protocol):
    """What the dispatcher needs."""

    calls: CallTable
    executor: Executor
    postponed: Counter

    def run_soon(self, tasks: Sequence[Task], /) -> None:
        """Run tasks on executor threads."""

    def lose(self, peer: Peer, reason: str, /) -> None:
        """Cut a worker off. From any thread."""
