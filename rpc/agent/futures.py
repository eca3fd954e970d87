"""The futures of calls.

When a reply arrives, it is only stored (see ``calls``). If a thread waits for it, that thread is woken,
decodes it and completes the future, without a further hand-over; otherwise an executor thread does so. Both
may try: the second waits until the first has decoded. If a signal handler interrupts the first, an executor
thread takes over.
"""

from __future__ import annotations

import asyncio
import contextlib
import decimal
import functools
import itertools
import logging
import threading
from _thread import LockType, allocate_lock
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError
from contextvars import Context, copy_context
from time import monotonic
from typing import Any, Final, NoReturn, TypeVar, cast

import torch

from rpc.agent.border import Arrival
from rpc.agent.calls import PendingCall, name_of
from rpc.errors import NotInitializedError, RpcTimeoutError
from rpc.group.peer import Peer
from rpc.runtime.blocking import INFINITE, check_may_block, wait_for
from rpc.runtime.current import is_initialized
from rpc.runtime.interrupts import interruptible, is_interruption, protected
from rpc.runtime.iterating import waiter
from rpc.runtime.modes import with_default_modes
from rpc.runtime.torch_internals import BaseFuture
from rpc.serialization.exception_state import to_keep, twin
from rpc.serialization.failures import text_of
from rpc.serialization.kept_errors import without_frames

