"""The requests of other workers, from their arrival until they are answered.

A request begins at once. If objects travel beside its buffers, it waits until they are ready: a reference,
for example, is ready once its owner has confirmed it. The caller can cancel a request until it is answered. A
cancelled request waits no longer, nor does one whose caller is lost. The function that runs a request, and
answers it, is passed along with the request.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

from rpc.agent.activity import Activity
from rpc.agent.border import Border, Enclosure
from rpc.agent.calls import CANCEL
from rpc.agent.dispatcher import Dispatcher
from rpc.agent.tape import Observation, Recording
from rpc.errors import ProtocolError
from rpc.group.control import Control
from rpc.group.peer import Peer
from rpc.runtime.events import Events
from rpc.runtime.executor import Executor
from rpc.runtime.tasks import Task
from rpc.serialization.serializer import Serializer
from rpc.wire.frames import Frame, Kind

__all__ = ["ReceivedRequests", "Request"]


class Request:
    """A call that has arrived: its caller, its message, and the objects beside the pickle.

    ``recording`` is its recording, once it is loaded; ``task`` runs its coroutine, if it has one.
    ``cancelled``: whether its caller has cancelled it, or it has failed. ``failure``: why it cannot begin.
    ``began``: when it arrived, on the monotonic clock.
    ``enclosure``: what it runs inside of, if anything.
    ``taken``: when a thread began to load it, if there is a listener for runs.
    """

    __slots__ = (
        "arrivals",
        "began",
        "cancelled",
        "enclosure",
        "failure",
        "frame",
        "peer",
        "recording",
        "taken",
        "task",
    )

    def __init__(self, peer: Peer, frame: Frame, arrivals: Any = None) -> None:
        self.peer = peer
        self.frame = frame
        self.arrivals = arrivals
        self.recording: Recording | Observation | None = None
        self.cancelled = False
        self.failure: BaseException | None = None
        self.began = monotonic()
        self.taken = 0.0
        self.task: asyncio.Task[None] | None = None
        self.enclosure: Enclosure | None = None

    def cancel(self) -> None:
        """Keep it from beginning, or cancel its coroutine; a function on a thread continues. From
        any thread.
        """
        self.cancelled = True  # first: a coroutine that begins now sets its task, then checks this
        task = self.task
        if task is not None:
            with suppress(RuntimeError):  # the loop has ended
                task.get_loop().call_soon_threadsafe(task.cancel)

    def fail(self, error: BaseException) -> None:
        """Keep it from beginning: it is answered with an error."""
        self.failure = error
        self.cancelled = True


class ReceivedRequests:
    """The requests that have arrived and are not answered yet. From any thread.

    Args:
        activity: counts the requests that wait for objects.

    Attributes:
        begun: number of requests ever accepted; of several simultaneous ones, some may be counted late.
        unanswered: the requests that were entered, by caller and call id; ``AnswerSender`` removes them.
        border: what is done where requests come in, and are answered.
    """

    def __init__(
        self, serializer: Serializer, events: Events, executor: Executor, activity: Activity
    ) -> None:
        self.begun = 0
        self.border = Border()
        self._numbers = itertools.count(1)
        self._serializer = serializer
        self._adopt = serializer.adopt
        self._events = events
        self._executor = executor
        self._activity = activity
        self.unanswered: dict[tuple[Peer, int], Request] = {}
        self._awaiting: dict[Request, Task] = {}
        """Requests that wait for objects beside their buffers, with the tasks that are to run then."""

    def register(self, dispatcher: Dispatcher, control: Control, run: Callable[[Request], None]) -> None:
        """Register the handlers of calls, which ``run`` runs, and of their cancellation."""
        dispatcher.on(Kind.CALL, functools.partial(self.received, run), any_thread=True)
        control.on(CANCEL, self.cancel)

    # ---- from arrival to answer

    def received(self, run: Callable[[Request], None], peer: Peer, frame: Frame) -> Task | None:
        """Handle a frame of kind ``CALL``: enter the call, and have ``run`` run it as ``accept`` does, except
        that ``run`` itself has its thread wait for the next request.
        """
        if frame[2] or self.border.encloses or self._events.request_begun is not None:
            return self._accept(self.enter(peer, frame), run)
        # Most calls have nothing beside their buffers: the same, in fewer steps.
        self.begun = next(self._numbers)
        request = self.unanswered[peer, frame[1]] = Request(peer, frame)
        return run, request

    def enter(self, peer: Peer, frame: Frame) -> Request:
        """Register a request that its caller may cancel until it is answered."""
        header = frame[2]
        request = Request(peer, frame, self._adopt(header, peer) if header else None)
        self.unanswered[peer, frame[1]] = request
        return request

    def find(self, peer: Peer, call_id: int) -> Request | None:
        """Return a request that was entered and is not answered yet."""
        return self.unanswered.get((peer, call_id))

    def entered(self) -> list[Request]:
        """Return the requests that were entered and are not answered yet, oldest first."""
        return list(self.unanswered.copy().values())

    def __len__(self) -> int:
        """Number of requests that were entered and are not answered yet."""
        return len(self.unanswered)

    def count(self) -> None:
        """Count a request that has arrived and is not accepted yet, or never is."""
        self.begun = next(self._numbers)

    def accept(self, request: Request, run: Callable[[Request], None]) -> Task | None:
        """Have ``run`` run a request, and answer it once, when all objects beside its buffers are ready: at
        once by the returned task, or later. Then the thread waits for the next request of this caller itself,
        if it has nothing else to do.
        """
        return self._accept(request, functools.partial(self._run_and_lend, run))

    def _accept(self, request: Request, run: Callable[[Request], None]) -> Task | None:
        run = self.border.enclosed(run)
        self.begun = next(self._numbers)
        tell = self._events.request_begun
        if tell is not None:
            tell(request.peer.name, request.frame.call_id)
        task = (run, request)
        if request.arrivals is None:
            return task
        self._activity.postponed.begin()
        arrivals = request.arrivals
        self._awaiting[request] = task
        if self._serializer.ready(arrivals, functools.partial(self._admit, request)):
            if self._awaiting.pop(request, None) is None:
                return None
            self._activity.postponed.end()
            return task
        if request.cancelled or request.peer.lost is not None:  # before it was among those that wait
            self._cancel(request)
        return None

    def _admit(self, request: Request) -> None:
        """Run a request that has waited for its objects, unless it was cancelled in the meantime."""
        task = self._awaiting.pop(request, None)
        if task is not None:
            self._executor.submit(task)
            self._activity.postponed_ended()

    def _cancel(self, request: Request) -> None:
        request.cancel()
        self._admit(request)

    def peer_gone(self, peer: Peer, reason: str) -> None:
        """Cancel the requests of a lost worker that wait for objects, which may never be ready."""
        for request in list(self._awaiting):
            if request.peer is peer:
                self._cancel(request)

    def cancel(self, peer: Peer, call_id: object) -> None:
        """Cancel a call of a worker, which may have been answered already."""
        if type(call_id) is not int:
            raise ProtocolError(f"asked to cancel the call {call_id!r:.60}, which is no number")
        request = self.find(peer, call_id)
        if request is not None:
            self._cancel(request)

    def _run_and_lend(self, run: Callable[[Request], None], request: Request) -> None:
        run(request)
        self._executor.lend(request.peer.reader, at_once=False)
