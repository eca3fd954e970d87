"""The requests of other workers: from their arrival until they are answered, with a value or an exception.

A request begins at once. If objects travel beside its buffers, it waits until they are ready: a reference,
for example, is ready once its owner has confirmed it. The caller can cancel a request until it is answered. A
cancelled request waits no longer, nor does one whose caller is lost.

Requests run on executor threads; ``async def`` functions run as coroutines on a separate loop. Each request
is answered exactly once. If a value cannot be sent, the answer is the error that says why. An exception that
is too large is replaced by its description.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext, suppress
from time import monotonic
from types import CoroutineType
from typing import Any, Final

import torch

from rpc.agent.activity import Activity
from rpc.agent.border import Border, Enclosure
from rpc.agent.calls import CANCEL, name_of
from rpc.agent.dispatcher import Dispatcher, Sender
from rpc.agent.tape import Observation, Recording, Tracing, note
from rpc.errors import (
    GivenUpError,
    MessageLostError,
    NoMemoryError,
    NotInitializedError,
    ProtocolError,
    RpcError,
    RRefError,
    WorkerLostError,
    with_article,
)
from rpc.functions import ASYNC_EXECUTION_MARK
from rpc.group.control import Control
from rpc.group.peer import Peer, PeerTable
from rpc.runtime.code_folders import OURS
from rpc.runtime.current import is_initialized
from rpc.runtime.events import Events
from rpc.runtime.executor import Executor
from rpc.runtime.isolation import isolate_tasks
from rpc.runtime.legible import legible
from rpc.runtime.loop import LoopThread
from rpc.runtime.tasks import Task
from rpc.runtime.torch_internals import BaseFuture
from rpc.runtime.tracebacks import place_of
from rpc.serialization.exception_state import twin
from rpc.serialization.failures import beginning_of, text_of
from rpc.serialization.kept_errors import without_frames
from rpc.serialization.payload import Payload
from rpc.serialization.serializer import Serializer
from rpc.wire.frames import Frame, Kind

__all__ = ["LATER", "Answer", "Answers", "Call", "ReceivedRequests", "Request"]

logger = logging.getLogger(__name__)

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function and its arguments."""

Answer = Callable[[Any, BaseException | None], None]
"""Called once, with the value or the exception."""

_SHOWN_OF_ERROR: Final = 50
"""Maximum number of characters of an error in the log; the caller gets all of them."""

LATER: Final = object()
"""Returned by ``ReceivedRequests.start`` if the answer is given later."""

_QUICK_BYTES: Final = 1 << 20
"""Number of bytes that are copied in the time of a few hand-overs between threads."""

_FEW: Final = 16
"""Number of tasks that wait for a thread above which answers are sent together."""

_WITHOUT_DESTRUCTOR: Final = frozenset((type(None), bool, int, float, str, bytes, torch.Tensor))
"""Exact types whose values are destroyed without running user code, unless attached to a tensor."""


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


