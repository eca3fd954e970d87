"""The callee's side of ``rpc.stream``: a generator runs as far as its caller has asked for values.

Each request for a value is a call whose answer comes later; requests are numbered, as they may arrive in any
order. A plain generator has a thread of its own, since PyTorch's modes, such as ``torch.no_grad``, belong to
a thread and last from value to value; an asynchronous one has a task on the loop of ``async def`` callees.
When its caller closes the stream, is lost, or this worker leaves, the generator is closed: its ``finally``
runs.

The key of a stream has a random number, so that other members of the group cannot name it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from functools import partial
from time import monotonic
from typing import Any, Final, Protocol

import torch

from rpc.agent.agent import Agent
from rpc.errors import RemoteError, RpcError, with_article
from rpc.functions import async_execution
from rpc.group.peer import Peer
from rpc.runtime.blocking import this_thread
from rpc.runtime.current import current_agent
from rpc.runtime.own_streams import OwnStreams
from rpc.runtime.tasks import Task
from rpc.serialization.failures import text_of, type_name
from rpc.serialization.settings import allow_function

__all__ = ["MAX_STREAMS", "MAX_WAITING", "close_stream", "next_value", "open_stream"]

logger = logging.getLogger(__name__)

_STREAMS: Final = "streams"
"""Key of the ``_Streams`` in an agent's extensions."""

_END_SECONDS: Final = 1.0
"""Maximum time in seconds that a worker waits for all its generators to close when it leaves."""

MAX_STREAMS: Final = 4096
"""Maximum number of streams that one caller has open at a worker."""

MAX_WAITING: Final = 65_536
"""Maximum number of values of one stream that are requested and not there yet."""

_NO_MORE: Final[list[Any]] = []
"""The answer after the last value; that with a value is a list of it."""

Key = tuple[int, int]
"""The incarnation of the caller's agent, and the random number that it has given to the stream."""

_making: Final = threading.Lock()


class _Requested(torch.futures.Future[list[Any]]):
    """The answer to a request for a value, which is given once it is taken: by a callback, which serializes
    the value at once, as the generator may change it when it goes on. Large tensors and arrays are sent in
    place.

    Args:
        changed: called when the answer can be given.
    """

    def __init__(self, changed: Callable[[], object]) -> None:
        super().__init__()
        self._changed = changed
        self.may_come = False

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        super().add_done_callback(callback)
        self._let_come()

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        done = super().then(callback)
        self._let_come()
        return done

    def wait(self) -> list[Any]:
        self._let_come()
        return super().wait()

    def _let_come(self) -> None:
        self.may_come = True
        self._changed()


class _Requests:
    """Requests for the values of one stream, in order. From any thread.

    Args:
        changed: called after a request or the end.
    """

    def __init__(self, changed: Callable[[], object]) -> None:
        self._changed = changed
        self._lock = threading.Lock()
        self._waiting: dict[int, _Requested] = {}
        self._index = 0
        self.ended = False

    def add(self, index: int) -> torch.futures.Future[list[Any]]:
        """Return a future of the answer to a request.

        Raises:
            ValueError: no caller that keeps to the protocol requests this value now.
        """
        future = _Requested(self._changed)
        with self._lock:
            ended = self.ended
            if not ended:
                if type(index) is not int or index < self._index or index in self._waiting:
                    raise ValueError(f"rpc.stream: value {index!r:.60} has been requested before, or is none")
                if len(self._waiting) >= MAX_WAITING:
                    raise ValueError(f"rpc.stream: more than {MAX_WAITING} values are requested at a time")
                self._waiting[index] = future
        if ended:
            future.set_result(_NO_MORE)
        return future

    def has_work(self) -> bool:
        """Whether the answer with the next value can be given, or there are no more."""
        future = self._waiting.get(self._index)
        return self.ended or (future is not None and future.may_come)

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
            raised = error if isinstance(error, Exception) else _as_remote(error)
            failing.set_exception(raised)  # type: ignore[arg-type]  # PyTorch's annotation is wrong
        for future in waiting.values():
            future.set_result(_NO_MORE)
        self._changed()


def _as_remote(error: BaseException) -> RemoteError:
    """Return what the caller of a plain call would get for it; a future accepts only an ``Exception``."""
    remote = RemoteError(text_of(error), type_name(type(error)))
    remote.__cause__ = error
    return remote


class _Stream(Protocol):
    """A generator that runs here, and the requests for its values."""

    requests: _Requests

    def begin(self, values: Any) -> None:
        """Begin to run the generator; called once."""

    def close(self) -> None:
        """Have the generator closed. Does not wait."""

    def wait(self, seconds: float) -> None:
        """Wait until it is closed, unless it runs on this thread."""


