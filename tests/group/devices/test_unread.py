"""Memory that was handed to another worker, which does not read it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from farcall import rpc
from rpc.devices import ipc
from tests.support.device_groups import (
    LARGE,
    in_device_group,
    is_read_in_place,
    on_device_workers,
    one_to_one,
    until_agreed,
)
from tests.support.devices import (
    COUNT,
    FIRST,
    KIND,
    ONE_TO_ONE,
    Used,
    device_kind,
    is_all,
    left,
    on_devices,
    used,
)
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker

__all__ = ["device_kind"]

pytestmark = pytest.mark.skipif(KIND != "sim", reason="counts blocks that were handed over")


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def _exported() -> int:
    from tests.accelerator import device

    return sum(device.exported_blocks(index) for index in range(COUNT))


def _fail(*_: object) -> None:
    raise RuntimeError("out of memory")


def _has_other_devices(handles: Any) -> None:
    handles.identity = lambda self, index: f"other {index}"


def _cannot_open(handles: Any) -> None:
    handles.open = _fail


def _fails_once(handles: Any) -> None:
    """Of the tensors that are read in place, the first cannot be opened."""
    copy_to, opened = ipc.Import.copy_to, handles.open

    def fail_once(self: ipc.Import, target: torch.Tensor) -> None:
        ipc.Import.copy_to = copy_to  # type: ignore[method-assign]
        handles.open = _fail
        try:
            copy_to(self, target)
        finally:
            handles.open = opened

    ipc.Import.copy_to = fail_once  # type: ignore[method-assign]


@on_devices
def offer(worker: Worker, hinder: Callable[[Any], None]) -> None:
    handles: Any = type(ipc.handles_of(KIND))
    offers = threading.Semaphore(0)
    export = handles.export

    def count(self: Any, tensor: torch.Tensor) -> Any:
        try:
            return export(self, tensor)
        finally:
            offers.release()

    if worker.rank:
        hinder(handles)
    else:
        handles.export = count
    with worker.group(**one_to_one(worker)):
        if worker.rank:
            return
        rpc.rpc_sync("worker1", double, args=(torch.ones(1, device=FIRST),))
        for _ in set(ONE_TO_ONE):
            assert offers.acquire(timeout=20)
        until(lambda: not _exported())
        rpc.rpc_sync("worker1", double, args=(torch.ones(LARGE, device=FIRST),))
        assert not is_read_in_place("worker1")


@pytest.mark.parametrize(
    "hinder",
    [pytest.param(_has_other_devices, marks=pytest.mark.nightly), _cannot_open],
    ids=["other devices", "cannot open"],
)
def test_what_was_offered_and_refused_comes_back(
    run_workers: RunWorkers, device_kind: str, hinder: Callable[[Any], None]
) -> None:
    run_workers(offer, 2, args=("random", hinder), time_limit=60)


@on_device_workers(mode="random")
def test_a_tensor_that_cannot_be_opened_fails_its_call_and_comes_back(worker: Worker) -> None:
    if worker.rank:
        _fails_once(type(ipc.handles_of(KIND)))
    with worker.group(**one_to_one(worker)):
        if worker.rank:
            return
        until_agreed("worker0", "worker1")
        sent = torch.ones(LARGE, device=FIRST)
        with pytest.raises(RuntimeError, match="out of memory"):
            rpc.rpc_sync("worker1", double, args=(sent,))
        assert is_all(rpc.rpc_sync("worker1", double, args=(sent,)), 2.0)
        until(lambda: not _exported())


def _never_end(*_: object) -> None:
    threading.Event().wait()


@on_devices
def offer_to_the_dying(worker: Worker) -> bool:
    if worker.rank:
        handles: Any = type(ipc.handles_of(KIND))
        handles.open = _never_end
    worker.join(**one_to_one(worker))
    if worker.rank == 0:
        rpc.rpc_sync("worker1", double, args=(torch.ones(10, device=FIRST),))
    was_offered = _exported() > 0
    worker.report("offered")
    worker.wait_for("never" if worker.rank else "killed")
    until(lambda: not _exported())
    rpc.shutdown(graceful=False)
    return was_offered


@pytest.mark.nightly
def test_what_was_offered_to_a_worker_that_dies_comes_back(run_workers: RunWorkers, device_kind: str) -> None:
    workers = run_workers.start(offer_to_the_dying, 2, args=("eager",), time_limit=60)
    workers[0].wait_for("offered")
    workers[1].kill()
    workers[0].tell("killed")
    assert workers[0].result()


@on_devices
def leave_without_being_read(worker: Worker) -> bool:
    worker.join(**one_to_one(worker))
    if worker.rank == 0:
        until_agreed("worker0", "worker1")
    worker.report("agreed")
    worker.wait_for("never" if worker.rank else "stopped")
    futures = [rpc.rpc_async("worker1", double, args=(torch.ones(LARGE, device=FIRST),)) for _ in range(2)]
    was_exported = _exported() > 0
    rpc.shutdown(graceful=False)
    for future in futures:
        with contextlib.suppress(RuntimeError):
            future.wait()
    until(lambda: not _exported())
    worker.report("left")
    return was_exported


@pytest.mark.nightly
def test_what_is_not_read_comes_back_when_this_worker_leaves(
    run_workers: RunWorkers, device_kind: str
) -> None:
    workers = run_workers.start(leave_without_being_read, 2, args=("eager",), time_limit=60)
    workers.wait_for("agreed")
    workers[1].stop()
    workers[0].tell("stopped")
    workers[0].wait_for("left")
    workers[1].kill()
    assert workers[0].result()


_ran: list[int] = []


def note(tensor: torch.Tensor) -> None:
    _ran.append(tensor.numel())


def ran() -> list[int]:
    return _ran


@in_device_group(mode="eager")
def test_a_call_that_is_cancelled_before_its_tensors_are_copied_is_not_made() -> None:
    rpc.rpc_sync("worker1", double, args=(torch.ones(10, device=FIRST),))
    before = used()
    gate = torch.Event(KIND)
    stream = torch.Stream(device=FIRST)
    from tests.accelerator import device

    with stream:
        for _ in range(100):
            device.sleep(20_000)
        gate.record()
    torch.accelerator.current_stream(torch.device(FIRST)).wait_event(gate)
    future = rpc.rpc_async("worker1", note, args=(torch.ones(10, device=FIRST),))
    cancelled = future.cancel()
    del future
    rpc.rpc_sync("worker1", note, args=(torch.ones(20, device=FIRST),))
    assert (cancelled, rpc.rpc_sync("worker1", ran), left(before)) == (True, [20], Used(0, 0, 0))
