"""``rpc.stream``: values of a generator of another worker come one by one, whatever happens."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest
import torch

import rpc
from rpc.errors import RpcTimeoutError, SerializationError, WorkerLostError
from tests.support.serving import in_worker0
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker

_seen: list[Any] = []
_gate = threading.Event()
_left_open: list[Any] = []


def count(end: int, error_at: int = -1) -> Iterator[int]:
    """Note what happens to the generator in its process."""
    _seen.clear()
    try:
        for number in range(end):
            if number == error_at:
                raise LookupError(f"at {number}")
            _seen.append(number)
            yield number
    except GeneratorExit:
        _seen.append("closed")
        raise
    finally:
        _seen.append("finally")


async def count_async(end: int, error_at: int = -1) -> AsyncIterator[int]:
    _seen.clear()
    try:
        for number in range(end):
            await asyncio.sleep(0)
            if number == error_at:
                raise LookupError(f"at {number}")
            _seen.append(number)
            yield number
    finally:
        _seen.append("finally")


async def wait_async() -> AsyncIterator[int]:
    _seen.clear()
    try:
        yield 1
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        _seen.append("cancelled")
        raise
    finally:
        _seen.append("finally")


def wait_for_gate() -> Iterator[int]:
    _gate.clear()
    yield 1
    _gate.wait()
    yield 2


def open_gate() -> None:
    _gate.set()


def seen() -> list[Any]:
    return list(_seen)


def modes() -> Iterator[list[bool]]:
    with torch.no_grad():
        yield [torch.is_grad_enabled()]
        yield [torch.is_grad_enabled()]
    yield [torch.is_grad_enabled()]


def batches() -> Iterator[Any]:
    for number in range(3):
        yield {"x": torch.full((300, 1000), float(number)), "reference": rpc.RRef(number)}


def numbers_of(items: list[int]) -> Iterator[int]:
    return iter(items)


async def no_generator() -> int:
    return 1


async def read(function: Any, *args: Any, **options: Any) -> list[int]:
    return [value async for value in rpc.stream("worker1", function, args=args, **options)]


def ended(what: str = "finally") -> bool:
    until(lambda: what in rpc.rpc_sync("worker1", seen))
    return True


@in_worker0()
def test_streams() -> None:
    # all values, in order, both kinds of both sides
    for function in (count, count_async):
        for look_ahead in (0, 1, 50):
            assert list(rpc.stream("worker1", function, args=(20,), look_ahead=look_ahead)) == list(range(20))
        assert asyncio.run(read(function, 20)) == list(range(20))
        assert list(rpc.stream("worker1", function, kwargs={"end": 0})) == []
        assert list(rpc.stream("worker0", function, args=(3,))) == [0, 1, 2], "of this worker itself"
        # an error in its place
        stream = rpc.stream("worker1", function, args=(5, 2))
        assert [next(stream), next(stream)] == [0, 1]
        with pytest.raises(LookupError, match="at 2"):
            next(stream)
        assert list(stream) == []
        with pytest.raises(LookupError, match="at 2"):
            asyncio.run(read(function, 5, 2))
    # the look-ahead is bounded, and the end of a ``with`` statement closes the generator
    with rpc.stream("worker1", count, args=(1000,), look_ahead=3) as stream:
        assert next(stream) == 0
        until(lambda: len(rpc.rpc_sync("worker1", seen)) == 4)
    assert ended("closed")
    assert ended()
    assert list(stream) == []
    # an iterator that is dropped, and one that is closed before anything has come
    stream = rpc.stream("worker1", count_async, args=(1000,))
    assert next(stream) == 0
    del stream
    gc.collect()
    assert ended()
    rpc.stream("worker1", count, args=(1000,)).close()
    # cancellation where an asynchronous generator awaits; the timeout of a value
    with rpc.stream("worker1", wait_async, timeout=0.05) as stream:
        assert next(stream) == 1
        with pytest.raises(RpcTimeoutError, match=r"worker1. has given no further value within 0\.05 s"):
            next(stream)
    assert ended("cancelled")
    assert ended()
    stream = rpc.stream("worker1", wait_for_gate, timeout=0.05)
    assert next(stream) == 1
    with pytest.raises(TimeoutError):
        next(stream)
    rpc.rpc_sync("worker1", open_gate)
    late = rpc.stream("worker1", numbers_of, args=([7],))
    assert next(late) == 7
    until(lambda: stream._source.next().done())
    assert list(stream) == [2], "a value that was late is not lost"
    # modes last from value to value; tensors and references
    assert list(rpc.stream("worker1", modes)) == [[False], [False], [True]]
    for number, each in enumerate(rpc.stream("worker1", batches, look_ahead=1)):
        assert torch.equal(each["x"], torch.full((300, 1000), float(number)))
        assert each["reference"].to_here() == number
    # what is no generator
    with pytest.raises(TypeError, match=r"rpc\.stream needs a generator .*no_generator"):
        next(rpc.stream("worker1", cast("Any", no_generator)))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'end'"):
        next(rpc.stream("worker1", count))
    for wrong in (-1, 2.0, True):
        with pytest.raises(ValueError, match="look_ahead is a number of values"):
            rpc.stream("worker1", count, look_ahead=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a timeout is a number of seconds"):
        rpc.stream("worker1", count, timeout=-2)
    with pytest.raises(SerializationError, match=r"rpc\.stream"):
        rpc.rpc_sync("worker1", count, args=(3,))
    with pytest.raises(SerializationError, match=r"rpc\.stream"):
        rpc.rpc_sync("worker1", count_async, args=(3,))
    # one that is left open does not keep the group from ending
    _left_open.append(rpc.stream("worker1", wait_async))
    assert next(_left_open[0]) == 1


def read_until_lost(worker: Worker) -> list[int]:
    worker.join()
    got: list[int] = []
    stream = rpc.stream("worker1", count, args=(1 << 40,), timeout=0)
    got.append(next(stream))
    worker.report("reading")
    with pytest.raises(WorkerLostError):
        got.extend(stream)
    rpc.shutdown(graceful=False)
    return got


def serve_until_killed(worker: Worker) -> None:
    worker.join()
    worker.wait_for("never")


def test_the_death_of_the_callee_is_told(run_workers: RunWorkers) -> None:
    workers = run_workers.start([read_until_lost, serve_until_killed], 2)
    workers[0].wait_for("reading")
    workers[1].kill()
    got = workers[0].result()
    assert got == list(range(len(got)))


def read_and_wait(worker: Worker) -> None:
    worker.join()
    stream = rpc.stream("worker1", count, args=(1000,))
    other = rpc.stream("worker1", wait_async)
    assert next(stream) == 0
    assert next(other) == 1
    worker.report("reading")
    worker.wait_for("never")


def see_the_end(worker: Worker) -> bool:
    worker.join()
    worker.wait_for("killed")
    until(lambda: "cancelled" in _seen and "closed" in _seen)
    rpc.shutdown(graceful=False)
    return True


def test_the_generators_of_a_lost_caller_are_closed(run_workers: RunWorkers) -> None:
    workers = run_workers.start([read_and_wait, see_the_end], 2)
    workers[0].wait_for("reading")
    workers[0].kill()
    workers[1].tell("killed")
    assert workers[1].result()
