"""Calls that are made again when their callee is lost: the argument ``retries`` of ``rpc_sync`` and
``rpc_async``.

Only losses count: ``WorkerLostError`` of the callee itself, and ``MessageLostError``. Errors that the
function raises, and timeouts, end the call. In a static group, a lost worker does not come back, so only lost
messages are sent again. In a dynamic group, the call waits until a worker has joined under the callee's name.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextvars import copy_context
from functools import partial
from time import monotonic
from typing import Any, Final

import torch

from rpc.agent.agent import Agent
from rpc.agent.calls import name_of
from rpc.agent.futures import Future
from rpc.agent.interface import AgentInterface
from rpc.errors import MessageLostError, NotInitializedError, UnknownWorkerError, WorkerLostError
from rpc.group.membership import WorkerReference
from rpc.group.peer import Peer
from rpc.options import UNSET_TIMEOUT
from rpc.runtime import waits
from rpc.runtime.blocking import check_may_block
from rpc.runtime.interrupts import interruptible, protected
from rpc.runtime.legible import legible
from rpc.serialization.exception_state import twin
from rpc.serialization.kept_errors import without_frames

__all__ = [
    "Returns",
    "call",
    "call_async",
    "check_retries",
    "limit_of",
    "loss_of",
    "returns_of",
    "why_gone",
]

logger = logging.getLogger(__name__)

_RETURNS: Final = "returns"
"""Key of the ``Returns`` in an agent's extensions."""

_making: Final = threading.RLock()


class _Wait:
    """A wait for a worker. ``end`` calls the callback, once; ``drop`` releases it without a call."""

    __slots__ = ("_callbacks",)

    def __init__(self, callback: Callable[[bool], object]) -> None:
        self._callbacks = [callback]

    def end(self, is_back: bool) -> None:
        try:
            callback = self._callbacks.pop()  # atomic: the time may be over on another thread
        except IndexError:
            return
        callback(is_back)

    def drop(self) -> None:
        self._callbacks.clear()


