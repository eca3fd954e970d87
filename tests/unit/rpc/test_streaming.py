"""``rpc.stream`` in one process, on an agent whose calls are all to itself."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import rpc
from rpc import generators
from rpc.errors import RemoteError
from rpc.runtime.current import clear_current_agent, set_current_agent
from rpc.runtime.loop import LoopThread
from rpc.serialization.failures import type_name
from tests.support.local_agent import LocalAgent
from tests.support.streams import SOON, until


class Agent(LocalAgent):
    """Runs coroutines, too."""

    def __init__(self) -> None:
        super().__init__()
        self.coroutines = LoopThread("test-coroutines", "not on this thread")

    def call(self, *what: Any) -> Any:
        value = super().call(*what)
        return self.coroutines.wait_for(value) if asyncio.iscoroutine(value) else value


@pytest.fixture(autouse=True)
def agent() -> Iterator[Agent]:
    made = Agent()
    set_current_agent(made)
    yield made
    clear_current_agent(made)
    assert made.coroutines.stop()


def stream(function: Callable[..., Any], *args: Any, **options: Any) -> rpc.Stream[Any]:
    return rpc.stream("alone", function, args=args, **options)


def of(*values: int) -> Iterator[int]:
    yield from values


def stop(error: type[BaseException], *args: Any) -> Iterator[int]:
    yield 1
    raise error(*args)


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, asyncio.CancelledError])
def test_an_error_that_is_no_exception_comes_as_that_of_a_call_does(error: type[BaseException]) -> None:
    with stream(stop, error, "text", look_ahead=2, timeout=SOON) as values:
        assert next(values) == 1
        with pytest.raises(RemoteError, match="text") as raised:
            next(values)
        assert raised.value.remote_type == type_name(error)
        assert list(values) == []


class Stops:
    """An iterator of either kind whose first value is an error."""

    def __init__(self, error: type[Exception]) -> None:
        self._error = error

    def __iter__(self) -> Stops:
        return self

    def __next__(self) -> int:
        raise self._error

    def close(self) -> None: ...


def returns_none(error: type[Exception]) -> Iterator[int]:
    raise error


def test_the_error_that_ends_iterations_does_not_end_this_one() -> None:
    for look_ahead in (0, 4):
        for error in (StopIteration, StopAsyncIteration):
            with pytest.raises(RuntimeError, match=rf"alone.*raised {error.__name__}"):
                next(stream(returns_none, error, look_ahead=look_ahead))
        with pytest.raises(RuntimeError, match="raised StopAsyncIteration"):
            asyncio.run(anext(stream(Stops, StopAsyncIteration, look_ahead=look_ahead)))


def test_a_stream_that_another_thread_closes_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    values = stream(of, 1, 2, look_ahead=0)
    step = values._source.next

    def close_first() -> Any:
        values.close()
        return step()

    monkeypatch.setattr(values._source, "next", close_first)
    assert list(values) == []


class NoClose:
    """An iterator that cannot be closed; it ends with the last reference to it."""

    def __init__(self) -> None:
        living.append(weakref.ref(self))

    def __iter__(self) -> NoClose:
        return self

    def __next__(self) -> int:
        return 1


class NoAclose:
    def __init__(self) -> None:
        living.append(weakref.ref(self))

    def __aiter__(self) -> NoAclose:
        return self

    async def __anext__(self) -> int:
        return 1


living: list[weakref.ref[Any]] = []


@pytest.mark.parametrize("function", [NoClose, NoAclose])
def test_an_iterator_that_cannot_be_closed_ends_with_its_stream(function: Callable[..., Any]) -> None:
    living.clear()
    gc.collect()
    gc.disable()
    try:
        with stream(function) as values:
            assert next(values) == 1
            assert living[0]() is not None
        until(lambda: living[0]() is None)
    finally:
        gc.enable()


class CleansUp:
    """An asynchronous generator whose clean-up awaits."""

    def __init__(self) -> None:
        self.cleaning = threading.Event()
        self.outcome: list[str] = []
        self.ended = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.go_on: asyncio.Event | None = None

    async def values(self) -> AsyncIterator[int]:
        self.loop, self.go_on = asyncio.get_running_loop(), asyncio.Event()
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            self.cleaning.set()
            try:
                await self.go_on.wait()
                self.outcome.append("cleaned up")
            except asyncio.CancelledError:
                self.outcome.append("cancelled")
                raise
            finally:
                self.ended.set()


def test_a_dropped_stream_is_closed_on_any_backend() -> None:
    generator = CleansUp()
    values = stream(generator.values)
    assert next(values) == 1
    del values
    gc.collect()
    assert generator.cleaning.wait(SOON)


def test_the_streams_of_a_former_agent_of_another_backend_are_closed(agent: Agent) -> None:
    generator = CleansUp()
    values = stream(generator.values)
    assert next(values) == 1
    other = Agent()
    clear_current_agent(agent)
    set_current_agent(other)
    try:
        assert list(stream(of, 1)) == [1]
        assert generator.cleaning.wait(SOON)
    finally:
        clear_current_agent(other)
        set_current_agent(agent)
        assert other.coroutines.stop()


def called(*_: Any) -> Iterator[int]:
    raise AssertionError("the function of a refused stream is not called")


def test_what_no_caller_sends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ([1, [2]], [1], "ab", 7, [1, "2"]):
        with pytest.raises(TypeError, match="the key of a stream is two numbers"):
            generators.open_stream(wrong, called, (), {})
    monkeypatch.setattr(generators, "MAX_STREAMS", 2)
    monkeypatch.setattr(generators, "MAX_WAITING", 3)
    gate = threading.Event()

    def wait() -> Iterator[int]:
        yield 1
        gate.wait(SOON)
        yield 2

    generators.open_stream([5, 1], wait, (), {})
    with pytest.raises(ValueError, match="is open already"):
        generators.open_stream((5, 1), called, (), {})
    generators.open_stream((5, 2), of, (), {})
    with pytest.raises(RuntimeError, match="its caller has 2 streams open"):
        generators.open_stream((5, 3), called, (), {})
    generators.open_stream((6, 1), of, (), {})
    assert generators.next_value((5, 1), 0).wait() == [1]
    second = generators.next_value((5, 1), 1)
    for wrong_index in (0, 1, -1, "2", True):
        with pytest.raises(ValueError, match="has been requested before, or is none"):
            generators.next_value((5, 1), wrong_index)
    for index in (2, 3):
        generators.next_value((5, 1), index)
    with pytest.raises(ValueError, match="more than 3 values are requested"):
        generators.next_value((5, 1), 4)
    gate.set()
    assert second.wait() == [2]
    for key in ((5, 1), (5, 2), (6, 1)):
        generators.close_stream(key)
    with pytest.raises(ValueError, match=r"look_ahead is a number of values, from 0 to 3"):
        stream(of, look_ahead=4)


@pytest.mark.parametrize("taken_by", ["add_done_callback", "then"])
def test_a_value_that_the_generator_changes_is_taken_before(taken_by: str) -> None:
    def growing() -> Iterator[list[int]]:
        items: list[int] = []
        for number in range(2):
            items.append(number)
            yield items

    generators.open_stream((7, 1), growing, (), {})
    requested = [generators.next_value((7, 1), index) for index in range(3)]
    opened = generators._streams().find((7, 1))
    assert opened is not None
    assert not opened.requests.has_work(), "its value could only be taken late"
    taken: list[list[int]] = []
    for answer in reversed(requested):
        getattr(answer, taken_by)(lambda done: taken.extend(map(list, done.value())))
    assert requested[-1].wait() == []
    assert taken == [[0], [0, 1]]


def test_keys_cannot_be_guessed() -> None:
    keys = [stream(of)._source._key[1] for _ in range(3)]
    assert len(set(keys)) == 3
    assert max(keys) > 1 << 32, "a counter would be small"
