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
from tests.support.device_groups import in_device_group, on_device_workers, one_to_one
from tests.support.devices import FIRST, SIZE, device_kind, is_all, late, mode, sleep
from tests.support.workers import Worker

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


@in_device_group()
def test_streams_wait_for_tensors_anywhere_in_the_value_of_a_callback() -> None:
    for (put, take), retries in product(VALUES, (0, 1)):

        def add_late(doubled: rpc.Future[Tensor], put: Callable[[Tensor], Any] = put) -> Any:
            sleep(FIRST)
            return put(doubled.wait() + 1)

        ones = torch.ones(SIZE, device=FIRST)
        future = rpc.rpc_async("worker1", double, args=(ones,), retries=retries).then(add_late)
        with torch.Stream(device=FIRST):
            assert is_all(take(future.wait()), 3.0)


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


def _add_late(doubled: torch.futures.Future[Any]) -> Tensor:
    sleep(FIRST)
    added: Tensor = doubled.wait() + 1
    return added


@in_device_group()
def test_streams_wait_for_what_is_made_of_collected_callbacks() -> None:
    following: list[Any] = [each.then(_add_late) for each in _calls()]
    total = torch.futures.collect_all(following).then(_sum)
    with torch.Stream(device=FIRST):
        assert is_all(total.wait(), 6.0)


def fail() -> None:
    raise LookupError("as it is told")


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


@on_device_workers()
def test_streams_wait_for_tensors_of_collected_calls(worker: Worker) -> None:
    changed: list[Any] = []
    with worker.group(**one_to_one(worker)):
        if worker.rank:
            return
        for _ in range(2):
            with torch.Stream(device=FIRST):
                assert all(is_all(each.wait(), 2.0) for each in torch.futures.collect_all(_calls()).wait())
                assert all(is_all(value, 2.0) for value in torch.futures.wait_all(_calls()))
                assert is_all(sum_of_calls().wait(), 4.0)
                done = sum_of_calls()
                done.wait()
            with torch.Stream(device=FIRST):
                assert is_all(done.wait(), 4.0)
                assert is_all(rpc.rpc_sync("worker1", answer_sum), 4.0)
        changed = _calls()
        collected = torch.futures.collect_all(changed)
        changed.clear()
        assert len(collected.wait()) == 2
        changed = list(collected.wait())
        assert _are_themselves(changed)
        assert _is_freed_though_it_has_failed()
        assert _are_copied_in_a_child(changed)
    assert not _are_themselves(changed)


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


@in_device_group()
def test_a_program_s_own_future_names_its_devices() -> None:
    for is_done in (False, True):
        assert is_all(rpc.rpc_sync("worker1", answer_from_a_thread, args=(is_done,)), 9.0)


@rpc.functions.async_execution
def answer_late() -> rpc.Future[Tensor]:
    return rpc.rpc_async("worker0", int).then(lambda _: late(9.0))


@in_device_group()
def test_streams_wait_for_tensors_that_a_callback_has_made() -> None:
    for _ in range(2):
        first = rpc.rpc_async("worker1", int).then(lambda _: late(4.0))
        second = first.then(lambda made: made.wait() + 1)
        third = rpc.rpc_async("worker1", int).then(lambda _: None).then(lambda _: late(6.0))
        with torch.Stream(device=FIRST):
            assert is_all(third.wait(), 6.0)
            assert is_all(second.wait(), 5.0)
            assert is_all(first.wait(), 4.0)
            assert is_all(rpc.rpc_sync("worker1", answer_late), 9.0)
