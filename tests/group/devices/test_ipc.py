"""Large device tensors between workers of one host, which read each other's memory."""

from __future__ import annotations

import logging
import queue
from logging.handlers import QueueHandler
from typing import Any

import pytest
import torch

from dist_autograd import backward, context, get_gradients
from farcall import rpc
from rpc.devices.ipc import Import
from tests.support.device_groups import (
    LARGE,
    in_device_group,
    is_read_in_place,
    on_device_workers,
    one_to_one,
    until_agreed,
)
from tests.support.devices import FIRST, Used, device_kind, is_all, late, left, mode, used
from tests.support.workers import Worker

__all__ = ["device_kind", "mode"]

_opened: list[int] = []
"""Devices whose tensors this worker has read in place."""


def _count_imports() -> None:
    copy_to = Import.copy_to

    def counting(self: Import, target: torch.Tensor) -> None:
        _opened.append(0)
        copy_to(self, target)

    Import.copy_to = counting  # type: ignore[method-assign]


@rpc.allow_function
def opened() -> int:
    return len(_opened)


@rpc.allow_function
def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


@in_device_group()
def test_memory_of_the_other_worker_is_read_in_order() -> None:
    _count_imports()
    until_agreed("worker0", "worker1")
    with torch.Stream(device=FIRST):
        assert is_all(rpc.rpc_sync("worker1", double, args=(late(3.0, FIRST, LARGE),)), 6.0)
    tensor = late(4.0, FIRST, LARGE)
    future = rpc.rpc_async("worker1", double, args=(tensor,))
    del tensor
    again = torch.full((LARGE,), 9.0, device=FIRST)
    with torch.Stream(device=FIRST):
        assert is_all(future.wait(), 8.0)
    views = torch.arange(4.0 * LARGE, device=FIRST).reshape(2, 2, LARGE)
    sent = [views[0], views[1].T, views]
    for mine, theirs in zip(sent, rpc.rpc_sync("worker1", _same, args=(sent,)), strict=True):
        assert torch.equal(mine.cpu(), theirs.cpu())
    leaf = torch.full((LARGE,), 2.0, device=FIRST, requires_grad=True)
    with context() as number:
        backward(number, [rpc.rpc_sync("worker1", double, args=(leaf * leaf,)).sum()])
        assert is_all(get_gradients(number)[leaf], 8.0)
    assert is_all(again, 9.0)
    assert opened() >= 6


def _same(value: Any) -> Any:
    return value


@pytest.mark.parametrize("without", [0, 1])
@on_device_workers(mode="random")
def test_a_worker_without_shared_memory_is_sent_copies(worker: Worker, without: int) -> None:
    options = {"shared_memory_bytes": 0} if worker.rank == without else {}
    with worker.group(**one_to_one(worker), **options):
        if worker.rank:
            return
        before = used()
        for value in (1.0, 2.0, 3.0):
            assert is_all(rpc.rpc_sync("worker1", double, args=(late(value, FIRST, LARGE),)), 2 * value)
        assert left(before) == Used(0, 0, 0)


@on_device_workers(mode="random")
def test_a_worker_in_safe_mode_opens_no_memory_of_others(worker: Worker) -> None:
    """Drivers check little of a handle, so one that a member makes up could crash the worker."""
    _count_imports()
    refused = queue.SimpleQueue[logging.LogRecord]()
    logger, handler = logging.getLogger("rpc.devices.ipc"), QueueHandler(refused)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    safe: dict[str, Any] = {"deserialization": "safe"} if worker.rank else {}
    with worker.group(**one_to_one(worker), **safe):
        if worker.rank:
            return
        assert bool((rpc.rpc_sync("worker1", double, args=(torch.full((LARGE,), 3.0),)) == 6.0).all())
        said = refused.get(timeout=20).getMessage()  # it was offered memory when the workers met
        assert "it is in safe mode" in said
        with pytest.raises(RuntimeError, match=f"it is on device {FIRST}"):
            rpc.rpc_sync("worker1", double, args=(torch.ones(LARGE, device=FIRST),))
        assert opened() == rpc.rpc_sync("worker1", opened) == 0
        assert not is_read_in_place("worker1")
