"""A worker is lost while a process group is formed over RPC: nobody waits for it, and all can leave."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

import rpc
import spmd
from rpc.errors import WorkerLostError
from rpc.runtime.current import current_agent
from spmd.collectives import store
from tests.support.default_device import not_on_devices
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker

PATIENT = {"lost_after": 5, "reconnect_within": 5}


def begin_mode() -> str:
    with pytest.raises(WorkerLostError) as caught:
        spmd.use_spmd()
    return str(caught.value)


def begin_group() -> str:
    with pytest.raises(dist.DistStoreError) as caught:
        spmd.init_process_group(timedelta(seconds=300))
    return str(caught.value)


def drive(worker: Worker, begin: Callable[[], str]) -> str:
    with worker.group(**PATIENT):
        worker.report("ready")
        worker.wait_for("go")
        return begin()


def serve(worker: Worker) -> None:
    with worker.group(**PATIENT):
        worker.report("ready")
        worker.wait_for("go")


@not_on_devices("SPMD mode has the one device that PyTorch lets others add")
@pytest.mark.parametrize("ending", ["killed", "stopped"])
def test_spmd_mode_cannot_begin_and_the_others_leave(run_workers: RunWorkers, ending: str) -> None:
    workers = run_workers.start([lambda worker: drive(worker, begin_mode), serve, serve, serve])
    workers.wait_for("ready")
    workers[3].stop()
    for each in list(workers)[:3]:
        each.tell("go")
    if ending == "killed":
        workers[3].kill()
    assert "'worker3'" in workers[0].result()
    for each in (workers[1], workers[2]):
        each.result()
    if ending == "stopped":
        workers[3].kill()


def test_a_process_group_is_given_up_on_all_ranks(run_workers: RunWorkers) -> None:
    def one(worker: Worker) -> str:
        return drive(worker, begin_group)

    workers = run_workers.start([one, one, serve])
    workers.wait_for("ready")
    for each in list(workers)[:2]:
        each.tell("go")
    workers[2].kill()
    for each in list(workers)[:2]:
        assert "'worker2'" in each.result()


def serve_until_one_waits(worker: Worker) -> None:
    with worker.group(**PATIENT):
        worker.report("ready")
        until(lambda: current_agent().get_debug_info()["agent.postponed_requests"])
        worker.report("one waits")


def test_who_serves_the_store_can_leave_when_one_that_waits_there_is_killed(run_workers: RunWorkers) -> None:
    workers = run_workers.start([serve_until_one_waits, lambda worker: drive(worker, begin_group)])
    workers.wait_for("ready")
    workers[1].tell("go")
    workers[0].wait_for("one waits")
    workers[1].kill()
    workers[0].result()


def test_an_interrupted_worker_and_the_others_can_leave(run_workers: RunWorkers) -> None:
    def begin() -> str:
        with pytest.raises(KeyboardInterrupt):
            spmd.init_process_group(timedelta(seconds=300))
        return "interrupted"

    workers = run_workers.start([serve_until_one_waits, lambda worker: drive(worker, begin)])
    workers.wait_for("ready")
    workers[1].tell("go")
    workers[0].wait_for("one waits")
    workers[1].interrupt()
    assert workers[1].result() == "interrupted"
    workers[0].result()


def own_incarnation() -> int:
    incarnation: int = current_agent().incarnation
    return incarnation


def wait_for_one_that_is_gone(worker: Worker) -> None:
    with worker.group(**PATIENT):
        view = current_agent().group.peers.view
        lost = rpc.rpc_sync("worker1", own_incarnation)
        worker.report("ready")
        until(lambda: view.gone_reason(lost))
        reason = rpc.rpc_sync("worker0", store._wait, args=(["missing"], lost), timeout=0)
        assert reason == view.gone_reason(lost)


def test_a_wait_at_the_store_of_a_worker_that_was_lost_before_it_came_ends_at_once(
    run_workers: RunWorkers,
) -> None:
    workers = run_workers.start([wait_for_one_that_is_gone, serve])
    workers.wait_for("ready")
    workers[1].kill()
    workers[0].result()
