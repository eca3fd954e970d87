"""What the agent's parts need of it and of each other: the agent composes them and is no part of any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from rpc.agent.calls import CallTable
from rpc.agent.departure import Activity
from rpc.agent.tape import Observation, Recording, Tape
from rpc.bulk.streams import BulkStreams
from rpc.group.control import Control
from rpc.group.membership import WorkerReference
from rpc.group.peer import Peer
from rpc.group.workers import WorkerInfo
from rpc.runtime.events import Events
from rpc.runtime.executor import Executor
from rpc.runtime.mailbox import Counter
from rpc.runtime.tasks import Task
from rpc.serialization.payload import Payload
from rpc.serialization.serializer import Serializer
from rpc.wire.frames import LargeFrame

__all__ = ["CANCEL", "Calling", "Dispatching", "Running"]

CANCEL: Final = "cancel"
"""Topic of control messages: the id of a call that its caller gives up."""


class _Common(Protocol):
    serializer: Serializer
    events: Events

    def something_ended(self) -> None:
        """This worker may have become idle, which interests who waits to leave."""

    def recording_of(
        self, header: dict[str, Any], source: Peer, /, *, answer: bool = False
    ) -> Recording | Observation | None:
        """What a request with this header, or an answer, is noted in."""

    def send(
        self,
        peer: Peer,
        kind: int,
        call_id: int,
        payload: Payload,
        *,
        wait: float = ...,
        coalesce: bool = ...,
    ) -> None:
        """See ``Dispatcher.send``."""


class Calling(_Common, Protocol):
    """What the caller needs."""

    rpc_timeout: float
    tape: Tape | None
    calls: CallTable
    control: Control

    def peer(self, callee: WorkerReference, /) -> Peer:
        """The peer that a callee names."""

    def run_soon(self, tasks: Sequence[Task], /) -> None:
        """Run tasks on executor threads."""


class Running(_Common, Protocol):
    """What the request runner needs."""

    tape: Tape | None
    executor: Executor
    postponed: Counter
    info: WorkerInfo


class Dispatching(Protocol):
    """What the dispatcher needs."""

    serializer: Serializer
    events: Events
    calls: CallTable
    executor: Executor
    activity: Activity
    postponed: Counter
    bulk_streams: BulkStreams

    def something_ended(self) -> None: ...

    def share(self, peer: Peer, kind: int, call_id: int, payload: Payload, wait: float, /) -> bool:
        """Send a message through shared memory, if it can be."""

    def run_soon(self, tasks: Sequence[Task], /) -> None: ...

    def large_came(self, peer: Peer, frame: LargeFrame, /) -> None:
        """A message that came in chunks is about to be taken in."""

    def fail(self, peer: Peer, call_id: int, error: BaseException, /) -> None:
        """Answer a request with an exception."""

    def lose(self, peer: Peer, reason: str, /) -> None:
        """Cut a worker off. From any thread."""
