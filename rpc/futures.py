"""The caller's end of a call: waiting for the reply, decoding it, and the future that users hold.

When a reply arrives, the loop only stores it. If a thread waits for it, that thread is woken, decodes it and
completes the future, at no cost of a further hand-over; where nobody waits, an executor thread does it.
Both may try: the second waits for the first to have decoded. A waiting thread waits on a lock of its own,
which Ctrl-C interrupts; what it was about to do is then done by an executor thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from _thread import LockType, allocate_lock
from collections.abc import Callable, Generator, Iterator
from contextvars import copy_context
from time import monotonic
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final, Protocol, TypeVar, cast

import torch

from rpc.errors import BlockingCallError, RpcTimeoutError, WorkerLostError
from rpc.peer import Peer
from rpc.serialization import brings
from rpc.transport.reading import DirectReading
from rpc.transport.role import Turn
from rpc.wire import Frame

__all__ = [
    "INFINITE",
    "Future",
    "PendingCall",
    "check_may_block",
    "collected_futures",
    "forbid_blocking",
    "wait_all",
    "wait_for",
    "wait_for_event",
]

T = TypeVar("T")
S = TypeVar("S")

_NAMED_CALLABLES: Final = (FunctionType, BuiltinFunctionType, MethodType, type)

INFINITE: Final = float("inf")
_SLICE_SECONDS: Final = 0.5


_NO_DEVICES: Final[list[torch.device]] = []
# PyTorch's methods in Python only call these.
_construct = torch._C.Future.__init__
_is_done = torch._C.Future.done
_set_result = torch._C.Future.set_result
_value_of = torch._C.Future.wait


class _ThreadState(threading.local):
    forbidden: str | None = None
    interruption: KeyboardInterrupt | None = None


_thread_state: Final = _ThreadState()

collected_futures: Final = threading.local()
"""Inside ``wait_all``, its attribute ``future_list`` holds this thread's futures so far."""


def forbid_blocking(why: str) -> None:
    """Make every blocking wait on the current thread raise ``BlockingCallError``, saying ``why``."""
    _thread_state.forbidden = why


def check_may_block() -> None:
    """Raise ``BlockingCallError`` on a thread that must not block."""
    why = _thread_state.forbidden
    if why is not None:
        raise BlockingCallError(why)


def wait_for(lock: LockType, deadline: float = INFINITE) -> bool:
    """Acquire a lock that another thread releases. Ctrl-C interrupts.

    A signal that arrives after Python last looked and before the system call would not end the wait, so it
    is made in slices.

    Args:
        deadline: on the monotonic clock.

    Returns:
        False if the deadline has passed.
    """
    while not lock.acquire(timeout=min(_SLICE_SECONDS, max(0.0, deadline - monotonic()))):
        if monotonic() >= deadline:
            return False
    return True


def wait_for_event(event: threading.Event, deadline: float = INFINITE) -> bool:
    """As ``wait_for``, for an event."""
    while not event.wait(min(_SLICE_SECONDS, max(0.0, deadline - monotonic()))):
        if monotonic() >= deadline:
            return False
    return True


class CallOwner(Protocol):
    """What a pending call needs from its agent."""

    def decode(self, call: PendingCall, frame: Frame) -> Any:
        """The value in a reply; raises what a failure carries."""

    def answered(self, call: PendingCall) -> None:
        """The thread that waits for this call has received the reply itself."""

    def complete_soon(self, future: Future[Any]) -> None:
        """Have an executor thread call ``future.complete()``."""

    def expire(self, call: PendingCall) -> BaseException | None:
        """Give a call up because its time is over; None if its reply has just arrived."""


