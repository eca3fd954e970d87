"""The future of a call that users hold, and waiting for many of them.

When a reply arrives, the loop only stores it (see ``pending``). If a thread waits for it, that thread is
woken, decodes it and completes the future, at no cost of a further hand-over; where nobody waits, an executor
thread does it. Both may try: the second waits for the first to have decoded. What a waiting thread was about
to do when Ctrl-C hit it is then done by an executor thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from _thread import LockType, allocate_lock
from collections.abc import Callable, Generator, Iterator
from contextvars import copy_context
from typing import Any, Final, TypeVar, cast

import torch

from rpc.agent.pending_call import PendingCall
from rpc.runtime.blocking import check_may_block, wait_for, wait_for_event

__all__ = ["Future", "collected_futures", "wait_all", "wait_futures"]

T = TypeVar("T")
S = TypeVar("S")

_NO_DEVICES: Final[list[torch.device]] = []
# PyTorch's methods in Python only call these.
_construct = torch._C.Future.__init__
_is_done = torch._C.Future.done
_set_result = torch._C.Future.set_result
_value_of = torch._C.Future.wait


class _ThreadState(threading.local):
    interruption: KeyboardInterrupt | None = None


_thread_state: Final = _ThreadState()

collected_futures: Final = threading.local()
"""Inside ``wait_all``, its attribute ``future_list`` holds this thread's futures so far."""


class Future(torch.futures.Future[T]):
    """A ``torch.futures.Future`` that Ctrl-C interrupts and that can be awaited.

    ``rpc_async`` returns one, and so does its ``then``. All of PyTorch's methods work, from any thread.

    Example::

        future = rpc.rpc_async("worker1", torch.add, args=(x, y))
        total = future.wait()           # on a thread
        total = await future            # in a coroutine, on any asyncio loop
    """

    __slots__ = ("_call", "_claim", "_ending", "_following")

    _call: PendingCall | None
    _claim: LockType | None
    _ending: tuple[Any, BaseException | None] | None
    _following: list[_Continuation] | None

    def __init__(self, *, devices: list[int | str | torch.device] | None = None) -> None:
        super().__init__(devices=devices)
        self._call = self._claim = self._ending = self._following = None

    @classmethod
    def for_call(cls, call: PendingCall) -> Future[Any]:
        """The future of a call."""
        future: Future[Any] = cls.__new__(cls)
        _construct(future, _NO_DEVICES)  # what PyTorch's constructor does, at half the cost
        future._call = call
        future._claim = allocate_lock()
        future._ending = future._following = None
        call.future = future
        if call.outcome is not None:
            call.owner.complete_soon(future)
        return future

    def complete(self, _: object = None) -> None:
        """Decode the reply, which has arrived, and complete the future, unless somebody else has.

        Every step is safe to repeat, since Ctrl-C may come between any two of them.
        """
        call, claim = self._call, self._claim
        if call is None or claim is None:
            return
        interruption: KeyboardInterrupt | None = None
        with claim:
            ending = self._ending
            if ending is None:
                ending = self._ending = _decoded(call)
                if isinstance(ending[1], KeyboardInterrupt):
                    interruption = ending[1]
        _end(self, *ending)
        self._call = None
        if self._following:
            self._follow()
        if interruption is not None:
            raise interruption

    def wait(self) -> T:
        """Block until the future is completed.

        Returns:
            Its value.

        Raises:
            The error that it was completed with; ``KeyboardInterrupt`` at once on Ctrl-C;
            ``BlockingCallError`` inside an ``async def`` callee, where it must be awaited instead.
        """
        if not _is_done(self):
            check_may_block()
            call = self._call
            if call is not None:
                try:
                    call.wait_settled()
                    self.complete()
                except BaseException:
                    if call.settled():
                        call.owner.complete_soon(self)
                    raise
                _raise_interruption()
            elif self._claim is None:
                done = threading.Lock()
                done.acquire()
                self.add_done_callback(lambda _: done.release())
                if not _is_done(self):  # else Ctrl-C may have come in the callback, where it has no effect
                    wait_for(done)
        return cast("T", _value_of(self))

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> Future[S]:
        """A future of what ``callback`` returns, given this future once it is completed.

        The callback runs on the thread that completes the future: a waiting one or an executor's, never
        the agent's loop, so it may make blocking calls. It sees the context variables of the thread that
        calls ``then``; calls that it makes belong to the same distributed autograd context.
        """
        if not callable(callback):
            super().then(callback)  # type: ignore[unreachable]  # PyTorch's own error
        continuation = _Continuation(self, callback)
        if self._following is None:
            self._following = []
        self._following.append(continuation)
        self.add_done_callback(continuation)
        if _is_done(self):
            self._follow()
        return cast("Future[S]", continuation.future)

    def _follow(self) -> None:
        """Run what ``then`` has added, unless PyTorch has: see ``_Continuation``."""
        for continuation in self._following or ():
            continuation(self)

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            loop = asyncio.get_running_loop()
            waiter: asyncio.Future[None] = loop.create_future()

            def completed() -> None:
                if not waiter.done():
                    waiter.set_result(None)

            def wake(_: object) -> None:
                with contextlib.suppress(RuntimeError):  # that loop has ended: nobody waits any more
                    loop.call_soon_threadsafe(completed)

            self.add_done_callback(wake)
            yield from waiter
        return cast("T", _value_of(self))


