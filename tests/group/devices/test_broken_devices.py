"""Requests at a worker whose device does not work: their callers get the error."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dist_autograd import backward, context
from farcall import rpc
from rpc.devices.installation import Devices
from rpc.devices.streams import Shared, Streams
from tests.support.device_groups import one_to_one
from tests.support.devices import FIRST, device_kind, on_devices
from tests.support.workers import RunWorkers, Worker

__all__ = ["device_kind"]


class Broken(RuntimeError):
    pass


_left: dict[str, int] = {}
"""By what this worker does with a device, the number of times that it still works."""


def _works(what: str) -> None:
    left = _left.get(what)
    if left is not None:
        _left[what] = left - 1
        if not left:
            del _left[what]
            raise Broken(f"no {what}")


def _break_once() -> None:
    """Have what this worker does with a device fail once, when ``fail`` says so."""
    enter, work_on_object = Streams.__enter__, Devices.work_on_object

    def enter_if_it_works(self: Streams) -> Streams:
        _works("streams")
        return enter(self)

    def work_if_it_works(self: Devices) -> Shared:
        _works("work")
        return work_on_object(self)

    Streams.__enter__ = enter_if_it_works  # type: ignore[method-assign, assignment]
    Devices.work_on_object = work_if_it_works  # type: ignore[method-assign]


def fail(what: str = "streams", after: int = 0) -> None:
    _left[what] = after


def make(value: float) -> torch.Tensor:
    return torch.full((10,), value, device=FIRST)


async def fail_to_answer() -> int:
    fail()
    return 1


def fail_to_make() -> torch.Tensor:
    fail("work")
    return make(1.0)


@rpc.functions.async_execution
def fail_to_complete(after: int) -> torch.futures.Future[torch.Tensor]:
    fail(after=after)
    return rpc.rpc_async("worker0", make, args=(1.0,))


@on_devices
def call_a_broken_worker(worker: Worker) -> dict[str, str]:
    _break_once()
    said: dict[str, str] = {}
    with worker.group(**one_to_one(worker), rpc_timeout=15.0):
        if worker.rank:
            return said

        def note(what: str, begin: Callable[[], object]) -> None:
            try:
                begin()
            except Exception as error:
                said[what] = type(error).__name__
            else:
                said[what] = "no error"

        def broken() -> str:
            rpc.rpc_sync("worker1", fail)
            return "worker1"

        note("call", lambda: rpc.rpc_sync(broken(), make, args=(1.0,)))
        note("answer of a coroutine", lambda: rpc.rpc_sync("worker1", fail_to_answer))
        note("future's value", lambda: rpc.rpc_sync("worker1", fail_to_complete, args=(0,)))
        note("object", lambda: rpc.remote("worker1", fail_to_make).rpc_sync().sum())
        made = rpc.remote("worker1", make, args=(1.0,))
        made.to_here()
        broken()
        note("method", lambda: made.rpc_sync().sum())
        broken()
        note("to_here", made.to_here)
        leaf = torch.ones(10, device=FIRST, requires_grad=True)
        with context() as number:
            loss = rpc.rpc_sync("worker1", torch.sum, args=(leaf,))
            broken()
            note("backward", lambda: backward(number, [loss]))
        note("callback", lambda: rpc.rpc_sync("worker1", fail_to_complete, args=(1,)))
        note("later call", lambda: rpc.rpc_sync("worker1", make, args=(1.0,)))
    return said


def test_callers_of_a_worker_whose_device_does_not_work_get_the_error(
    run_workers: RunWorkers, device_kind: str
) -> None:
    said = run_workers(call_a_broken_worker, 2, args=("eager",), time_limit=60)[0]
    succeed = {"callback": "no error", "later call": "no error"}
    failed = ["call", "answer of a coroutine", "future's value", "object", "method", "to_here"]
    assert said == dict.fromkeys(failed, "Broken") | {"backward": "BackwardError"} | succeed
