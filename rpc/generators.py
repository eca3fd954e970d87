"""The callee's side of ``rpc.stream``: a generator runs as far as its caller has asked for values.

Each request for a value is a call whose answer comes later; requests are numbered, as they may arrive in any
order. A plain generator has a thread of its own, since PyTorch's modes, such as ``torch.no_grad``, belong to
a thread and last from value to value; an asynchronous one has a task on the loop of ``async def`` callees.
When its caller closes the stream, is lost, or this worker leaves, the generator is closed: its ``finally``
runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from functools import partial
from typing import Any, Final, Protocol

import torch

from rpc.agent.agent import Agent
from rpc.errors import with_article
from rpc.functions import async_execution
from rpc.group.peer import Peer
from rpc.runtime.current import current_agent
from rpc.runtime.own_streams import OwnStreams
from rpc.serialization.settings import allow_function

__all__ = ["close_stream", "next_value", "open_stream"]

logger = logging.getLogger(__name__)

_STREAMS: Final = "streams"
"""Key of the ``_Streams`` in an agent's extensions."""

_END_SECONDS: Final = 1.0
"""Maximum time in seconds that a worker waits for its generators to close when it leaves."""

_NO_MORE: Final[list[Any]] = []
"""The answer after the last value; that with a value is a list of it."""

Key = tuple[int, int]
"""The incarnation of the caller's agent, and the number that it has given to the stream."""

_making: Final = threading.Lock()


class _Requests:
    """Requests for the values of one stream, in order. From any thread.

    Args:
        changed: called after a request or the end.
    """

    def __init__(self, changed: Callable[[], object]) -> None:
        self._changed = changed
        self._lock = threading.Lock()
        self._waiting: dict[int, torch.futures.Future[list[Any]]] = {}
        self._index = 0
        self.ended = False

    def add(self, index: int) -> torch.futures.Future[list[Any]]:
        """Return a future of the answer to a request."""
        future: torch.futures.Future[list[Any]] = torch.futures.Future()
        with self._lock:
            ended = self.ended
            if not ended:
                self._waiting[index] = future
        if ended:
            future.set_result(_NO_MORE)
        else:
            self._changed()
        return future

    @property
    def idle(self) -> bool:
        """Whether the next value has not been requested, and more may be."""
        return not self.ended and self._index not in self._waiting

    def answer(self, value: Any) -> None:
        """Give the next value."""
        with self._lock:
            future = self._waiting.pop(self._index, None)
            self._index += 1
        if future is not None:  # the stream has been closed meanwhile
            future.set_result([value])

    def end(self, error: BaseException | None = None) -> None:
        """There are no more values; ``error`` comes in the place of the next one."""
        with self._lock:
            self.ended = True
            failing = None if error is None else self._waiting.pop(self._index, None)
            waiting, self._waiting = self._waiting, {}
        if failing is not None and error is not None:
            failing.set_exception(error)  # type: ignore[arg-type]  # any error goes to the caller
        for future in waiting.values():
            future.set_result(_NO_MORE)
        self._changed()


class _Stream(Protocol):
    """A generator that runs here, and the requests for its values."""

    requests: _Requests

    def close(self) -> None:
        """Have the generator closed. Does not wait."""

    def wait(self, seconds: float) -> None:
        """Wait until it is closed, if it can be waited for."""


