"""The arguments of a failed call are freed when nothing uses them any more, without the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest
import torch

import rpc
from rpc.errors import RpcTimeoutError, SerializationError
from tests.support.serving import in_standing_group
from tests.support.streams import SOON

_freed: dict[str, threading.Event] = {}
_gate = threading.Event()


class Batch:
    """An argument of a call."""

    def __init__(self, name: str) -> None:
        self.name = name


class Unsendable(Batch):
    def __reduce__(self) -> NoReturn:
        raise TypeError("has a lock")


def watch(batch: Batch) -> None:
    event = _freed.setdefault(batch.name, threading.Event())
    weakref.finalize(batch, event.set)


def is_freed(name: str) -> bool:
    return _freed.setdefault(name, threading.Event()).wait(SOON)


@contextmanager
def without_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def collects(wanted: bool) -> None:
    gc.enable() if wanted else gc.disable()


def refuse(batch: Batch) -> NoReturn:
    watch(batch)
    raise ValueError("bad batch")


async def refuse_later(batch: Batch) -> NoReturn:
    watch(batch)
    await asyncio.sleep(0)
    raise ValueError("bad batch")


@rpc.functions.async_execution
def refuse_by_future(batch: Batch) -> torch.futures.Future[Any]:
    watch(batch)
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_exception(ValueError("bad batch"))
    return future


@rpc.functions.async_execution
def refuse_where_it_is_caught(batch: Batch) -> torch.futures.Future[Any]:
    watch(batch)
    future: torch.futures.Future[Any] = rpc.Future()
    try:
        raise ValueError("bad batch")
    except ValueError as error:
        future.set_exception(error)
    return future


@rpc.functions.async_execution
def refuse_on_thread(batch: Batch) -> torch.futures.Future[Any]:
    watch(batch)
    future: torch.futures.Future[Any] = torch.futures.Future()

    def work() -> None:
        try:
            raise KeyError(batch.name)
        except KeyError:
            future.set_exception(ValueError("bad batch"))

    threading.Thread(target=work).start()
    return future


def at_gate(batch: Batch) -> None:
    watch(batch)
    _gate.wait(SOON)


async def sleep_long(batch: Batch) -> None:
    watch(batch)
    await asyncio.sleep(3600)


def open_gate() -> None:
    _gate.set()


def has(name: str) -> bool:
    return name in _freed


CALLEES: list[Callable[..., Any]] = [
    *(refuse, refuse_later, refuse_by_future, refuse_where_it_is_caught, refuse_on_thread)
]


@in_standing_group()
def test_failed_functions_keep_no_arguments() -> None:
    rpc.rpc_sync("worker1", collects, args=(False,))
    for function in CALLEES:
        for how in (rpc.rpc_async, rpc.remote):
            name = f"{function.__name__}, {how.__name__}"
            made: Any = how("worker1", function, args=(Batch(name),))
            with pytest.raises(ValueError, match="bad batch"):
                made.to_here() if isinstance(made, rpc.RRef) else made.wait()
            assert rpc.rpc_sync("worker1", is_freed, args=(name,)), name


@in_standing_group()
def test_a_cancelled_coroutine_keeps_no_arguments() -> None:
    rpc.rpc_sync("worker1", collects, args=(False,))
    future = rpc.rpc_async("worker1", sleep_long, args=(Batch("cancelled"),))
    while not rpc.rpc_sync("worker1", has, args=("cancelled",)):
        pass
    future.cancel()
    with pytest.raises(CancelledError):
        future.wait()
    assert rpc.rpc_sync("worker1", is_freed, args=("cancelled",))


@in_standing_group()
def test_a_failed_call_keeps_no_arguments_at_its_caller() -> None:
    rref: rpc.RRef[dict[str, int]] = rpc.remote("worker1", dict)

    def timed_out(batch: Batch) -> None:
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("worker1", at_gate, args=(batch,), timeout=0.01)

    def not_fetched(batch: Batch) -> None:
        with pytest.raises(RpcTimeoutError):
            rpc.remote("worker1", at_gate, args=(batch,)).to_here(timeout=0.01)

    def refused(batch: Batch) -> None:
        for function in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(SerializationError, match="has a lock"):
                function("worker1", abs, args=([Unsendable(batch.name), batch],))

    def refused_by_proxy(batch: Batch) -> None:
        with pytest.raises(SerializationError, match="has a lock"):
            rref.rpc_sync().update([Unsendable(batch.name), batch])

    with without_collector():
        for make in (timed_out, not_fetched, refused, refused_by_proxy):
            batch = Batch(make.__name__)
            watch(batch)
            make(batch)
            del batch
            assert is_freed(make.__name__), make.__name__
    rpc.rpc_sync("worker1", open_gate)


def fail(*_: Any) -> NoReturn:
    raise ValueError("bad batch")


def cancel(under_way: rpc.Future[Any]) -> rpc.Future[Any]:
    assert under_way.cancel()
    return under_way


def call_again(under_way: rpc.Future[Any]) -> rpc.Future[Any]:
    return rpc.rpc_async("worker1", fail)


def call_with_retries(under_way: rpc.Future[Any]) -> rpc.Future[Any]:
    return rpc.rpc_async("worker1", fail, retries=1)


def go_on(under_way: rpc.Future[Any]) -> rpc.Future[Any]:
    return cancel(under_way).then(fail)


def collect(under_way: rpc.Future[Any]) -> torch.futures.Future[Any]:
    return torch.futures.collect_all([cancel(under_way)])


@pytest.mark.parametrize("handle", [cancel, call_again, call_with_retries, go_on, collect])
@in_standing_group()
def test_a_call_that_fails_where_an_error_is_handled_does_not_keep_what_the_handler_has(
    handle: Callable[[rpc.Future[Any]], torch.futures.Future[Any]],
) -> None:
    def use(batch: Batch) -> None:
        under_way = rpc.rpc_async("worker1", asyncio.sleep, args=(3600,))
        try:
            under_way.wait(0.001)
        except RpcTimeoutError:
            failed = handle(under_way)
            with pytest.raises((CancelledError, ValueError, RuntimeError)):
                failed.wait()
        under_way.cancel()

    batch = Batch(handle.__name__)
    freed = threading.Event()
    weakref.finalize(batch, freed.set)
    use(batch)
    del batch
    gc.collect()
    assert freed.wait(SOON)
