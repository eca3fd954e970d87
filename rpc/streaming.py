"""``stream``: iterate over the values of a generator on another worker.

The caller sends numbered requests for values, at most ``look_ahead`` before it takes them, so neither side
holds more values than that. Each value is the answer of a call, so it may contain whatever an answer may. The
callee's side is in ``generators``.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any, Final, Generic, TypeVar

from rpc import generators
from rpc.agent.agent import Agent
from rpc.agent.futures import Future
from rpc.agent.interface import AgentInterface
from rpc.api import keywords, not_callable, positional
from rpc.errors import RpcError, RpcTimeoutError
from rpc.group.membership import WorkerReference
from rpc.options import UNSET_TIMEOUT
from rpc.retrying import limit_of
from rpc.runtime.blocking import check_may_block, this_thread
from rpc.runtime.current import current_agent
from rpc.runtime.interrupts import is_interruption, protected
from rpc.runtime.iterating import ClosingIterator, waiter

__all__ = ["Stream", "stream"]

T = TypeVar("T")

_LOOK_AHEAD: Final = 4

_KEY_BITS: Final = 53
"""Number of random bits in a stream's key: every codec can send such a number."""

_OPENED: Final = "opened streams"
"""Key of the ``_Opened`` in an agent's extensions."""

_making: Final = threading.RLock()


