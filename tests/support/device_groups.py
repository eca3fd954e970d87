"""Groups whose workers send tensors on devices."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from farcall import rpc
from rpc.devices.ipc import SMALLEST_BYTES
from rpc.runtime.current import current_agent
from tests.support.devices import FIRST, ONE_TO_ONE, on_devices
from tests.support.serving import Body, as_test, task_of
from tests.support.workers import RunWorkers, Task, Worker

LARGE: Final = SMALLEST_BYTES // 4
"""Number of elements, of four bytes each, of the smallest tensor that is read in place."""


def one_to_one(worker: Worker) -> dict[str, Any]:
    """Options with which each worker's devices stand for the same ones of the others."""
    others = [f"worker{rank}" for rank in range(worker.world_size) if rank != worker.rank]
    return {"device_maps": dict.fromkeys(others, ONE_TO_ONE)}


def on_device_workers(
    world_size: int = 2, mode: str = "", run: Callable[[Task, Worker], object] | None = None
) -> Callable[[Body], Body]:
    """Makes a test of a function that runs in each of some workers that have devices, and is in no group.

    Args:
        mode: how streams run; without it, the test is parametrized by the modes.
        run: runs the function.
    """

    def decorate(body: Body) -> Body:
        def test(run_workers: RunWorkers, **given: Any) -> None:
            how = given.pop("mode", mode)
            given.pop("device_kind", None)
            act = task_of(body, given)
            task: Any = functools.partial(_act, act if run is None else functools.partial(run, act), how)
            task.__module__ = body.__module__  # which workers are forked with
            run_workers(task, world_size)

        return as_test(test, body, "device_kind" if mode else "mode")

    return decorate


def in_device_group(world_size: int = 2, mode: str = "", **options: Any) -> Callable[[Body], Body]:
    """Makes a test of a function that runs in ``worker0``, in a group where all others serve, and where each
    worker's devices stand for the same ones of the others. The options are those of ``Worker.group``.
    """
    return on_device_workers(world_size, mode, functools.partial(_act_or_serve, options))


def _act(act: Task, mode: str, worker: Worker) -> None:
    on_devices(act)(worker, mode)


def _act_or_serve(options: dict[str, Any], act: Task, worker: Worker) -> None:
    with worker.group(**one_to_one(worker), **options):
        if not worker.rank:
            act(worker)


def is_read_in_place(by: str) -> bool:
    """Whether another worker reads large tensors in this one's memory."""
    agent: Any = current_agent()
    return bool(agent.calls.requests.border.reads(by, torch.ones(LARGE, device=FIRST)))


def until_agreed(here: str, there: str) -> None:
    """Return when both workers read each other's memory, or fail; none of what is sent for it is large."""
    end = time.monotonic() + 20
    while not (is_read_in_place(there) and rpc.rpc_sync(there, is_read_in_place, args=(here,))):
        rpc.rpc_sync(there, torch.neg, args=(torch.ones(1, device=FIRST),))
        assert time.monotonic() < end, "the workers do not read each other's memory"