class Returns:
    """Notifies of workers that come back to a dynamic group under their names. From any thread.

    Args:
        agent: an agent that has joined its group.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.RLock()  # reentrant: a finalizer may end a wait
        self._waiting: dict[str, list[_Wait]] = {}
        agent.lifecycle.hooks.joined.append(self._joined)
        agent.lifecycle.hooks.closed.append(self._closed)

    @protected
    def when_back(
        self, name: str, callback: Callable[[bool], object], seconds: float = 0
    ) -> Callable[[], None]:
        """Have ``callback(is_back)`` called once, on an executor thread: when a worker with this name is in
        the group, which may be at once, or when the time is over. If this worker leaves first, it is called
        on the thread that leaves.

        Args:
            callback: its argument is False if the time is over, or this worker has left.
            seconds: maximum time to wait; 0 for no limit.

        Returns:
            A function that ends the wait without a call.
        """
        wait = _Wait(callback)
        with self._lock:
            self._waiting.setdefault(name, []).append(wait)
        if self._agent.closed:
            self._closed()
        elif why_gone(self._agent, name) is None:
            self._run_soon(self._back, name)
        elif seconds:
            expire = partial(self._run_soon, self._over, (name, wait))
            self._agent.mailbox.later(seconds, expire)
        return partial(self._drop, name, wait)

    def _joined(self, peer: Peer) -> None:
        if peer.name in self._waiting:
            self._run_soon(self._back, peer.name)

    def _run_soon(self, function: Callable[[Any], object], argument: Any) -> None:
        # If the executor ends before this has run, ``_closed`` finds the wait.
        self._agent.executor.submit((function, argument))

    def _back(self, name: str) -> None:
        for wait in self._take_all(name):
            wait.end(True)

    def _over(self, which: tuple[str, _Wait]) -> None:
        self._take(*which)
        which[1].end(False)

    def _closed(self) -> None:
        for name in list(self._waiting):
            for wait in self._take_all(name):
                wait.end(False)

    @protected
    def _take_all(self, name: str) -> list[_Wait]:
        with self._lock:
            return self._waiting.pop(name, [])

    @protected
    def _drop(self, name: str, wait: _Wait) -> None:
        self._take(name, wait)
        wait.drop()  # its timer refers to it until the time is over

    @protected
    def _take(self, name: str, wait: _Wait) -> None:
        with self._lock:
            left = [each for each in self._waiting.pop(name, ()) if each is not wait]
            if left:
                self._waiting[name] = left


def returns_of(agent: AgentInterface) -> Returns | None:
    """Return the ``Returns`` of an agent; None if its workers cannot come back: in a static group, and when
    this worker is leaving.
    """
    if not isinstance(agent, Agent) or agent.is_static_group or agent.closed:
        return None
    with _making:
        found: Returns | None = agent.extensions.get(_RETURNS)
        if found is None:
            found = agent.extensions[_RETURNS] = Returns(agent)
        return found


def loss_of(agent: AgentInterface, name: str) -> Callable[[BaseException], bool]:
    """Return a function that says, of the error of a call that is made next, whether the callee or a message
    was lost. Otherwise the function that was called has raised it, or the call was not made.
    """
    peer = agent.group.peers.find(name) if isinstance(agent, Agent) else None
    own = agent.get_worker_info().name

    def is_loss(error: BaseException) -> bool:
        if isinstance(error, MessageLostError):
            return error.worker in (name, own)  # the call, or its answer, which was for this worker
        if not isinstance(error, WorkerLostError) or error.worker != name:
            return False
        return peer is None or peer.lost is not None

    return is_loss


def why_gone(agent: AgentInterface, name: str) -> str | None:
    """Return why a worker is gone, as far as this one knows; None if it is in the group."""
    if not isinstance(agent, Agent):
        return None
    try:
        return agent.group.peers.find(name).lost
    except UnknownWorkerError as error:  # it has left so long ago that it is forgotten
        return str(error)


def limit_of(agent: AgentInterface, timeout: float) -> float:
    """Return the limit in seconds that a timeout sets; 0 for none, and for values that calls refuse."""
    try:
        seconds = float(agent.rpc_timeout if timeout == UNSET_TIMEOUT else timeout)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):  # the last: of tensors
        return 0.0
    return seconds if 0 < seconds <= threading.TIMEOUT_MAX else 0.0


def check_retries(retries: int) -> int:
    """Return ``retries``; ``ValueError`` if it is not a number of retries."""
    if type(retries) is not int or retries < 0:
        raise ValueError(f"retries is how often a call may be made again, at least 0, not {retries!r:.60}")
    return retries


def call(
    agent: AgentInterface,
    to: WorkerReference,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float,
    retries: int,
) -> Any:
    """Call a function, wait, and return its value or raise its error; see ``rpc.rpc_sync``. If a signal
    handler interrupts it, the call is cancelled.
    """
    check_may_block()
    attempts = _Attempts(agent, to, function, args, kwargs, timeout, retries)
    attempts.how = "sync"
    future = attempts.begin()
    try:
        with waits.waiting("rpc_sync with retries", lambda: [attempts.name]):
            return future.wait()
    except BaseException:
        future.cancel()
        raise


def call_async(
    agent: AgentInterface,
    to: WorkerReference,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float,
    retries: int,
) -> Future[Any]:
    """Call a function and return a future of its value; see ``rpc.rpc_async``."""
    return _Attempts(agent, to, function, args, kwargs, timeout, retries).begin()


class _RetriedCall(Future[Any]):
    """The future of a call that may be made again."""

    __slots__ = ("_attempts",)

    _attempts: _Attempts

    def cancel(self) -> bool:
        return self._attempts.cancel()

    def _give_up(self) -> None:
        self._attempts.give_up()

    @interruptible  # it runs callbacks
    def end(self, value: Any, error: BaseException | None) -> None:
        """Complete it with the outcome of its last attempt."""
        if error is None:
            self.set_result(value)
        else:
            self.set_exception(without_frames(error, copy=twin))


class _Attempts:
    """The attempts of one call. From any thread.

    Attributes:
        name: name of the callee.
        how: as the program has called it; see ``CallBegun``.
    """

    how = "async"

    def __init__(
        self,
        agent: AgentInterface,
        to: WorkerReference,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
        retries: int,
    ) -> None:
        self._left = check_retries(retries)
        self.name = agent.get_worker_info(to).name
        self._agent = agent
        self._call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None
        self._call = function, args, kwargs
        self._asked = f"{name_of(function)} on worker '{self.name}'"
        self._timeout = timeout
        self._deadline = 0.0
        self._context = copy_context()
        self._records_gradients = torch.is_grad_enabled()
        self._attempt: Future[Any] | None = None
        self._cancelled = False
        self._forget: Callable[[], None] = _nothing
        self._unfinished: list[_RetriedCall] = []
        """The user's future until the call ends; the thread that takes it completes it."""

    def begin(self) -> Future[Any]:
        """Make the call, and return the user's future; raises what prevents it."""
        future = _RetriedCall()
        future._attempts = self
        self._unfinished.append(future)
        limit = limit_of(self._agent, self._timeout)
        self._deadline = monotonic() + limit if limit else 0.0
        try:
            self._make(self._timeout)
        except BaseException:
            self._unfinished.clear()  # the future refers to this object
            self._call = None
            raise
        return future

    def _make(self, timeout: float) -> None:
        call = self._call
        if call is None:  # it was cancelled
            return
        function, args, kwargs = call
        is_loss = loss_of(self._agent, self.name)
        with torch.set_grad_enabled(self._records_gradients):
            attempt = self._attempt = self._agent.call_async(self.name, function, args, kwargs, timeout)
        if (pending := attempt._call) is not None:
            pending.how = self.how
        for future in self._unfinished:
            future._arrival = attempt._arrival
        attempt.add_done_callback(partial(self._ended, is_loss))
        if self._cancelled:  # by another thread, which may have seen only the last attempt
            attempt.cancel()

    def _seconds_left(self) -> float:
        return max(self._deadline - monotonic(), 0.001) if self._deadline else 0.0

    def _ended(self, is_loss: Callable[[BaseException], bool], attempt: Future[Any]) -> None:
        try:
            value = attempt.value()
        except Exception as error:
            try:
                if not self._cancelled and self._left and is_loss(error) and self._try_again(error):
                    return
            except Exception as prevented:
                error.__cause__ = prevented
            self._end(None, error)
        else:
            self._end(value, None)

    def _try_again(self, error: Exception) -> bool:
        """Make the call again, now or later; false if its callee cannot come back."""
        if isinstance(error, MessageLostError):
            self._left -= 1
            logger.warning("%s is called again: %s", self._asked, legible(error))
            self._again(error, True)
            return True
        returns = returns_of(self._agent)
        if returns is None:
            return False
        self._left -= 1
        logger.warning("%s is called again as soon as the worker is back: %s", self._asked, legible(error))
        lost = without_frames(error, copy=twin)

        def again(is_back: bool) -> None:
            self._context.copy().run(self._again, lost, is_back)  # a context cannot be entered twice

        self._forget = returns.when_back(self.name, again, self._seconds_left())
        if self._cancelled:
            self._forget()
        return True

    def _again(self, lost: Exception, is_back: bool) -> None:
        if self._cancelled:
            return
        try:
            if is_back:
                self._make(self._seconds_left())
            elif isinstance(self._agent, Agent) and self._agent.closed:
                why = f"{self._asked} was to be called again, as the worker was lost: {lost}"
                self._end(None, NotInitializedError(f"RPC has been shut down: {why}"))
            else:
                self._end(None, _not_back(lost))
        except Exception as error:
            self._end(None, error)

    def cancel(self) -> bool:
        """Cancel the call; false if it has ended. Callbacks run on this thread."""
        self._cancelled = True
        self._forget()
        attempt = self._attempt
        if attempt is not None and not attempt.done():
            return attempt.cancel()
        return self._end(None, CancelledError(f"{self._asked} was cancelled by its caller"))

    def give_up(self) -> None:
        """Cancel the call; callbacks run on another thread."""
        if isinstance(self._agent, Agent):
            self._agent.executor.submit((_cancel, self))

    @protected
    def _end(self, value: Any, error: BaseException | None) -> bool:
        """Complete the future; false if it is complete."""
        try:
            future = self._unfinished.pop()
        except IndexError:
            return False
        self._call, self._attempt, self._forget = None, None, _nothing  # releases the arguments
        future.end(value, error)
        return True


def _cancel(attempts: _Attempts) -> None:
    attempts.cancel()


def _nothing() -> None:
    pass


def _not_back(lost: Exception) -> WorkerLostError:
    """Return the error of a call whose callee has not come back in time."""
    worker, reason = getattr(lost, "worker", ""), getattr(lost, "reason", "")
    return WorkerLostError(f"{lost}. It did not come back within the timeout of the call", worker, reason)
