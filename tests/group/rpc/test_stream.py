"""``rpc.stream``: values of a generator of another worker come one by one, whatever happens."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

import rpc
from rpc import generators
from rpc.errors import RemoteError, RpcError, RpcTimeoutError, SerializationError, WorkerLostError
from rpc.runtime.current import current_agent
from tests.support.serving import in_worker0
from tests.support.streams import SOON, until
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


class SerializedBy:
    """Arrives as the name of the thread that has serialized it."""

    def __reduce__(self) -> Any:
        return str, (threading.current_thread().name,)


async def growing() -> AsyncIterator[list[Any]]:
    """Give the same list again and again, which has grown in the meantime."""
    items: list[Any] = [SerializedBy()]
    for number in range(3):
        items.append(number)
        yield items


def exits() -> Iterator[int]:
    yield 1
    raise SystemExit(3)


async def is_cancelled() -> AsyncIterator[int]:
    yield 1
    awaited = asyncio.get_running_loop().create_future()
    awaited.cancel()
    await awaited


async def no_generator() -> int:
    return 1


async def read(function: Any, *args: Any, **options: Any) -> list[int]:
    return [value async for value in rpc.stream("worker1", function, args=args, **options)]


def ended(what: str = "finally") -> bool:
    until(lambda: what in rpc.rpc_sync("worker1", seen))
    return True


def patient_next(stream: Iterator[int]) -> int | None:
    """The next value, however often its time is over before; None at the end."""
    while True:
        try:
            return next(stream, None)
        except TimeoutError:
            pass


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
        assert patient_next(stream) == 1
        with pytest.raises(RpcTimeoutError, match=r"worker1. has given no further value within 0\.05 s"):
            next(stream)
    assert ended("cancelled")
    assert ended()
    stream = rpc.stream("worker1", wait_for_gate, timeout=0.05)
    assert patient_next(stream) == 1
    with pytest.raises(TimeoutError):
        next(stream)
    rpc.rpc_sync("worker1", open_gate)
    late = rpc.stream("worker1", numbers_of, args=([7],))
    assert next(late) == 7
    until(lambda: stream._source.next().done())
    assert [patient_next(stream), patient_next(stream)] == [2, None], "a value that was late is not lost"
    # modes last from value to value; tensors and references
    assert list(rpc.stream("worker1", modes)) == [[False], [False], [True]]
    for number, each in enumerate(rpc.stream("worker1", batches, look_ahead=1)):
        assert torch.equal(each["x"], torch.full((300, 1000), float(number)))
        assert each["reference"].to_here() == number
    # what is no generator
    with pytest.raises(TypeError, match=r"rpc\.stream needs a generator .*no_generator"):
        next(rpc.stream("worker1", no_generator))  # type: ignore[arg-type]
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


@in_worker0()
def test_what_is_unusual() -> None:
    # errors that are none of ``Exception``
    for function in (exits, is_cancelled):
        stream = rpc.stream("worker1", function, look_ahead=2, timeout=0)
        assert next(stream) == 1
        with pytest.raises(RemoteError):
            next(stream)
    # the loop of all coroutines does not serialize and send
    got = list(rpc.stream("worker1", growing))
    assert [each[1:] for each in got] == [[0], [0, 1], [0, 1, 2]]
    assert not [each[0] for each in got if "coroutines" in each[0]]
    # a stream of a caller that is not in the group
    rpc.rpc_sync("worker1", generators.open_stream, args=((1, 2), count, (5,), {}))
    assert rpc.rpc_sync("worker1", generators.next_value, args=((1, 2), 0)) == []
    # dropped in a forked child, in which a lock is held that nothing releases
    stream = rpc.stream("worker1", count, args=(1000,))
    assert next(stream) == 0
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with current_agent().executor._lock:
            held.set()
            release.wait(SOON)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(SOON)
    child = os.fork()
    if child == 0:
        try:
            del stream
        finally:
            os._exit(0)
    release.set()
    holder.join()
    until(lambda: os.waitpid(child, os.WNOHANG)[0])
    assert next(stream) == 1
    stream.close()


def read_during_shutdown(worker: Worker) -> None:
    worker.join()
    between = rpc.stream("worker1", count, args=(1000,), look_ahead=0)
    inside = rpc.stream("worker1", wait_async)
    assert [next(between), next(inside)] == [0, 1]
    caught: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(RpcError) as raised:
            next(inside)
        caught.append(raised.value)

    reader = threading.Thread(target=wait)
    reader.start()
    rpc.shutdown()
    reader.join()
    with pytest.raises(RpcError) as raised:
        next(between)
    for error in (*caught, raised.value):
        assert "this worker is shutting down: the stream from worker 'worker1' was closed" in str(error)
    assert len(caught) == 1


def just_serve(worker: Worker) -> None:
    with worker.group():
        pass


def test_a_reader_is_told_of_its_workers_shutdown(run_workers: RunWorkers) -> None:
    run_workers([read_during_shutdown, just_serve])


_reading = threading.Semaphore(0)
_leaving = threading.Event()


def relay() -> Iterator[int]:
    """Give what a generator on ``worker0`` gives; most of it when this worker's program is at its end."""
    for value in rpc.stream("worker0", numbers_of, args=([1, 2, 3],), look_ahead=0):
        _reading.release()
        assert _leaving.wait(SOON)
        yield value


def relayed() -> list[int]:
    return list(relay())


def read_relayed(worker: Worker) -> tuple[list[int], list[int]]:
    with worker.group():
        called = rpc.rpc_async("worker1", relayed)
        return list(rpc.stream("worker1", relay)), called.wait()


def shut_down_meanwhile(worker: Worker) -> None:
    worker.join()
    for _ in range(2):
        assert _reading.acquire(timeout=SOON)
    current_agent().lifecycle.hooks.leaving.append(_leaving.set)
    rpc.shutdown()


def test_shutdown_leaves_the_streams_that_callees_read(run_workers: RunWorkers) -> None:
    got = run_workers([read_relayed, shut_down_meanwhile])[0]
    assert got == ([1, 2, 3], [1, 2, 3])


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