class _Plain:
    """A plain generator, or another iterator, on a thread of its own.

    Args:
        name: the generator's name, for the log.
        forget: called when it is closed.
    """

    def __init__(self, name: str, forget: Callable[[], object]) -> None:
        self._name = name
        self._forget = forget
        self._woken = threading.Condition()
        self.requests = _Requests(self._wake)

    def begin(self, values: Iterator[Any]) -> None:
        # Only the thread holds the iterator: what has no ``close`` ends with the last reference to it.
        self._thread = threading.Thread(target=self._run, args=(values,), name="farcall-stream", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.requests.end()

    def wait(self, seconds: float) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _wake(self) -> None:
        with self._woken:
            self._woken.notify()

    def _run(self, values: Iterator[Any]) -> None:
        this_thread.runs_callees = True
        requests = self.requests
        try:
            while True:
                with self._woken:
                    self._woken.wait_for(requests.has_work)
                if requests.ended:
                    return
                try:
                    value = next(values)
                except StopIteration:
                    return
                except BaseException as error:  # it goes to the caller
                    requests.end(error)
                    return
                requests.answer(value)
                del value
        finally:
            requests.end()
            with _logged(self._name):
                getattr(values, "close", _nothing)()
            self._forget()


class _Asynchronous:
    """An asynchronous generator, in a task; made on the loop that it runs on.

    Args:
        name: the generator's name, for the log.
        forget: called when it is closed.
        submit: has an answer serialized and sent, which the loop must not wait for.
    """

    def __init__(self, name: str, forget: Callable[[], object], submit: Callable[[Task], object]) -> None:
        self._name = name
        self._forget = forget
        self._submit = submit
        self._loop = asyncio.get_running_loop()
        self._thread = threading.current_thread()
        self._woken = asyncio.Event()
        self._may_cancel = True
        self._closed = threading.Event()
        self.requests = _Requests(partial(self._soon, self._woken.set))

    def begin(self, values: AsyncIterator[Any]) -> None:
        self._task = self._loop.create_task(OwnStreams().follow(self._run(values)))

    def close(self) -> None:
        self.requests.end()
        self._soon(self._cancel)

    def wait(self, seconds: float) -> None:
        if self._thread is not threading.current_thread():
            self._closed.wait(seconds)

    def _cancel(self) -> None:
        """Cancel the task, once, and not when the generator is being closed: its clean-up may await."""
        if self._may_cancel:
            self._may_cancel = False
            self._task.cancel()

    def _soon(self, call: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the task with it
            self._loop.call_soon_threadsafe(call)

    async def _elsewhere(self, call: Callable[[], object]) -> None:
        """Call a function that answers on another thread. Wait for it: the generator may change the value
        when it goes on.
        """
        done = asyncio.Event()

        def run(_: object) -> None:
            try:
                call()
            finally:
                self._soon(done.set)

        self._submit((OwnStreams.of_this_thread().around(run), None))
        await done.wait()

    async def _run(self, values: AsyncIterator[Any]) -> None:
        requests = self.requests
        failure: BaseException | None = None
        try:
            while not requests.ended:
                self._woken.clear()
                if not requests.has_work():
                    await self._woken.wait()
                    continue
                try:
                    value = await anext(values)
                except StopAsyncIteration:
                    return
                except asyncio.CancelledError as error:
                    failure = error
                    raise
                except BaseException as error:  # it goes to the caller
                    failure = error
                    return
                await self._elsewhere(partial(requests.answer, value))
                del value
        finally:
            self._may_cancel = False
            self._submit((requests.end, failure))
            failure = None  # it refers to this frame, a cycle
            try:
                with _logged(self._name):
                    await getattr(values, "aclose", _nothing_awaited)()
            finally:
                del values, self._task  # a cancelled task refers to this frame, a cycle
                self._forget()
                self._closed.set()


def _nothing() -> None:
    """Close an iterator that cannot be closed."""


async def _nothing_awaited() -> None:
    """Close an asynchronous iterator that cannot be closed."""


@contextlib.contextmanager
def _logged(name: str) -> Iterator[None]:
    """Log the error of a generator that is closed: no caller waits for it."""
    try:
        yield
    except asyncio.CancelledError:
        raise  # the loop ends
    except BaseException:
        logger.exception("%s, whose stream has ended, raised an error when it was closed", name)


class _Streams:
    """The streams whose generators run at one agent."""

    def __init__(self, agent: Agent | None) -> None:
        self._open: dict[Key, _Stream] = {}
        self._lock = threading.Lock()
        self._agent = agent
        self._submit: Callable[[Task], object] = _call if agent is None else agent.executor.submit
        if agent is not None:
            agent.lifecycle.hooks.gone.append(self._peer_gone)
            agent.lifecycle.hooks.closed.append(self._end)
            agent.lifecycle.hooks.forked.append(self._open.clear)

    def check(self, key: Key) -> None:
        """Raise an error if its caller may not open a stream with this key now."""
        if key in self._open:
            raise ValueError("rpc.stream: a stream with this key is open already")
        if sum(each[0] == key[0] for each in list(self._open)) >= MAX_STREAMS:
            raise RpcError(
                f"rpc.stream: its caller has {MAX_STREAMS} streams open at this worker, which is the "
                "maximum: close those that are not read to their end"
            )

    def open(self, key: Key, values: Any, name: str) -> Coroutine[Any, Any, None] | None:
        """Begin with a stream; the coroutine that is returned, if any, has to be awaited for it."""
        forget = partial(self._open.pop, key, None)
        if isinstance(values, Iterator):
            self._begin(key, _Plain(name, forget), values)
            return None

        async def begin() -> None:
            self._begin(key, _Asynchronous(name, forget, self._submit), values)

        return begin()

    def _begin(self, key: Key, stream: _Stream, values: Any) -> None:
        with self._lock:
            self.check(key)
            self._open[key] = stream
            try:
                stream.begin(values)
            except BaseException:  # the system gives no thread
                del self._open[key]
                raise
        agent = self._agent
        if agent is not None and (agent.closed or agent.group.peers.view.find(key[0]) is None):
            stream.close()  # its caller was lost before it was here, or is none

    def find(self, key: Key) -> _Stream | None:
        return self._open.get(key)

    def close(self) -> list[_Stream]:
        """Have all streams closed, and return them. Does not wait."""
        with self._lock:
            closing = list(self._open.values())
        for stream in closing:
            stream.close()
        return closing

    def _peer_gone(self, peer: Peer, _: str) -> None:
        for key, stream in list(self._open.items()):
            if key[0] == peer.incarnation:
                stream.close()

    def _end(self) -> None:
        deadline = monotonic() + _END_SECONDS
        for stream in self.close():
            stream.wait(max(0.0, deadline - monotonic()))


def _call(task: Task) -> None:
    function, argument = task
    function(argument)


_of_other: tuple[Any, _Streams] | None = None
"""The last agent of another backend, which notices neither the loss of a caller nor its own end, and its
streams.
"""


def _streams() -> _Streams:
    global _of_other
    agent: Any = current_agent()
    with _making:
        if isinstance(agent, Agent):
            found: _Streams | None = agent.extensions.get(_STREAMS)
            if found is None:
                found = agent.extensions[_STREAMS] = _Streams(agent)
            return found
        last = _of_other
        if last is not None and last[0] is agent:
            return last[1]
        streams = _Streams(None)
        _of_other = agent, streams
    if last is not None:
        last[1].close()
    return streams


def _key(key: Any) -> Key:
    """Return the key that a caller has sent: a list, from some codecs."""
    match key:
        case [int(caller), int(number)]:
            return caller, number
    raise TypeError(f"the key of a stream is two numbers, not {key!r:.60}")


@allow_function
def open_stream(
    key: Key, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Coroutine[Any, Any, None] | None:
    """Called at the callee: begin with the values of a generator."""
    streams, key = _streams(), _key(key)
    streams.check(key)
    values = function(*args, **kwargs)
    name = getattr(function, "__qualname__", repr(function))
    if not isinstance(values, Iterator | AsyncIterator):
        if asyncio.iscoroutine(values):
            values.close()
        raise TypeError(
            f"rpc.stream needs a generator function, plain or async, or one that returns an iterator; {name} "
            f"returned {with_article(type(values))}: call it by rpc_sync or rpc_async"
        )
    return streams.open(key, values, name)


@allow_function
@async_execution
def next_value(key: Key, index: int) -> torch.futures.Future[list[Any]]:
    """Called at the callee: answered with a list of the value with that index, or an empty one."""
    stream = _streams().find(_key(key))
    if stream is None:
        ended: torch.futures.Future[list[Any]] = torch.futures.Future()
        ended.set_result(_NO_MORE)
        return ended
    return stream.requests.add(index)


@allow_function
def close_stream(key: Key) -> None:
    """Called at the callee: the caller wants no more values."""
    stream = _streams().find(_key(key))
    if stream is not None:
        stream.close()
