"""An agent reduced to its part in calls: it answers them when a test says so, and decodes the answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Sized
from types import SimpleNamespace
from typing import Any

from rpc.agent.border import Border
from rpc.agent.calls import CallTable, PendingCall
from rpc.agent.futures import Future
from rpc.agent.tape import Tracing
from rpc.errors import ProtocolError
from rpc.group.peer import Peer
from rpc.runtime.events import Events
from rpc.runtime.executor import Executor
from rpc.runtime.tasks import Task
from rpc.serialization.serializer import Serializer
from rpc.wire.frames import Frame
from tests.support.members import peer
from tests.support.streams import until


def table_of(
    loop: Any,
    run_soon: Callable[[Sequence[Task]], object] | None = None,
    ended: Callable[[], object] = lambda: None,
    kind: type[CallTable] = CallTable,
) -> CallTable:
    """A table of calls without an agent; ``ended`` is called when a call may have ended without an answer."""
    unused: Any = None
    activity: Any = SimpleNamespace(ended=ended)
    return kind(loop, Serializer(), Tracing(), Events(), activity, unused, run_soon or unused)


class Owner:
    """A table of calls reduced: decodes replies, and completes futures on an executor."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.border = Border()
        self.serializer = Serializer()
        self.open: dict[int, PendingCall] = {}
        self.decoded: list[int] = []
        self.decoding_threads: list[threading.Thread] = []

    def call(self, timeout: float = 0, what: object = "what") -> PendingCall:
        call_id = len(self.open) + 1
        call = self.open[call_id] = PendingCall(self, call_id, peer(), what, timeout)  # type: ignore[arg-type]
        return call

    def future(self, timeout: float = 0) -> tuple[PendingCall, Future[Any]]:
        call = self.call(timeout)
        call.watched = True
        return call, Future.for_call(call)

    def answer(self, call: PendingCall, outcome: Any) -> None:
        """What the loop does with a reply, whose value is ``outcome``, or which is the error ``outcome``."""
        reply = (
            outcome if isinstance(outcome, BaseException) else Frame(6, call.call_id, {"value": outcome}, [])
        )
        if call.settle(reply) and call.future is not None:
            self.executor.submit((call.future.complete, None))

    def decode(self, call: PendingCall, frame: Frame) -> Any:
        self.decoded.append(call.call_id)
        self.decoding_threads.append(threading.current_thread())
        value = frame.header["value"]
        return value() if callable(value) else value

    def answered(self, call: PendingCall) -> None:
        self.open.pop(call.call_id, None)

    def watch(self, call: PendingCall) -> None:
        pass

    def complete_soon(self, *futures: Future[Any]) -> None:
        for future in futures:
            self.executor.submit((future.complete, None))

    def unattended(self, peer: Peer, frame: Frame) -> PendingCall | None:
        return None

    def expire(self, call: PendingCall) -> BaseException | None:
        return call.timeout_error() if self.open.pop(call.call_id, None) else None

    def cancel(self, call: PendingCall) -> bool:
        return False

    def unwrap(self, peer: Peer, frame: Frame, taken: Sized) -> Frame:
        if not frame.buffers:
            raise ProtocolError("a malformed message")
        wrapped: Frame = frame.buffers[0]
        return wrapped


def when_waiting(call: PendingCall, function: Callable[..., object], *args: object) -> Callable[[], None]:
    """Calls a function as soon as a thread waits for the call."""

    def run() -> None:
        until(lambda: call.awaited._waiters)
        function(*args)

    return run


def fail(error: BaseException) -> Any:
    raise error
