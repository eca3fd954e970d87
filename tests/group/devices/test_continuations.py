"""Values of callbacks given to ``then``: streams wait for their tensors, wherever in the value they are."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from farcall import rpc
from tests.support.device_groups import one_to_one
from tests.support.devices import FIRST, SIZE, device_kind, is_all, late, mode, on_devices, sleep
from tests.support.workers import RunWorkers, Worker

__all__ = ["device_kind", "mode"]


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Policy:
    """An object that can be called."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __call__(self) -> Tensor:
        return self.tensor


def _nested(tensor: Tensor) -> list[Any]:
    value: list[Any] = [tensor]
    for _ in range(12):
        value = [value]
    return value


def _innermost(value: Any) -> Tensor:
    while isinstance(value, list):
        (value,) = value
    found: Tensor = value
    return found


VALUES: list[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = [
    (lambda tensor: {tensor: 1}, lambda value: next(iter(value))),
    (lambda tensor: deque([tensor]), lambda value: value[0]),
    (lambda tensor: partial(torch.add, tensor), lambda value: value.args[0]),
    (lambda tensor: lambda: tensor, lambda value: value()),
    (_nested, _innermost),
    (Slotted, lambda value: value.tensor),
    (Policy, lambda value: value.tensor),
    (lambda tensor: Policy(tensor).__call__, lambda value: value()),
]
"""Ways to put a tensor into a value, and to take it out again."""


def double(tensor: Tensor) -> Tensor:
    return tensor * 2


@on_devices
def wrap(worker: Worker) -> list[bool]:
    with worker.group(**one_to_one(worker)):
        if worker.rank:
            return []
        found = []
        for (put, take), retries in product(VALUES, (0, 1)):

            def add_late(doubled: rpc.Future[Tensor], put: Callable[[Tensor], Any] = put) -> Any:
                sleep(FIRST)
                return put(doubled.wait() + 1)

            ones = torch.ones(SIZE, device=FIRST)
            future = rpc.rpc_async("worker1", double, args=(ones,), retries=retries).then(add_late)
            with torch.Stream(device=FIRST):
                found.append(is_all(take(future.wait()), 3.0))
        return found


def test_streams_wait_for_tensors_anywhere_in_the_value_of_a_callback(
    run_workers: RunWorkers, mode: str
) -> None:
    assert run_workers(wrap, 2, args=(mode,), time_limit=60)[0] == [True] * (2 * len(VALUES))


def double_late(tensor: Tensor) -> Tensor:
    sleep(FIRST)
    return tensor * 2


def _calls() -> list[torch.futures.Future[Any]]:
    ones = torch.ones(SIZE, device=FIRST)
    return [rpc.rpc_async("worker1", double_late, args=(ones,)) for _ in range(2)]


def _sum(collected: torch.futures.Future[Any]) -> Tensor:
    sleep(FIRST)
    first, second = (each.wait() for each in collected.wait())
    total: Tensor = first + second
    return total


def sum_of_calls() -> torch.futures.Future[Tensor]:
    return torch.futures.collect_all(_calls()).then(_sum)


@rpc.functions.async_execution
def answer_sum() -> torch.futures.Future[Tensor]:
    return sum_of_calls()


def fail() -> None:
    raise LookupError("as it is told")


@on_devices
def collect(worker: Worker) -> list[bool]:
    with worker.group(**one_to_one(worker)):
        if worker.rank:
            return []
        found = []
        for _ in range(2):
            with torch.Stream(device=FIRST):
                found += [is_all(each.wait(), 2.0) for each in torch.futures.collect_all(_calls()).wait()]
                found += [is_all(value, 2.0) for value in torch.futures.wait_all(_calls())]
                found.append(is_all(sum_of_calls().wait(), 4.0))
                done = sum_of_calls()
                done.wait()
            with torch.Stream(device=FIRST):
                found.append(is_all(done.wait(), 4.0))
                found.append(is_all(rpc.rpc_sync("worker1", answer_sum), 4.0))
        changed = _calls()
        collected = torch.futures.collect_all(changed)
        changed.clear()
        found.append(len(collected.wait()) == 2)
        changed = list(collected.wait())
        found += [_are_themselves(changed), _is_freed_though_it_has_failed(), _are_copied_in_a_child(changed)]
    return [*found, not _are_themselves(changed)]


def _are_themselves(calls: list[Any]) -> bool:
    """Whether futures that are collected are those that were given, and no copies."""
    return torch.futures.collect_all(calls).wait()[0] is calls[0]


class _Noted:
    """What is noted at a future, and freed with it."""


def _is_freed_though_it_has_failed() -> bool:
    failing: list[Any] = [*_calls(), rpc.rpc_async("worker1", fail)]
    failing[-1].note = _Noted()
    freed = threading.Event()
    weakref.finalize(failing[-1].note, freed.set)
    with pytest.raises(LookupError, match="as it is told"):
        torch.futures.collect_all(failing).wait()
    del failing
    gc.collect()
    return freed.wait(10)


def _are_copied_in_a_child(calls: list[Any]) -> bool:
    child = os.fork()
    if not child:
        os._exit(_are_themselves(calls))
    return os.waitpid(child, 0)[1] == 0


def test_streams_wait_for_tensors_of_collected_calls(run_workers: RunWorkers, mode: str) -> None:
    assert run_workers(collect, 2, args=(mode,), time_limit=60)[0] == [True] * 19


@rpc.functions.async_execution
def answer_from_a_thread(is_done: bool) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[FIRST])

    def complete() -> None:
        with torch.Stream(device=FIRST):
            future.set_result(late(9.0))

    thread = threading.Thread(target=complete)
    thread.start()
    if is_done:
        thread.join()
    return future


@on_devices
def get_from_a_thread(worker: Worker) -> list[bool]:
    with worker.group(**one_to_one(worker)):
        if worker.rank:
            return []
        return [is_all(rpc.rpc_sync("worker1", answer_from_a_thread, args=(each,)), 9.0) for each in (0, 1)]


def test_a_program_s_own_future_names_its_devices(run_workers: RunWorkers, mode: str) -> None:
    assert run_workers(get_from_a_thread, 2, args=(mode,), time_limit=60)[0] == [True] * 2


@rpc.functions.async_execution
def answer_late() -> rpc.Future[Tensor]:
    return rpc.rpc_async("worker0", int).then(lambda _: late(9.0))


@on_devices
def make(worker: Worker) -> list[bool]:
    with worker.group(**one_to_one(worker)):
        if worker.rank:
            return []
        found = []
        for _ in range(2):
            first = rpc.rpc_async("worker1", int).then(lambda _: late(4.0))
            second = first.then(lambda made: made.wait() + 1)
            third = rpc.rpc_async("worker1", int).then(lambda _: None).then(lambda _: late(6.0))
            with torch.Stream(device=FIRST):
                found += [is_all(third.wait(), 6.0), is_all(second.wait(), 5.0), is_all(first.wait(), 4.0)]
                found.append(is_all(rpc.rpc_sync("worker1", answer_late), 9.0))
        return found


def test_streams_wait_for_tensors_that_a_callback_has_made(run_workers: RunWorkers, mode: str) -> None:
    assert run_workers(make, 2, args=(mode,), time_limit=60)[0] == [True] * 8
