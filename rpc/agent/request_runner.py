"""Runs requests of other workers, on executor threads; ``async def`` functions run as coroutines on a
separate loop. Each request is answered exactly once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from time import monotonic
from types import CoroutineType
from typing import Any, Final

import torch

from rpc.agent.activity import Activity
from rpc.agent.answer_sender import Answer, AnswerSender
from rpc.agent.received_requests import Request
from rpc.agent.tape import Observation, Tracing
from rpc.errors import NotInitializedError, RpcError, WorkerLostError, with_article
from rpc.functions import ASYNC_EXECUTION_MARK
from rpc.group.peer import PeerTable
from rpc.runtime.events import Events
from rpc.runtime.executor import Executor
from rpc.runtime.isolation import isolate_tasks
from rpc.runtime.loop import LoopThread
from rpc.runtime.torch_internals import BaseFuture
from rpc.serialization.exception_state import twin
from rpc.serialization.kept_errors import without_frames
from rpc.serialization.serializer import Serializer
from rpc.wire.frames import Kind

__all__ = ["LATER", "Call", "RequestRunner"]

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function and its arguments."""

LATER: Final = object()
"""Returned by ``RequestRunner.start`` if the answer is given later."""

_QUICK_BYTES: Final = 1 << 20
"""Number of bytes that are copied in the time of a few hand-overs between threads."""

_FEW: Final = 16
"""Number of tasks that wait for a thread above which answers are sent together."""

_WITHOUT_DESTRUCTOR: Final = frozenset((type(None), bool, int, float, str, bytes, torch.Tensor))
"""Exact types whose values are destroyed without running user code, unless attached to a tensor."""


class RequestRunner:
    """Runs requests, on executor threads.

    Args:
        peers: the workers; has this worker's name, for messages.
        executor: its threads run the requests, and serialize what coroutines return.
        activity: counts the requests that are answered later.
        answers: answers them.
    """

    def __init__(
        self,
        peers: PeerTable,
        serializer: Serializer,
        tracing: Tracing,
        events: Events,
        executor: Executor,
        activity: Activity,
        answers: AnswerSender,
    ) -> None:
        self._peers = peers
        self._serializer = serializer
        self._tracing = tracing
        self._events = events
        self._executor = executor
        self._activity = activity
        self._answers = answers
        self._lock = threading.Lock()
        self._coroutines: LoopThread | None = None
        self._stopped = False

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
                    without_frames(error, drops_handled=True)  # a future of PyTorch keeps the error itself
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
