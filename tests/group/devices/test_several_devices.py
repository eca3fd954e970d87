"""SPMD mode whose workers compute on several devices each: what goes wrong, and that nothing stays behind."""

from __future__ import annotations

import contextlib
import threading
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import spmd
from farcall import rpc
from rpc.errors import WorkerLostError
from spmd.engine.errors import OperationError
from spmd.engine.program.redistribution import move
from spmd.engine.worker import interpreter
from tests.support.devices import FIRST, SECOND, device_kind, on_devices
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker

__all__ = ["device_kind"]

PLACES = [f"worker{rank}/{device}" for rank in (1, 2) for device in (FIRST, SECOND)]


def rows() -> Tensor:
    """1 to 4, a number on each rank."""
    tensor = torch.arange(1.0, 5.0).to(spmd.device())
    spmd.mark_sharding(tensor, spmd.Mesh(range(4), (4,), ("x",)), ("x",))
    return tensor


@on_devices
def serve(worker: Worker) -> list[str]:
    """The names of the threads that are left when this worker has left."""
    worker.join()
    before = set(threading.enumerate())
    worker.report("joined")
    rpc.shutdown()

    def left() -> set[str]:
        return {each.name for each in threading.enumerate()} - {each.name for each in before}

    with contextlib.suppress(AssertionError):
        until(lambda: not left())
    return sorted(left())


def serves(worker: Worker) -> list[str]:
    return serve(worker, "random")


def fail_once(rank: int) -> None:
    """To be called remotely: the next move between ranks fails at one of them."""

    def fail(local: Tensor, step: Any, group: Any) -> Tensor:
        if group.rank() == rank:
            patch.stop()
            raise RuntimeError("a cable is loose")
        return move(local, step, group)

    patch = mock.patch.object(interpreter, "move", fail)
    patch.start()


def drive(worker: Worker) -> None:
    worker.join()
    for _ in range(2):
        spmd.use_spmd(PLACES)
        assert spmd.global_device_count() == 4
        kept = rows()
        assert kept.sum().item() == 10.0
        rpc.rpc_sync("worker2", fail_once, args=(3,))
        with pytest.raises(OperationError, match="a cable is loose"):
            (kept * 2).mean().item()
        assert (kept * 3).sum().item() == 30.0
        spmd.shutdown()
    rpc.shutdown()


def test_groups_are_formed_again_after_a_failure_and_in_the_next_session(
    run_workers: RunWorkers, device_kind: str
) -> None:
    assert run_workers([drive, serves, serves])[1:] == [[], []]


def lose(worker: Worker) -> str:
    worker.join()
    spmd.use_spmd(PLACES)
    kept = rows()
    assert kept.sum().item() == 10.0
    worker.report("ready")
    worker.wait_for("killed")
    with pytest.raises(WorkerLostError) as raised:
        (kept * 2).sum().item()
    spmd.shutdown()
    rpc.shutdown(graceful=False)
    return raised.value.worker


def test_a_worker_that_dies_is_lost_with_all_its_ranks(run_workers: RunWorkers, device_kind: str) -> None:
    workers = run_workers.start([lose, serves, serves])
    workers[0].wait_for("ready")
    workers[2].kill()
    workers[0].tell("killed")
    assert workers[0].result() == "worker2"
    assert workers[1].result() == []


def begin_in_vain(worker: Worker) -> str:
    worker.join()
    with pytest.raises(WorkerLostError) as raised:
        spmd.use_spmd(PLACES)
    rpc.shutdown(graceful=False)
    return str(raised.value)


@on_devices
def die_when_it_begins(worker: Worker) -> None:
    worker.join()

    def die(*_: object) -> None:
        worker.die()

    with mock.patch("spmd.engine.worker.served_worker.make", die):
        rpc.shutdown()


def test_a_worker_that_dies_while_ranks_meet_is_named(run_workers: RunWorkers, device_kind: str) -> None:
    workers = run_workers.start([begin_in_vain, serves, lambda worker: die_when_it_begins(worker, "eager")])
    assert workers[0].result().startswith("SPMD mode could not begin: worker 'worker2' is gone: ")
    assert workers[1].result() == []


def leave_ranks_alone(worker: Worker) -> None:
    worker.join()
    spmd.use_spmd(PLACES)
    assert rows().sum().item() == 10.0
    worker.die()


def test_ranks_end_when_the_driver_dies(run_workers: RunWorkers, device_kind: str) -> None:
    workers = run_workers.start([leave_ranks_alone, serves, serves])
    assert [each.result() for each in (workers[1], workers[2])] == [[], []]