class PendingCall:
    """One call under way. ``settle`` is called once, by the loop or by whoever gives the call up.

    Attributes:
        call_id: names the call on the wire.
        peer: whom it was sent to.
        what: what was asked, for error messages.
        timeout: seconds that it may take, 0 for no limit.
        deadline: the same on the monotonic clock, infinite for no limit.
        arrivals: what travelled beside the reply's pickle, adopted when it arrived.
        future: the user's future, if there is one.
        turn: at reading the connection, which the thread that will wait has claimed.
        watched: the loop ends it when its deadline passes; else the thread that waits does.
    """

    keeps_place = False
    """Whether a call stays in the table of calls when its time is over."""

    # What most calls never set; a call is made for every message, so its making is kept short.
    arrivals: Any = None
    future: Future[Any] | None = None
    outcome: Frame | BaseException | None = None
    watched = False
    turn: Turn | None = None

    def __init__(self, owner: CallOwner, call_id: int, peer: Peer, what: object, timeout: float) -> None:
        self.owner = owner
        self.call_id = call_id
        self.peer = peer
        self.what = what
        self.timeout = timeout
        self.deadline = monotonic() + timeout if timeout else INFINITE
        self._waiters: list[LockType | DirectReading] = []

    @property
    def asked(self) -> str:
        """What was asked, for people; made without running code of the user's, such as a ``__repr__``."""
        what = self.what
        if isinstance(what, str):
            return what
        named = what if isinstance(what, _NAMED_CALLABLES) else type(what)
        return str(named.__qualname__)

    def timeout_error(self) -> RpcTimeoutError:
        """The error of this call when its time is over."""
        return RpcTimeoutError(
            f"RPC ran for more than its timeout of {self.timeout * 1000:.0f} ms: {self.asked} on worker "
            f"'{self.peer.name}' has not answered. Pass a larger timeout= (0 for none), or set_rpc_timeout()."
        )

    def lost_error(self) -> WorkerLostError:
        """The error of this call when its callee is gone."""
        return self.peer.lost_error(f"{self.asked} was not answered")

    def expired(self) -> bool:
        """The time is over: settle the call, and return what ``settle`` does."""
        return self.settle(self.timeout_error())

    def settle(self, outcome: Frame | BaseException) -> bool:
        """Store how the call ended and wake who waits.

        Returns:
            Whether nobody waits, so that the future, if there is one, must be completed by others.
        """
        self.outcome = outcome
        waiters = self._waiters
        if not waiters:
            return True
        for waiter in waiters.copy():
            waiter.release()
        return False

    def abandon(self, error: BaseException) -> None:
        """End the call in a forked child, where no lock may be taken."""
        PendingCall.settle(self, error)

    def takes(self, header: dict[str, Any]) -> bool:
        """Whether the waiting thread may take a reply with this header: nothing in it needs the loop."""
        return not brings(header)

    def settled(self) -> bool:
        """Whether the call has ended."""
        return self.outcome is not None

    def wait_settled(self) -> None:
        """Block until the call has ended. Raises ``KeyboardInterrupt`` at once on Ctrl-C."""
        if self.outcome is not None and self.turn is None:
            return
        check_may_block()
        self.peer.flush()
        if self._read_reply():
            return
        lock = allocate_lock()
        lock.acquire()
        try:
            self._waiters.append(lock)
            if self.settled():
                return
            if not wait_for(lock, INFINITE if self.watched else self.deadline):
                error = self.owner.expire(self)
                if error is not None:
                    self.outcome = error
                else:
                    wait_for(lock)
        except BaseException:
            if lock in self._waiters:
                self._waiters.remove(lock)
            if self.future is None:
                self.owner.expire(self)
            raise

    def _read_reply(self) -> bool:
        """Receive the reply on this thread, if the connection is free; returns whether it has ended."""
        connection = self.peer.connection
        direct = None if connection is None else connection.direct
        if direct is None or self.keeps_place:
            return False
        waiters = self._waiters
        try:
            waiters.append(direct)
            direct.read_reply(self, self.deadline, self.turn)
            waiters.remove(direct)
            if self.outcome is None:
                return False
            self.owner.answered(self)
            return True
        except BaseException:
            if direct in waiters:
                waiters.remove(direct)
            if self.outcome is not None:
                self.owner.answered(self)
            elif self.future is None:
                self.owner.expire(self)
            raise

    def result(self) -> Any:
        """Wait, decode, and return the value or raise: for callers that need no future."""
        self.wait_settled()
        self.what = None  # a function of the user's, perhaps, which must not die with the loop's last look
        outcome = self.outcome
        if isinstance(outcome, BaseException):
            raise outcome
        assert outcome is not None
        return self.owner.decode(self, outcome)


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
