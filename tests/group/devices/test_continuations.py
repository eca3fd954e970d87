"""Values of callbacks given to ``then``: streams wait for their tensors, wherever in the value they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

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
        for put, take in VALUES:

            def add_late(doubled: rpc.Future[Tensor], put: Callable[[Tensor], Any] = put) -> Any:
                sleep(FIRST)
                return put(doubled.wait() + 1)

            future = rpc.rpc_async("worker1", double, args=(torch.ones(SIZE, device=FIRST),)).then(add_late)
            with torch.Stream(device=FIRST):
                found.append(is_all(take(future.wait()), 3.0))
        return found


def test_streams_wait_for_tensors_anywhere_in_the_value_of_a_callback(
    run_workers: RunWorkers, mode: str
) -> None:
    assert run_workers(wrap, 2, args=(mode,), time_limit=60)[0] == [True] * len(VALUES)


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
