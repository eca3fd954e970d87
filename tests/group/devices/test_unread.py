"""Memory that was handed to another worker, which does not read it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from farcall import rpc
from rpc.devices import ipc
from rpc.devices.ipc import SMALLEST_BYTES
from tests.support.device_groups import one_to_one
from tests.support.devices import COUNT, FIRST, KIND, Used, device_kind, left, on_devices, used
from tests.support.workers import RunWorkers, Worker

__all__ = ["device_kind"]

LARGE = SMALLEST_BYTES // 4  # elements of four bytes

pytestmark = pytest.mark.skipif(KIND != "sim", reason="counts blocks that were handed over")


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def _exported() -> int:
    from tests.accelerator import device

    return sum(device.exported_blocks(index) for index in range(COUNT))


def _until_none_is_exported() -> int:
    end = time.monotonic() + 10
    while _exported() and time.monotonic() < end:
        time.sleep(0.02)
    return _exported()


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
def call(worker: Worker, hinder: Callable[[Any], None]) -> tuple[list[str], int]:
    said = []
    handles = ipc.handles_of(KIND)
    if worker.rank:
        hinder(type(handles))
    with worker.group(**one_to_one(worker)):
        if worker.rank:
            return [], 0
        for _ in range(5):  # the first are copied, until the workers have agreed how tensors travel
            try:
                rpc.rpc_sync("worker1", double, args=(torch.ones(LARGE, device=FIRST),))
            except RuntimeError as error:
                said.append(str(error))
            time.sleep(0.05)
        return said, _until_none_is_exported()


@pytest.mark.parametrize(
    "hinder",
    [pytest.param(_has_other_devices, marks=pytest.mark.nightly), _cannot_open],
    ids=["other devices", "cannot open"],
)
def test_what_was_offered_and_refused_comes_back(
    run_workers: RunWorkers, device_kind: str, hinder: Callable[[Any], None]
) -> None:
    assert run_workers(call, 2, args=("random", hinder), time_limit=60)[0] == ([], 0)


def test_a_tensor_that_cannot_be_opened_fails_its_call_and_comes_back(
    run_workers: RunWorkers, device_kind: str
) -> None:
    said, behind = run_workers(call, 2, args=("random", _fails_once), time_limit=60)[0]
    assert len(said) == 1
    assert "out of memory" in said[0]
    assert behind == 0


def _never_end(*_: object) -> None:
    threading.Event().wait()


@on_devices
def offer_to_the_dying(worker: Worker) -> tuple[bool, int]:
    if worker.rank:
        handles: Any = type(ipc.handles_of(KIND))
        handles.open = _never_end
    worker.join(**one_to_one(worker))
    if worker.rank == 0:
        rpc.rpc_sync("worker1", double, args=(torch.ones(10, device=FIRST),))
    was_offered = _exported() > 0
    worker.report("offered")
    worker.wait_for("never" if worker.rank else "killed")
    behind = _until_none_is_exported()
    rpc.shutdown(graceful=False)
    return was_offered, behind


@pytest.mark.nightly
def test_what_was_offered_to_a_worker_that_dies_comes_back(run_workers: RunWorkers, device_kind: str) -> None:
    workers = run_workers.start(offer_to_the_dying, 2, args=("eager",), time_limit=60)
    workers[0].wait_for("offered")
    workers[1].kill()
    workers[0].tell("killed")
    assert workers[0].result() == (True, 0)


@on_devices
def leave_without_being_read(worker: Worker) -> tuple[bool, int]:
    worker.join(**one_to_one(worker))
    for _ in range(3):  # until the workers have agreed how tensors travel
        if worker.rank == 0:
            rpc.rpc_sync("worker1", double, args=(torch.ones(LARGE, device=FIRST),))
    worker.report("agreed")
    worker.wait_for("never" if worker.rank else "stopped")
    futures = [rpc.rpc_async("worker1", double, args=(torch.ones(LARGE, device=FIRST),)) for _ in range(2)]
    was_exported = _exported() > 0
    rpc.shutdown(graceful=False)
    for future in futures:
        with contextlib.suppress(RuntimeError):
            future.wait()
    behind = _until_none_is_exported()
    worker.report("left")
    return was_exported, behind


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
    assert workers[0].result() == (True, 0)


_ran: list[int] = []


def note(tensor: torch.Tensor) -> None:
    _ran.append(tensor.numel())


def ran() -> list[int]:
    return _ran


@on_devices
def cancel_early(worker: Worker) -> tuple[bool, list[int], Used]:
    with worker.group(**one_to_one(worker)):
        if worker.rank:
            return False, [], used()
        rpc.rpc_sync("worker1", double, args=(torch.ones(10, device=FIRST),))
        before = used()
        gate = torch.Event(KIND)
        stream = torch.Stream(device=FIRST)
        from tests.accelerator import device

        with stream:
            for _ in range(20):
                device.sleep(20_000)
            gate.record()
        torch.accelerator.current_stream(torch.device(FIRST)).wait_event(gate)
        future = rpc.rpc_async("worker1", note, args=(torch.ones(10, device=FIRST),))
        cancelled = future.cancel()
        del future
        rpc.rpc_sync("worker1", note, args=(torch.ones(20, device=FIRST),))
        return cancelled, rpc.rpc_sync("worker1", ran), left(before)


def test_a_call_that_is_cancelled_before_its_tensors_are_copied_is_not_made(
    run_workers: RunWorkers, device_kind: str
) -> None:
    assert run_workers(cancel_early, 2, args=("eager",), time_limit=60)[0] == (True, [20], Used(0, 0, 0))