class Answers:
    """Answers requests, from any thread.

    Args:
        peers: the workers; has this worker's name, for messages.
        send: sends an answer; see ``Sender.send``.
        run_soon: has tasks run on executor threads.

    Attributes:
        unanswered: the requests that were entered and are not answered yet, by caller and call id.
    """

    def __init__(
        self,
        peers: PeerTable,
        serializer: Serializer,
        tracing: Tracing,
        events: Events,
        send: Callable[..., object],
        run_soon: Callable[[Sequence[Task]], object],
    ) -> None:
        self.unanswered: dict[tuple[Peer, int], Request] = {}
        self._peers = peers
        self._serializer = serializer
        self._tracing = tracing
        self._events = events
        self._send = send
        self._run_soon = run_soon

    def register(self, dispatcher: Dispatcher, sender: Sender) -> None:
        """Register the handlers of answers that do not arrive, and of requests that cannot be taken in."""
        dispatcher.on_lost((Kind.REPLY, Kind.FAILURE), self.answer_lost)
        dispatcher.on_failed((None,), self.request_failed)
        sender.on_unsent((Kind.REPLY, Kind.FAILURE), self.answer_unsent)

    def replier(self, request: Request, function: object = None) -> Answer:
        """Return a function that answers a request for ``function``, once."""
        what = None if function is None else name_of(function)
        peer, call_id, codec = request.peer, request.frame.call_id, request.frame.codec

        def answer(value: Any, error: BaseException | None) -> None:
            if error is None and request.cancelled:
                error = asyncio.CancelledError()
            if error is not None:
                self.fail(peer, call_id, error, what)
            else:
                result = None if what is None else f"the result of {what}"
                self.reply(peer, call_id, value, result, request.recording, codec, by=what)

        return answer

    def reply(
        self,
        peer: Peer,
        call_id: int,
        value: Any,
        of: object = None,
        recording: Recording | Observation | None = None,
        codec: int | None = None,
        *,
        by: object = None,
    ) -> None:
        """Answer a request with the value of ``of``, a function or a text. If it cannot be sent, answer with
        that error, as raised ``by`` the function, by default ``of``.
        """
        try:
            payload = self.dump_reply(peer, value, of, recording, codec)
        except BaseException as error:
            self.fail(peer, call_id, error, of if by is None else by)
        else:
            self.answer(peer, Kind.REPLY, call_id, payload)

    def dump_reply(
        self,
        peer: Peer,
        value: Any,
        of: object,
        recording: Recording | Observation | None,
        codec: int | None = None,
    ) -> Payload:
        """Serialize the value for the answer to a request; arguments are as for ``reply``."""
        serializer = peer.codec if codec is None else self._serializer.codecs[codec]
        if recording is None:
            return serializer.dumps(value, peer, what=of)
        if isinstance(recording, Observation):
            payload = self.dump_reply(peer, value, of, recording.inner, codec)
            recording.tell(payload.header)
            return payload
        tape = self._tracing.tape
        if tape is None:
            return serializer.dumps(value, peer, what=of)
        tensors: list[torch.Tensor] = []
        if recording.tracks:
            payload = serializer.dumps(value, peer, what=of, tracked=tensors)
        else:
            with torch.no_grad():
                payload = serializer.dumps(value, peer, what=of, tracked=tensors)
        if tensors:
            note(tape, recording, tensors, payload.header, peer, self._serializer)
        return payload

    def fail(self, peer: Peer, call_id: int, error: BaseException, of: object = None) -> None:
        """Answer a request with an exception; ``of`` is as for ``reply``."""
        request = self.unanswered.get((peer, call_id))
        wanted = request is not None and request.cancelled and isinstance(error, asyncio.CancelledError)
        # A function that continues after this worker has ended, for example by KeyboardInterrupt, cannot call
        # others, or use its references.
        wanted |= isinstance(error, NotInitializedError | RRefError) and not is_initialized()
        # The loss of its caller has been logged already, and nobody can be answered.
        consequence = isinstance(error, GivenUpError) or (
            isinstance(error, WorkerLostError) and error.worker == peer.name
        )
        said = beginning_of(text_of(error), _SHOWN_OF_ERROR)
        logger.log(
            logging.DEBUG if wanted else logging.INFO if consequence else logging.WARNING,
            "worker '%s': %s, called by worker '%s', raised %s%s%s%s",
            self._peers.own.name,
            legible(_raised_in(error) if of is None else name_of(of)),
            peer.name,
            legible(type(error).__name__),
            "" if request is None else f" after {monotonic() - request.began:.4f} s",
            place_of(error),
            f": {said}" if said else "",
            exc_info=error if logger.isEnabledFor(logging.DEBUG) else None,
        )
        serializer, codec = self._serializer, peer.codec.id
        payload = serializer.dump_exception(error, self._peers.own.name, peer, codec=codec)
        self.answer(peer, Kind.FAILURE, call_id, payload)

    def answer(
        self, peer: Peer, kind: int, call_id: int, payload: Payload, *, coalesce: bool = False
    ) -> None:
        """Answer a request, which may have been entered, with an existing message.

        Args:
            coalesce: whether it may be sent together with the answers that follow.
        """
        self.unanswered.pop((peer, call_id), None)
        try:
            self._send(peer, kind, call_id, payload, coalesce=coalesce)
            tell = self._events.request_ended
            if tell is not None:
                tell(peer.name, call_id, kind == Kind.FAILURE)
        except WorkerLostError as error:
            # No worker is left to be answered, which is not a failure of this one.
            logger.debug("dropped an answer: %s", error)
        except Exception as error:
            if kind == Kind.FAILURE:
                logger.exception("could not even send a failure to worker '%s'", peer.name)
                raise
            self.fail(peer, call_id, error)

    def request_failed(self, peer: Peer, call_id: int, error: Exception) -> None:
        """Handle that a request could not be taken in, and does not run: see ``Dispatcher.on_failed``. It is
        answered by another thread, as ``answer_lost`` does.
        """
        lacking = NoMemoryError if isinstance(error, MemoryError) else RpcError
        failure = lacking(
            f"worker '{self._peers.own.name}' could not take in the call, which has not run: "
            f"{type(error).__name__}: {text_of(error) or 'there is no memory'}. Try again when that worker "
            f"has more memory, threads or file descriptors"
        )
        failure.__cause__ = error
        self._run_soon([(lambda _: self.fail(peer, call_id, failure), None)])

    def answer_unsent(self, peer: Peer, call_id: int, error: BaseException) -> None:
        """Handle that an answer that was to be sent later could not be sent: see ``Sender.on_unsent``."""
        if peer.lost is None:
            self.fail(peer, call_id, error)

    def answer_lost(self, peer: Peer, call_id: int, what: str) -> None:
        """Handle that a large answer has not arrived: see ``Dispatcher.on_lost``. The error is sent in its
        place, by another thread: it may have to wait for room, which this thread must make.
        """
        error = MessageLostError(f"the call ran, and its answer was lost: {what}", peer.name)
        self._run_soon([(lambda _: self.fail(peer, call_id, error), None)])