class _Source:
    """The generator, as its caller sees it. From any thread.

    Attributes:
        to: the worker that it runs on.
        opened: the call that begins with it.
        closed: whether it has been closed.
    """

    def __init__(self, agent: AgentInterface, to: str, look_ahead: int) -> None:
        self._agent = agent
        self.to = to
        self._look_ahead = look_ahead
        self._key = getattr(agent, "incarnation", id(agent)), secrets.randbits(_KEY_BITS)
        self._lock = threading.RLock()  # reentrant: a finalizer may close another stream
        self._asked: deque[Future[list[Any]]] = deque()
        self._index = 0
        self.closed = False
        self._process = os.getpid()

    def open(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have the callee begin."""
        called = (self._key, function, args, kwargs)
        self.opened = self._agent.call_async(self.to, generators.open_stream, called, {}, 0.0)
        if self._look_ahead:
            self.opened.add_done_callback(self._ask_ahead)

    @protected
    def next(self) -> Future[list[Any]]:
        """Return the answer with the next value, which stays the next one until ``take``. It is a cancelled
        one if the stream has been closed.
        """
        with self._lock:
            if self.closed:
                cancelled: Future[list[Any]] = Future()
                cancelled.set_exception(CancelledError())
                return cancelled
            if not self._asked:
                self._ask()
            return self._asked[0]

    @protected
    def take(self) -> None:
        """The next value has been taken."""
        with self._lock:
            if self._asked:
                self._asked.popleft()
        self._ask_ahead(self.opened)

    @protected
    def close(self) -> None:
        """Have the generator closed. Does not wait."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            asked = list(self._asked)
            self._asked.clear()
        for each in asked:
            each.cancel()
        self.opened.add_done_callback(self._send_close)

    def drop(self) -> None:
        """Have it closed by another thread; called by a finalizer, which may run anywhere."""
        agent = self._agent
        if isinstance(agent, Agent):
            if not agent.closed:  # nor in a forked child, where a lock of the executor may be held for ever
                agent.executor.submit((_Source.close, self))
        elif os.getpid() == self._process:
            with contextlib.suppress(RuntimeError):  # the interpreter ends
                _thread.start_new_thread(self.close, ())  # which takes no lock of Python's own

    @protected
    def _ask_ahead(self, opened: Future[Any]) -> None:
        with self._lock, contextlib.suppress(RpcError):  # the callee is lost: ``next`` raises it
            while not self.closed and len(self._asked) < self._look_ahead and not _failed(opened):
                self._ask()

    def _ask(self) -> None:
        called = self._key, self._index
        self._asked.append(self._agent.call_async(self.to, generators.next_value, called, {}, 0.0))
        self._index += 1

    def _send_close(self, opened: Future[Any]) -> None:
        if not _failed(opened):
            with contextlib.suppress(RpcError):  # it is lost, or this worker is leaving
                self._agent.call_async(self.to, generators.close_stream, (self._key,), {}, 0.0)


def _failed(opened: Future[Any]) -> bool:
    try:
        opened.value()
    except Exception:  # any error of the callee
        return True
    return False


class _Opened:
    """The streams that an agent's program has opened. They are closed when it shuts down, which waits for its
    calls. Those that its callees have opened are not: shutdown waits for these callees.
    """

    def __init__(self, agent: Agent) -> None:
        self._sources: weakref.WeakSet[_Source] = weakref.WeakSet()
        agent.lifecycle.hooks.leaving.append(self._close)

    def add(self, source: _Source) -> None:
        with _making:
            self._sources.add(source)

    def _close(self) -> None:
        with _making:
            there = list(self._sources)
        for each in there:
            each.close()


class Stream(ClosingIterator, Generic[T]):
    """The values of a generator on another worker: an iterator, for ``for`` and for ``async for``, of one
    thread or task.

    ``close()``, the end of a ``with`` statement, and dropping it close the generator: its ``finally`` runs.
    """

    def __init__(self, source: _Source, timeout: float) -> None:
        self._source = source
        self._timeout = timeout
        self._ended = False

    def __next__(self) -> T:
        """Return the next value; waits until it is there.

        Raises:
            RpcTimeoutError: it is not there in time. The generator goes on, and the next call waits for that
                value again.
            WorkerLostError: the worker is gone.
            RpcError: this worker shuts down, before the generator's end.
            Exception: the error that the generator raised, in the place of the value.
        """
        check_may_block()
        limit = self._timeout or None
        if not self._ended:
            self._wait(self._source.opened, limit)
        found: list[T] = [] if self._ended else self._wait(self._source.next(), limit)
        if not self._taken(found):
            raise StopIteration
        return found[0]

    async def __anext__(self) -> T:
        """Return the next value, in a coroutine on any asyncio loop; raises as ``__next__`` does."""
        if not self._ended:
            await self._until_done(self._source.opened)
        found: list[T] = [] if self._ended else await self._until_done(self._source.next())
        if not self._taken(found):
            raise StopAsyncIteration
        return found[0]

    def _wait(self, future: Future[Any], limit: float | None) -> Any:
        try:
            future.wait(limit)
        except Exception as error:
            if is_interruption(error):
                raise
            if not future.done():
                raise (self._late() if isinstance(error, RpcTimeoutError) else error) from None
        return self._value(future)

    def _value(self, future: Future[Any]) -> Any:
        """Return the value of an answer that has come; if it is an error, the iteration is over."""
        try:
            return future.value()
        except (StopIteration, StopAsyncIteration) as error:  # would end the loop as if there were no more
            self.close()
            raise RuntimeError(
                f"rpc.stream: the generator on worker '{self._source.to}', or the function that returns it, "
                f"raised {type(error).__name__}"
            ) from error
        except Exception as error:
            if not (isinstance(error, CancelledError) and self._source.closed):
                self.close()
                raise
        if self._ended:  # another thread has closed it
            return []
        raise RpcError(
            f"rpc.stream: this worker is shutting down: the stream from worker '{self._source.to}' was "
            "closed before its end. Read a stream to its end, or close it, before rpc.shutdown()."
        )

    async def _until_done(self, future: Future[Any]) -> Any:
        completed, wake = waiter()  # and not the future itself, which a timeout would cancel
        future.add_done_callback(wake)
        try:
            async with asyncio.timeout(self._timeout or None):
                await completed
        except TimeoutError:
            raise self._late() from None
        return self._value(future)

    def _taken(self, found: list[Any]) -> bool:
        """Note that an answer has been taken; returns whether it has a value."""
        if not self._ended and found:
            self._source.take()
        elif not self._ended:
            self.close()
        return bool(found)

    def _late(self) -> RpcTimeoutError:
        return RpcTimeoutError(
            f"rpc.stream: worker '{self._source.to}' has given no further value within {self._timeout:g} s; "
            "its generator goes on. Ask again, or close the stream."
        )

    @protected
    def close(self) -> None:
        """Close the generator, and end the iteration. Does not wait: a plain generator that computes a value
        is closed after that; an ``async`` one is cancelled where it awaits.
        """
        self._ended = True
        self._source.close()

    async def aclose(self) -> None:
        """Like ``close``, for ``contextlib.aclosing``."""
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_ended", True):
            self._source.drop()


def stream(
    to: WorkerReference,
    function: Callable[..., Iterator[T]] | Callable[..., AsyncIterator[T]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_TIMEOUT,
    *,
    look_ahead: int = _LOOK_AHEAD,
) -> Stream[T]:
    """Iterate over the values that a generator on another worker yields, as they come.

    The generator begins at once, and runs ahead of the iteration by at most ``look_ahead`` values. Plain
    generators, other iterators, and asynchronous generators are possible; each plain one has a thread.

    Args:
        to: name, id or ``WorkerInfo`` of the callee.
        function: a generator function, plain or ``async def``, or a function that returns an iterator.
        args: positional arguments, as for ``rpc_sync``.
        kwargs: keyword arguments.
        timeout: how long to wait for each value, in seconds; 0: no limit. Default: the timeout of calls.
        look_ahead: maximum number of values that are computed, or on their way, before they are asked for.
            0: the generator runs only while the iteration waits for a value. At most 65,536.

    Returns:
        An iterator, also an asynchronous one. Close it, or use it in a ``with`` statement, if it is not read
        to its end.

    An error that the generator raises comes in its place, and ends the iteration. If the callee is lost, the
    values that are here come first, then ``WorkerLostError``. If the caller is lost, or shuts down, the
    generator is closed. The generator must not write to a tensor that it has yielded: one of more than 1 MiB
    may still be on its way to another host.

    Raises:
        UnknownWorkerError: there is no such worker.
        SerializationError: an argument cannot be sent.
        TypeError, ValueError: an argument is not of the kind described.

    Example::

        with rpc.stream("loader0", batches, args=(path,), look_ahead=8) as arriving:
            for batch in arriving:
                train(batch)
    """
    if not callable(function):
        raise not_callable(function)
    if type(look_ahead) is not int or not 0 <= look_ahead <= generators.MAX_WAITING:
        raise ValueError(
            f"look_ahead is a number of values, from 0 to {generators.MAX_WAITING}, not {look_ahead!r:.60}"
        )
    agent: AgentInterface = current_agent()
    if isinstance(agent, Agent):
        seconds = agent.calls.caller.effective_timeout(timeout)
    else:
        seconds = limit_of(agent, timeout)
    source = _Source(agent, agent.get_worker_info(to).name, look_ahead)
    source.open(function, positional(args), keywords(kwargs))
    if not this_thread.runs_callees:
        _opened(agent, source)
    return Stream(source, seconds)


def _opened(agent: AgentInterface, source: _Source) -> None:
    if isinstance(agent, Agent):
        with _making:
            opened: _Opened | None = agent.extensions.get(_OPENED)
            if opened is None:
                opened = agent.extensions[_OPENED] = _Opened(agent)
        opened.add(source)