class _Plain:
    """A plain generator, or another iterator, on a thread of its own."""

    def __init__(self, values: Iterator[Any], name: str, forget: Callable[[], object]) -> None:
        self._values = values
        self._name = name
        self._forget = forget
        self._woken = threading.Condition()
        self.requests = _Requests(self._wake)
        self._thread = threading.Thread(target=self._run, name="farcall-stream", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.requests.end()

    def wait(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _wake(self) -> None:
        with self._woken:
            self._woken.notify()

    def _run(self) -> None:
        requests = self.requests
        try:
            while True:
                with self._woken:
                    self._woken.wait_for(lambda: not requests.idle)
                if requests.ended:
                    return
                try:
                    value = next(self._values)
                except StopIteration:
                    return
                except BaseException as error:  # it goes to the caller
                    requests.end(error)
                    return
                requests.answer(value)
                del value
        finally:
            requests.end()
            self._forget()
            with _logged(self._name):
                getattr(self._values, "close", _nothing)()


class _Asynchronous:
    """An asynchronous generator, in a task; made on the loop that it runs on."""

    def __init__(self, values: AsyncIterator[Any], name: str, forget: Callable[[], object]) -> None:
        self._values = values
        self._name = name
        self._forget = forget
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self.requests = _Requests(partial(self._soon, self._woken.set))
        self._task = self._loop.create_task(OwnStreams().follow(self._run()))

    def close(self) -> None:
        self.requests.end()
        self._soon(self._task.cancel)

    def wait(self, seconds: float) -> None:
        """The loop's end cancels the task, and waits for it."""

    def _soon(self, call: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the task with it
            self._loop.call_soon_threadsafe(call)

    async def _run(self) -> None:
        requests = self.requests
        try:
            while not requests.ended:
                self._woken.clear()
                if requests.idle:
                    await self._woken.wait()
                    continue
                try:
                    value = await anext(self._values)
                except StopAsyncIteration:
                    return
                except asyncio.CancelledError as error:
                    requests.end(error)
                    raise
                except BaseException as error:  # it goes to the caller
                    requests.end(error)
                    return
                requests.answer(value)
                del value
        finally:
            requests.end()
            self._forget()
            with _logged(self._name):
                await getattr(self._values, "aclose", _nothing_awaited)()


def _nothing() -> None:
    """Close an iterator that cannot be closed."""


async def _nothing_awaited() -> None:
    """Close an asynchronous iterator that cannot be closed."""


@contextlib.contextmanager
def _logged(name: str) -> Iterator[None]:
    """Log the error of a generator that is closed: no caller waits for it."""
    try:
        yield
    except Exception:
        logger.exception("%s, whose stream has ended, raised an error when it was closed", name)


class _Streams:
    """The streams whose generators run at one agent."""

    def __init__(self, agent: Agent | None) -> None:
        self._open: dict[Key, _Stream] = {}
        self._agent = agent
        if agent is not None:
            agent.lifecycle.hooks.gone.append(self._peer_gone)
            agent.lifecycle.hooks.closed.append(self._end)
            agent.lifecycle.hooks.forked.append(self._open.clear)

    def open(self, key: Key, values: Any, name: str) -> Coroutine[Any, Any, None] | None:
        """Begin with a stream; the coroutine that is returned, if any, has to be awaited for it."""
        forget = partial(self._open.pop, key, None)
        if isinstance(values, Iterator):
            self._add(key, _Plain(values, name, forget))
            return None

        async def begin() -> None:
            self._add(key, _Asynchronous(values, name, forget))

        return begin()

    def _add(self, key: Key, stream: _Stream) -> None:
        self._open[key] = stream
        agent = self._agent
        if agent is not None and agent.group.peers.view.gone_reason(key[0]) is not None:
            stream.close()  # its caller was lost before it was here

    def find(self, key: Key) -> _Stream | None:
        return self._open.get(key)

    def _peer_gone(self, peer: Peer, _: str) -> None:
        for key, stream in list(self._open.items()):
            if key[0] == peer.incarnation:
                stream.close()

    def _end(self) -> None:
        ending = list(self._open.values())
        for stream in ending:
            stream.close()
        for stream in ending:
            stream.wait(_END_SECONDS)


_of_others: Final[dict[int, _Streams]] = {}
"""The streams of agents of other backends, which notice no loss of a caller; by the agent's identity."""


def _streams() -> _Streams:
    agent: Any = current_agent()
    with _making:
        if not isinstance(agent, Agent):
            return _of_others.setdefault(id(agent), _Streams(None))
        found: _Streams | None = agent.extensions.get(_STREAMS)
        if found is None:
            found = agent.extensions[_STREAMS] = _Streams(agent)
        return found


@allow_function
def open_stream(
    key: Key, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Coroutine[Any, Any, None] | None:
    """Called at the callee: begin with the values of a generator."""
    values = function(*args, **kwargs)
    name = getattr(function, "__qualname__", repr(function))
    if not isinstance(values, Iterator | AsyncIterator):
        if asyncio.iscoroutine(values):
            values.close()
        raise TypeError(
            f"rpc.stream needs a generator function, plain or async, or one that returns an iterator; {name} "
            f"returned {with_article(type(values))}: call it by rpc_sync or rpc_async"
        )
    return _streams().open(tuple(key), values, name)  # type: ignore[arg-type]  # a list, from some codecs


@allow_function
@async_execution
def next_value(key: Key, index: int) -> torch.futures.Future[list[Any]]:
    """Called at the callee: answered with a list of the value with that index, or an empty one."""
    stream = _streams().find(tuple(key))  # type: ignore[arg-type]
    if stream is None:
        ended: torch.futures.Future[list[Any]] = torch.futures.Future()
        ended.set_result(_NO_MORE)
        return ended
    return stream.requests.add(index)


@allow_function
def close_stream(key: Key) -> None:
    """Called at the callee: the caller wants no more values."""
    stream = _streams().find(tuple(key))  # type: ignore[arg-type]
    if stream is not None:
        stream.close()