class ReceivedRequests:
    """The requests that have arrived and are not answered yet. From any thread.

    Args:
        answers: answers them.
        peers: the workers; has this worker's name, for messages.
        executor: its threads run the requests, and serialize what coroutines return.
        activity: counts the requests that wait for objects, and those that are answered later.

    Attributes:
        begun: number of requests ever accepted; of several simultaneous ones, some may be counted late.
        border: what is done where requests come in, and are answered.
    """

    def __init__(
        self,
        answers: Answers,
        peers: PeerTable,
        serializer: Serializer,
        tracing: Tracing,
        events: Events,
        executor: Executor,
        activity: Activity,
    ) -> None:
        self.begun = 0
        self.border = Border()
        self._numbers = itertools.count(1)
        self._answers = answers
        self._unanswered = answers.unanswered
        self._peers = peers
        self._serializer = serializer
        self._tracing = tracing
        self._events = events
        self._executor = executor
        self._activity = activity
        self._awaiting: dict[Request, Task] = {}
        """Requests that wait for objects beside their buffers, with the tasks that are to run then."""
        self._lock = threading.Lock()
        self._coroutines: LoopThread | None = None
        self._stopped = False

    def register(self, dispatcher: Dispatcher, control: Control) -> None:
        """Register the handlers of calls, and of their cancellation."""
        dispatcher.on(Kind.CALL, self.received, any_thread=True)
        control.on(CANCEL, self.cancel)

    # ---- from arrival to answer

    def received(self, peer: Peer, frame: Frame) -> Task | None:
        """Handle a frame of kind ``CALL``: enter the call and run it, as ``accept`` does; but ``run`` itself
        has its thread wait for the next request.
        """
        if frame[2] or self.border.encloses or self._events.request_begun is not None:
            return self._accept(self.enter(peer, frame), self.run)
        # Most calls have nothing beside their buffers: the same, in fewer steps.
        self.begun = next(self._numbers)
        request = self._unanswered[peer, frame[1]] = Request(peer, frame)
        return self.run, request

    def enter(self, peer: Peer, frame: Frame) -> Request:
        """Register a request that its caller may cancel until it is answered."""
        header = frame[2]
        serializer = self._serializer
        brings_nothing = serializer.brings_nothing(header)
        request = Request(peer, frame, None if brings_nothing else serializer.adopt(header, peer))
        self._unanswered[peer, frame[1]] = request
        return request

    def entered(self) -> list[Request]:
        """Return the requests that were entered and are not answered yet, oldest first."""
        return list(self._unanswered.copy().values())

    def __len__(self) -> int:
        """Number of requests that were entered and are not answered yet."""
        return len(self._unanswered)

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
        if self.border.encloses:
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
        request = self._unanswered.get((peer, call_id))
        if request is not None:
            self._cancel(request)

    def _run_and_lend(self, run: Callable[[Request], None], request: Request) -> None:
        run(request)
        self._executor.lend(request.peer.reader, at_once=False)

    # ---- running

    def run(self, request: Request, load: Callable[[Request], Call] | None = None) -> None:
        """Run a request and answer it; ``load`` reads it, if it is not a plain call."""
        function: Callable[..., Any] | None = None
        try:
            function, args, kwargs = (load or self.load)(request)
            value = self.start(function, args, kwargs, request)
        except BaseException as error:
            self._answers.fail(request.peer, request.frame.call_id, error, function)
            return
        if value is LATER:
            request.frame.buffers.clear()
            return
        if request.cancelled:  # by now
            self._answers.fail(request.peer, request.frame.call_id, asyncio.CancelledError())
            return
        del args, kwargs
        # Release the arguments' memory before the caller continues, as it may use that memory.
        request.frame.buffers.clear()
        peer, codec, recording = request.peer, request.frame.codec, request.recording
        try:
            if recording is None:
                payload = self._serializer.codecs[codec].dumps(value, peer, what=function)
            else:
                payload = self._answers.dump_reply(peer, value, function, recording, codec)
        except BaseException as error:
            self._answers.fail(peer, request.frame.call_id, error, function)
            return
        del function  # now, since its destructor may be user code
        large = len(payload.buffers) > 1 and sum(map(len, payload.buffers)) > _QUICK_BYTES
        # Have this thread wait for the next request itself: from now on, since it may come once this one is
        # answered. But a waiting thread must not run user code, such as the destructor of ``value``, and
        # must not copy large data: then it waits when it is done.
        waiting = self._executor.lend(peer.reader, at_once=not large and type(value) in _WITHOUT_DESTRUCTOR)
        # If many wait, throughput matters more than latency.
        self._answers.answer(peer, Kind.REPLY, request.frame.call_id, payload, coalesce=waiting > _FEW)

    def load(self, request: Request) -> Call:
        """Return the function and arguments of a request.

        Raises:
            CancelledError: it has been cancelled.
            WorkerLostError: it has been cancelled since its caller is lost.
            Exception: the error of unpickling, or that which keeps it from beginning.
        """
        if request.cancelled:
            request.arrivals = None  # a reference that is never confirmed keeps the request
            request.frame.buffers.clear()
            if request.failure is not None:
                raise twin(request.failure)  # a copy: this frame refers to the request, a cycle
            if request.peer.lost is not None:
                raise WorkerLostError(f"its caller is gone: {request.peer.lost}", request.peer.name)
            raise asyncio.CancelledError
        if self._events.run_begun is not None:
            request.taken = monotonic()
        peer = request.peer
        _, _, header, buffers, codec = request.frame
        connect = None
        if header:
            recording = request.recording = self._tracing.recording_of(header, peer)
            if recording is not None:
                connect = recording.connect
        if self._tracing.watcher is not None:
            request.recording = self._tracing.watcher(request.recording)
        load = self._serializer.codecs[codec].load_call
        # Only the arguments hold it from here on: other references to the request keep nothing of it.
        arrivals, request.arrivals = request.arrivals, None
        return load(header, buffers, arrivals, peer, connect=connect)

    def start(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        request: Request,
        answer: Answer | None = None,
    ) -> Any:
        """Run a function, inside the recording that the tape made for the header of a loaded request.

        Returns:
            Its value; or ``LATER``: then ``answer``, by default that of the request, is called on some thread
            when the future that it returned (``async_execution``) or its coroutine (``async def``) is done.

        Raises:
            The error that the function raises immediately; ``answer`` is not called then.
        """
        tell = self._events.run_begun
        if tell is not None:
            now = monotonic()
            taken = request.taken or now
            tell(request.peer.name, request.frame.call_id, function, taken - request.began, now - taken)
        call = function if request.enclosure is None else request.enclosure.enclosing(function)
        try:
            if request.recording is None:
                value = call(*args, **kwargs)
            else:
                with request.recording:
                    value = call(*args, **kwargs)
        finally:
            tell = self._events.run_ended
            if tell is not None:
                tell(request.peer.name, request.frame.call_id)
        if type(value) is CoroutineType or hasattr(function, ASYNC_EXECUTION_MARK):
            return self._later(function, value, request, answer or self._answers.replier(request, function))
        return value

    def _later(self, function: Callable[..., Any], value: Any, request: Request, answer: Answer) -> Any:
        """Arrange for the answer when the function's future or coroutine is done."""
        postponed = self._activity.postponed
        if type(value) is CoroutineType:
            try:
                loop = self._coroutine_loop()
            except BaseException:
                value.close()
                raise
            if request.enclosure is not None:
                value, answer = request.enclosure.later(value, answer)
            coroutine = self._finish(value, request, answer)
            postponed.begin()
            try:
                asyncio.run_coroutine_threadsafe(coroutine, loop)
            except BaseException:  # the loop has just ended
                coroutine.close()
                value.close()
                self._activity.postponed_ended()
                raise
            return LATER
        if not isinstance(value, BaseFuture):
            raise RpcError(
                "Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
                f"but {getattr(function, '__qualname__', function)} on worker "
                f"'{self._peers.own.name}' returned {with_article(type(value))}. "
                "(The decorator is rpc.functions.async_execution.)"
            )
        postponed.begin()

        def done(future: torch.futures.Future[Any]) -> None:
            try:
                try:
                    result = future.value()
                except BaseException as error:
                    answer(None, error)
                    without_frames(error, copy=twin)  # a future of PyTorch keeps the error itself
                else:
                    answer(result, None)
            finally:
                self._activity.postponed_ended()

        value.add_done_callback(done)
        return LATER

    async def _finish(self, coroutine: Coroutine[Any, Any, Any], request: Request, answer: Answer) -> None:
        """Run an ``async def`` callee; its return value is serialized on an executor thread."""
        request.task = asyncio.current_task()
        try:
            if request.cancelled:
                coroutine.close()
                raise asyncio.CancelledError
            recording = request.recording
            rest = recording.following(coroutine) if isinstance(recording, Observation) else coroutine
            with recording or nullcontext():
                value = await rest
        except BaseException as error:
            self._executor.submit((_give, (answer, None, error)))
            if isinstance(error, asyncio.CancelledError):
                raise
        else:
            self._executor.submit((_give, (answer, value, None)))
        finally:
            request.task = None  # the error of a cancelled task refers to this frame, a cycle
            self._activity.postponed_ended()

    # ---- coroutines

    def _coroutine_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._stopped:
                raise NotInitializedError("this worker is shutting down: it begins no more coroutines")
            if self._coroutines is None:
                self._coroutines = LoopThread(
                    "farcall-coroutines",
                    "a blocking call inside an async def callee would stop all of them: use "
                    "'await rpc_async(...)' (or 'await future') instead of rpc_sync, wait or to_here",
                )
                isolate_tasks(self._coroutines.loop)
            return self._coroutines.loop

    def stop(self) -> None:
        """Cancel running coroutines, and start no more."""
        with self._lock:
            self._stopped = True
            coroutines, self._coroutines = self._coroutines, None
        if coroutines is not None:
            coroutines.stop()


def _give(arguments: tuple[Answer, Any, BaseException | None]) -> None:
    answer, value, error = arguments
    answer(value, error)


def _raised_in(error: BaseException) -> str:
    """Return the user's function that raised an error first; "a call" if none was reached."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename.startswith(OURS):
            trace = trace.tb_next
            continue
        return code.co_qualname
    return "a call"