class _Continuation:
    """What ``then`` has added to a future: it completes the next one. It runs once, however often called.

    PyTorch calls it, and only prints what is raised before its first line, where a thread that waited for
    the interpreter notices Ctrl-C. So whoever completes the future, or finds it completed, calls it again.
    """

    __slots__ = ("_due", "_source", "future")

    def __init__(self, source: Future[Any], callback: Callable[[Any], Any]) -> None:
        self.future: Future[Any] = Future()
        self._source: Future[Any] | None = source
        context = copy_context()
        self._due: list[Callable[[Any], Any]] = [lambda source: context.run(callback, source)]

    def __call__(self, _: object) -> None:
        try:
            callback = self._due.pop()
        except IndexError:
            return
        try:
            _end(self.future, callback(self._source), None)
        except BaseException as error:
            if not _is_done(self.future):
                _fail(self.future, RuntimeError(f"{type(error).__name__}: {error}"), error)
            if isinstance(error, KeyboardInterrupt):
                _thread_state.interruption = error  # raised here, it would only be printed
        self._source = None  # which refers to this object
        self.future._follow()


def _raise_interruption() -> None:
    """Raise the Ctrl-C that hit a callback on this thread."""
    interruption = _thread_state.interruption
    if interruption is not None:
        _thread_state.interruption = None
        raise interruption


def _decoded(call: PendingCall) -> tuple[Any, BaseException | None]:
    """How a settled call ended: a value or an error."""
    outcome = call.outcome
    assert outcome is not None
    call.what = None  # see ``PendingCall.result``
    if isinstance(outcome, BaseException):
        return None, outcome
    try:
        return call.owner.decode(call, outcome), None
    except BaseException as error:
        return None, error


def _end(future: torch.futures.Future[Any], value: Any, error: BaseException | None) -> None:
    """Complete a future, unless another thread has just done so."""
    try:
        if error is None:
            _set_result(future, value)
        else:
            _fail(future, error)
    except Exception as refusal:
        if not future.done():  # PyTorch does not take this value
            with contextlib.suppress(RuntimeError):
                _fail(future, refusal)


def _fail(
    future: torch.futures.Future[Any], error: BaseException, cause: BaseException | None = None
) -> None:
    if cause is not None:
        error.__cause__ = cause
    if not isinstance(error, Exception):
        # PyTorch's futures hold Exceptions only; and it is not this thread that was interrupted or ends.
        wrapped = RuntimeError(f"{type(error).__name__}: {error}")
        wrapped.__cause__ = error
        error = wrapped
    future.set_exception(error)


@contextlib.contextmanager
def wait_all() -> Iterator[None]:
    """Wait, on leaving the block, for all futures that ``rpc_async`` returned on this thread inside it.

    Raises:
        The error of the first future found to have failed, without waiting for the others.

    Example::

        with rpc.wait_all():
            for worker in workers:
                rpc.rpc_async(worker, evaluate)
    """
    futures: list[Future[Any]] = []
    outer = getattr(collected_futures, "future_list", None)
    collected_futures.future_list = futures
    try:
        yield
        wait_futures(futures)
    finally:
        if outer is None:
            del collected_futures.future_list
        else:
            collected_futures.future_list = outer


def wait_futures(futures: list[Any]) -> list[Any]:
    """Wait for all futures, or until one fails; Ctrl-C interrupts at once.

    Returns:
        Their values, in order.

    Raises:
        The error of the first one that is seen to fail.
    """
    changed = threading.Event()
    done: list[torch.futures.Future[Any]] = []

    def completed(future: torch.futures.Future[Any]) -> Callable[[object], None]:
        def note(_: object) -> None:
            done.append(future)
            changed.set()

        return note

    if any(not future.done() for future in futures):
        check_may_block()
    for future in futures:
        future.add_done_callback(completed(future))
    for index in range(len(futures)):
        while len(done) <= index:
            changed.clear()
            if len(done) <= index:
                wait_for_event(changed)
        done[index].value()
    return [cast("torch.futures.Future[Any]", future).value() for future in futures]
