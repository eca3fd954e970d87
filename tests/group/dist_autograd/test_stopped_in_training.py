"""A worker that is stopped (``SIGSTOP``) in the middle of training: what waits for it ends within the bound.

Nothing here has a time limit, so whoever is not told hangs until the test's own limit.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, optim

import dist_autograd
import rpc
from dist_optim import DistributedOptimizer
from rpc.errors import RpcError, WorkerLostError
from spmd.collectives.errors import RankLostError
from tests.support.workers import RunWorkers, Worker

LIMIT = 60.0
OPTIONS: dict[str, Any] = {"rpc_timeout": 0, "lost_after": 2}
STOPPED = r"no sign of life for 2 s, since about \d\d:\d\d:\d\d: its process \(\d+\) is stopped"


def stop_here() -> None:
    """Never returns: this thread may be the last of its process to stand still."""
    os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait()


class StopInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        stop_here()
        return gradient


def pass_on(tensor: Tensor) -> Tensor:
    return StopInBackward.apply(tensor)  # type: ignore[no-untyped-call,no-any-return]


class StopInStep(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        stop_here()


def go_backward() -> None:
    with dist_autograd.context() as context:
        loss = rpc.rpc_sync("worker1", pass_on, args=(torch.ones(2, requires_grad=True),)).sum()
        dist_autograd.backward(context, [loss])


def go_backward_through_others() -> None:
    """The stopped worker is not one that this worker has called."""
    with dist_autograd.context() as context:
        loss = rpc.rpc_sync("worker2", call_next, args=(torch.ones(2, requires_grad=True),)).sum()
        dist_autograd.backward(context, [loss])


def call_next(tensor: Tensor) -> Tensor:
    passed: Tensor = rpc.rpc_sync("worker1", pass_on, args=(tensor,))
    return passed * 2


def make_parameter() -> Tensor:
    return torch.ones(2, requires_grad=True)


def step() -> None:
    parameters = [rpc.remote(f"worker{rank}", make_parameter) for rank in (1, 2)]
    optimizer = DistributedOptimizer(StopInStep, parameters[:1], lr=0.1)
    with dist_autograd.context() as context:
        loss = torch.stack([each.to_here() for each in parameters]).sum()
        dist_autograd.backward(context, [loss])
        optimizer.step(context)


def train_until_told(worker: Worker, train: Callable[[], None]) -> str:
    worker.join(**OPTIONS)
    with pytest.raises(WorkerLostError) as caught:
        train()
    rpc.shutdown()
    return str(caught.value)


def serve_others(worker: Worker) -> None:
    with worker.group(**OPTIONS):
        pass


@pytest.mark.parametrize(
    "train", [pytest.param(go_backward, marks=pytest.mark.nightly), go_backward_through_others, step]
)
def test_what_trains_with_a_stopped_worker_is_told(
    run_workers: RunWorkers, train: Callable[[], None]
) -> None:
    workers = run_workers.start(
        [partial(train_until_told, train=train), serve_others, serve_others], time_limit=LIMIT
    )
    said = workers[0].result()
    workers[2].result()
    workers[1].kill()
    workers.results()
    assert said.startswith("worker 'worker1' (id 1) is gone: it has given")
    assert re.search(STOPPED, said), said


def run_collectives(worker: Worker, shared: bool) -> str:
    options = (
        rpc.AgentOptions(lost_after=2) if shared else rpc.AgentOptions(lost_after=2, shared_memory_bytes=0)
    )
    dist.init_process_group(
        "farcall",
        init_method=f"{worker.init_method}-c10d",
        rank=worker.rank,
        world_size=worker.world_size,
        pg_options=options,
    )
    dist.all_reduce(torch.ones(2))
    if worker.rank == 1:
        worker.report("stopping")
        stop_here()
    with pytest.raises(RankLostError) as caught:
        dist.all_reduce(torch.ones(2))
    for operation in (dist.barrier, partial(dist.broadcast, torch.ones(2), 0)):
        with pytest.raises(RpcError):
            operation()
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.parametrize(
    "shared", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["shared memory", "messages"]
)
def test_a_collective_that_a_stopped_rank_does_not_come_to_ends_on_all_others(
    run_workers: RunWorkers, shared: bool
) -> None:
    workers = run_workers.start(run_collectives, 3, args=(shared,), time_limit=LIMIT)
    said = [workers[rank].result() for rank in (0, 2)]
    workers[1].kill()
    workers.results()
    for each in said:
        assert "rank 1" in each, each
        assert "no sign of life for 2 s" in each, each


def leave(worker: Worker) -> None:
    worker.join(**OPTIONS)
    for rank in range(worker.world_size):
        rpc.rpc_sync(f"worker{rank}", int)
    rpc.barrier()
    worker.report("joined")
    worker.wait_for("shut down")
    worker.report("leaving")
    rpc.shutdown()


@pytest.mark.nightly
@pytest.mark.parametrize("first", [True, False], ids=["before it", "in it"])
@pytest.mark.parametrize("stopped", [pytest.param(0, id="the leader"), pytest.param(1, id="another")])
def test_shutdown_ends_when_a_worker_stops(run_workers: RunWorkers, stopped: int, *, first: bool) -> None:
    workers = run_workers.start(leave, 3, time_limit=LIMIT)
    workers.wait_for("joined")
    if not first:
        workers[stopped].tell("shut down")
        workers[stopped].wait_for("leaving")
    workers[stopped].stop()
    others = [workers[rank] for rank in range(3) if rank != stopped]
    for worker in others:
        worker.tell("shut down")
    for worker in others:
        worker.result()
    workers[stopped].kill()
    workers.results()
    assert any("no sign of life" in worker.log.read_text() for worker in others)