__all__ = ["Future"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
S = TypeVar("S")
F = TypeVar("F", bound="torch.futures.Future[Any]")

# PyTorch's methods in Python only call these.
_construct = BaseFuture.__init__
_is_done = BaseFuture.done
_set_result = BaseFuture.set_result
_value_of = BaseFuture.wait
_call_when_done = BaseFuture.add_done_callback


class _ThreadState(threading.local):
    interruption: BaseException | None = None
    """The exception of a signal handler in a callback on this thread, which PyTorch would only print."""


_thread_state: Final = _ThreadState()


class Future(torch.futures.Future[T]):
    """A ``torch.futures.Future`` that signal handlers interrupt and that can be awaited.

    ``rpc_async`` returns one, and so does its ``then``. All of PyTorch's methods work, from any thread.

    Example::

        future = rpc.rpc_async("worker1", torch.add, args=(x, y))
        total = future.wait()           # on a thread; or future.result(timeout=5)
        total = await future            # in a coroutine, on any asyncio loop
    """

    __slots__ = ("_arrival", "_asked", "_call", "_claim", "_devices", "_ending", "_kept")

    _arrival: Arrival | None
    """Its value, if work may go on after it has arrived."""
    _asked: tuple[object, Peer] | None
    _call: PendingCall | None
    _claim: LockType
    _ending: tuple[Any, BaseException | None] | None
    _kept: tuple[Any, BaseException | None] | None
    """The value that its call has completed it with, and None."""

    def __init__(self, *, devices: list[int | str | torch.device] | None = None) -> None:
        super().__init__(devices=devices)
        self._asked = self._call = self._arrival = self._kept = None
        self._devices: list[int | str | torch.device] | None = devices

    @classmethod
    def for_call(cls, call: PendingCall) -> Future[Any]:
        """Make the future of a call, which the loop ends at its deadline."""
        future = cls.to_complete(call)
        if call.awaited.outcome is not None:
            call.table.complete_soon(future)
        call.table.watch(call)
        return future

    @classmethod
    def to_complete(cls, call: PendingCall) -> Future[Any]:
        """As ``for_call``, for a caller that completes it if the call has ended by now."""
        future: Future[Any] = cls.__new__(cls)
        _construct(future, [])  # does what PyTorch's constructor does, at half the cost
        future._asked = call.what, call.peer
        future._call = call
        future._claim = allocate_lock()
        future._ending = future._devices = future._kept = None
        border = call.table.border
        future._arrival = border.arrival() if border.encloses else None
        call.future = future
        return future

    @classmethod
    def of_several(cls, futures: Sequence[torch.futures.Future[Any]]) -> Future[Any]:
        """Return a future whose value is a list of these futures, completed when all are. If one of them
        fails, it fails at once with the same error.
        """
        futures = tuple(futures)  # the caller's list may change meanwhile
        collected = _Collected(futures)
        arrivals = [each._arrival for each in futures if isinstance(each, Future)]
        collected._arrival = next((each.following() for each in arrivals if each is not None), None)
        left = itertools.count(len(futures) - 1, -1)

        @protected
        def complete(future: torch.futures.Future[Any]) -> None:
            try:
                _value_of(future)
            except BaseException as error:
                collected._parts = ()
                _end(collected, None, to_keep(error))
            else:
                if next(left) == 0:
                    collected._parts = ()
                    _end(collected, list(futures), None)

        for each in futures:
            _call_when_done(each, complete)
        return collected

    @protected
    def complete(self, _: object = None) -> None:
        """Decode the reply, which has arrived, and complete the future, unless another thread has."""
        call = self._call
        if call is None:
            return
        if self._arrival is None:
            self._complete(call.result)
        else:
            self._arrival.complete(self._complete, call.result)

    @protected
    def _complete(self, decode: Callable[[], Any]) -> None:
        interruption: BaseException | None = None
        while (ending := self._ending) is None:
            if not self._claim.acquire(blocking=False):
                _until_free(self._claim)  # another thread is decoding
                continue
            try:
                self._ending = decode(), None
            except BaseException as error:
                if is_interruption(error):
                    interruption = error
                self._ending = None, without_frames(error, copy=twin)
            self._claim.release()
        if _end(self, *ending):
            self._kept = ending
        self._call = None
        if interruption is not None:
            raise interruption

    def wait(self, timeout: float | None = None) -> T:
        """Block until the future is completed.

        Args:
            timeout: timeout in seconds; default: only the call's own. The call continues when it has expired,
                and the future can be waited for again.

        Returns:
            Its value.

        Raises:
            Exception: the error that it was completed with, or what a signal handler raises meanwhile.
            RpcTimeoutError: the timeout has expired.
            BlockingCallError: called inside an ``async def`` callee, where it must be awaited instead.
        """
        if not _is_done(self):
            check_may_block()
            if self._call is not None and timeout is None:
                self._wait_for(self._call)
            if not _is_done(self):  # it does not belong to a call, or another thread is about to complete it
                done = allocate_lock()
                done.acquire()
                _call_when_done(self, functools.partial(_release, done))
                if not wait_for(done, INFINITE if timeout is None else monotonic() + timeout):
                    raise RpcTimeoutError(f"{self!r} was not completed within {timeout:g} s; it goes on")
        if self._arrival is not None:
            self._arrival.join()
        elif self._kept is not None:
            # PyTorch's method releases the GIL, which the thread that completes the next future would take.
            kept: T = self._kept[0]
            return kept
        return cast("T", _value_of(self))

    def value(self) -> T:
        """Return the value of a completed future; raises its error."""
        if self._arrival is not None:
            self._arrival.join()
        return super().value()

    def set_exception(self, result: BaseException) -> None:  # type: ignore[override]  # as PyTorch means it
        """Complete it with an exception; waiting threads raise a copy. Its traceback becomes a note."""
        if isinstance(result, Exception):
            self._set_unwrap_func(_raise_twin)
            self.set_result(cast("T", to_keep(result)))
        else:
            super().set_exception(result)  # type: ignore[arg-type]  # PyTorch's own error

    def result(self, timeout: float | None = None) -> T:
        """Like ``wait``, under the name that ``concurrent.futures`` uses."""
        return self.wait(timeout)

    @protected
    def cancel(self) -> bool:
        """Cancel the call, and notify its callee. Does not wait.

        An ``async def`` callee is cancelled: ``asyncio.CancelledError`` is raised where it awaits. A call
        that has not begun is dropped. A function that is already running continues, as a thread cannot be
        stopped, and its value is dropped.

        Threads and coroutines that wait for the future get ``concurrent.futures.CancelledError`` at once.
        Callbacks run on the thread that cancels.

        A task that is cancelled while it awaits the future cancels the call, too, as with futures of asyncio;
        ``asyncio.shield(future)`` prevents that. If it awaits a future of ``collect_all``, all of its calls
        are cancelled, as with ``asyncio.gather``. If it awaits a future of ``then``, the call goes on, since
        others may use its value.

        Returns:
            True if the call was cancelled. False if it had ended before, and for a future that does not
            belong to a call, such as that of ``then``.

        Example::

            future = rpc.rpc_async("worker1", search, args=(query,))
            if not future.cancel():
                print(future.result())
        """
        call = self._call
        if call is None or not call.table.cancel(call):
            return False
        self._complete_here()
        return True

    @protected
    def _give_up(self) -> None:
        """Cancel the call because the task that awaits it has been cancelled; callbacks run on another
        thread.
        """
        call = self._call
        if call is not None and call.table.cancel(call):
            call.table.complete_soon(self)

    def __repr__(self) -> str:
        call, asked = self._call, self._asked
        if _is_done(self):
            try:
                _value_of(self)
            except CancelledError:
                state = "cancelled"
            except Exception as error:
                state = f"failed with {type(error).__name__}"
            else:
                state = "completed"
        elif call is not None and call.timeout:
            state = f"under way, for {monotonic() - call.deadline + call.timeout:.1f} s"
        else:
            state = "under way"
        of = "" if asked is None else f" of {name_of(asked[0])} on worker '{asked[1].name}'"
        return f"<Future{of}, {state}>"

    @protected
    def _wait_for(self, call: PendingCall) -> None:
        try:
            call.wait()
            self._complete_here()
        except BaseException:
            if call.done():
                call.table.complete_soon(self)
            raise

    def _complete_here(self) -> None:
        """Complete it on a thread that raises what signal handlers raise, also in a callback."""
        try:
            self.complete()
        except BaseException:
            _thread_state.interruption = None  # that one is raised for both
            raise
        _raise_interruption()

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """Return a future of the result of ``callback``, which is called with this future once it is
        completed.

        The callback runs on the thread that completes the future: one that waits, or cancels, or an
        executor's, never the agent's loop, so it may make blocking calls. It sees the context variables of
        the thread that calls ``then``; calls that it makes belong to the same distributed autograd context.
        On any thread, it has PyTorch's default modes: gradients are enabled, autocast is disabled. Changes of
        modes that it leaves are undone after it.
        """
        if not callable(callback):
            super().then(callback)  # type: ignore[unreachable]  # PyTorch's own error
        continuation = _Continuation(self, callback)
        _call_when_done(self, continuation)
        _raise_interruption()  # of the callback, if it has run here
        return cast("Future[S]", continuation.future)

    def add_done_callback(self, callback: Callable[[Future[T]], None]) -> None:
        """Have ``callback`` called with this future once it is completed, on a thread, with context variables
        and modes as for ``then``.

        Its exceptions are printed; what a signal handler raises in it is raised in the waiting thread.
        """
        if not callable(callback):
            super().add_done_callback(callback)  # type: ignore[unreachable]  # PyTorch's own error
        _call_when_done(self, functools.partial(_called_back, _own_context(), self, callback))
        _raise_interruption()

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            completed, wake = waiter()
            _call_when_done(self, wake)
            try:
                yield from completed
            except asyncio.CancelledError:
                self._give_up()
                raise
        if self._arrival is not None:
            self._arrival.join()
        return cast("T", _value_of(self))


class _Collected(Future[Any]):
    """The future of several, which a task that awaits it gives up together."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[torch.futures.Future[Any]]) -> None:
        super().__init__()
        self._parts = parts

    def _give_up(self) -> None:
        for each in self._parts:
            if isinstance(each, Future):
                each._give_up()


class _Continuation:
    """The continuation that ``then`` has added to a future: it completes the next one."""

    __slots__ = ("_callback", "_context", "_source", "future")

    def __init__(self, source: Future[Any], callback: Callable[[Any], Any]) -> None:
        self.future: Future[Any] = Future(devices=source._devices)
        self.future._arrival = None if source._arrival is None else source._arrival.following()
        self._source: Future[Any] | None = source
        self._callback = callback
        self._context = _own_context()

    @protected
    def __call__(self, _: object) -> None:
        try:
            _end(self.future, self._run(), None)
        except BaseException as error:
            interrupts = is_interruption(error)
            if isinstance(error, Exception) and not interrupts:
                self._tell_of(error)
            if not _is_done(self.future):
                without_frames(error, copy=twin)
                _fail(self.future, RuntimeError(f"{type(error).__name__}: {text_of(error)}"), error)
            if interrupts:
                _thread_state.interruption = error
        self._source = None  # the source refers to this object

    def _tell_of(self, error: Exception) -> None:
        """Log an error of the callback itself: the future that ``then`` returns is often ignored."""
        try:
            _value_of(cast("Future[Any]", self._source))
        except Exception:
            return  # its input has failed, and its caller is notified of that
        if isinstance(error, NotInitializedError) and not is_initialized():
            return  # because this worker has ended, for example by KeyboardInterrupt
        callback = self._callback
        name = getattr(callback, "__qualname__", type(callback).__qualname__)
        logger.warning("%s, given to then(), raised %s", name, type(error).__name__, exc_info=error)

    def _run(self) -> Any:
        run, source = self._context.run, cast("Future[Any]", self._source)
        if source._arrival is None:
            return with_default_modes(run, self._callback, source)
        compute = functools.partial(with_default_modes, run, self._callback, source)
        # A call that is made again may have got its arrival since this was added.
        following = self.future._arrival = source._arrival.following()
        return source._arrival.go_on(compute, following)


def _own_context() -> Context:
    """Return a copy of the current context, for a callback. A decimal context is mutable, so it is copied."""
    context = copy_context()
    context.run(lambda: decimal.setcontext(decimal.getcontext().copy()))
    return context


@protected
def _called_back(
    context: Context, source: Future[Any], callback: Callable[[Any], object], future: object
) -> None:
    try:
        if source._arrival is None:
            with_default_modes(context.run, callback, future)
        else:
            source._arrival.call_back(functools.partial(with_default_modes, context.run, callback, source))
    except BaseException as error:
        if not is_interruption(error):
            raise
        _thread_state.interruption = error


def _raise_interruption() -> None:
    interruption, _thread_state.interruption = _thread_state.interruption, None
    if interruption is not None:
        raise interruption


@protected
def _release(lock: LockType, _: object) -> None:
    lock.release()


@interruptible
def _until_free(lock: LockType) -> None:
    with lock:
        pass


@interruptible
def _end(future: torch.futures.Future[Any], value: Any, error: BaseException | None) -> bool:
    """Complete a future, which runs its callbacks, unless another thread has just done so. Returns whether
    this has completed it with the value.
    """
    try:
        if error is None:
            _set_result(future, value)
            return True
        _fail(future, error)
    except Exception as refusal:
        if is_interruption(refusal):
            raise
        if not future.done():  # PyTorch does not accept this value
            with contextlib.suppress(RuntimeError):
                _fail(future, refusal)
    return False


def _raise_twin(error: Exception) -> NoReturn:
    """Raise a copy of a future's error: with its traceback, a raised error refers to the frames of the
    waiting thread, which usually refer to the future, and the garbage collector cannot inspect futures.
    """
    raise twin(error)


def _fail(
    future: torch.futures.Future[Any], error: BaseException, cause: BaseException | None = None
) -> None:
    if cause is not None:
        error.__cause__ = cause
    if not isinstance(error, Exception):
        # PyTorch's futures accept only Exceptions; and this thread was not interrupted and does not end.
        wrapped = RuntimeError(f"{type(error).__name__}: {text_of(error)}")
        wrapped.__cause__ = error
        error = wrapped
    future.set_exception(error)
