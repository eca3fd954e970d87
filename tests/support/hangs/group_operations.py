"""Operations of a group that lack a rank: barriers, collectives, backward, shutdown, rendezvous."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

import dist_autograd
import dist_optim
import rpc
from tests.support.hangs.hang import LONG, hang
from tests.support.workers import Worker

EVENT = threading.Event()
QUEUE = queue.Queue[None]()


@hang("sleeps")
def barrier_lacks_a_worker(worker: Worker) -> None:
    if worker.rank == 1:
        time.sleep(LONG)  # culprit: barrier_lacks_a_worker
    rpc.barrier()


@hang("sleeps", size=3, worker="worker0")
def barrier_lacks_its_leader(worker: Worker) -> None:
    if worker.rank == 0:
        time.sleep(LONG)  # culprit: barrier_lacks_its_leader
    rpc.barrier()


@hang("event")
def shutdown_lacks_a_worker(worker: Worker) -> None:
    if worker.rank == 1:
        EVENT.wait()  # culprit: shutdown_lacks_a_worker


@hang("queue")
def shutdown_waits_for_a_callee(worker: Worker) -> None:
    if worker.rank == 0:
        rpc.rpc_async("worker1", take_in_shutdown, timeout=0)


def take_in_shutdown() -> None:
    QUEUE.get()  # culprit: shutdown_waits_for_a_callee


def init_process_group(worker: Worker) -> None:
    dist.init_process_group(
        "farcall", init_method=f"{worker.init_method}-c10d", rank=worker.rank, world_size=worker.world_size
    )


@hang("sleeps", size=3, quick=True)
def collective_lacks_a_rank(worker: Worker) -> None:
    init_process_group(worker)
    dist.all_reduce(torch.ones(4))
    if worker.rank == 1:
        time.sleep(LONG)  # culprit: collective_lacks_a_rank
    dist.all_reduce(torch.ones(4))


@hang("event", size=3)
def broadcast_lacks_its_root(worker: Worker) -> None:
    init_process_group(worker)
    if worker.rank == 1:
        EVENT.wait()  # culprit: broadcast_lacks_its_root
    dist.broadcast(torch.ones(4), src=1)


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, given: torch.Tensor) -> torch.Tensor:
        return given * 2

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(LONG)  # culprit: backward_sleeps_elsewhere
        return gradient * 2


def slow(given: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Slow.apply(given)  # type: ignore[no-untyped-call]
    return result


@hang("sleeps")
def backward_sleeps_elsewhere(worker: Worker) -> None:
    if worker.rank == 0:
        with dist_autograd.context() as context:
            given = torch.ones(3, requires_grad=True)
            loss = rpc.rpc_sync("worker1", slow, args=(given,)).sum()
            dist_autograd.backward(context, [loss])


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        EVENT.wait()  # culprit: step_waits_elsewhere


def make_parameter() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


def product(parameter: Any, given: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = parameter.local_value() * given
    return result


@hang("event")
def step_waits_elsewhere(worker: Worker) -> None:
    if worker.rank == 0:
        parameter = rpc.remote("worker1", make_parameter)
        optimizer = dist_optim.DistributedOptimizer(SlowSGD, [parameter], lr=0.1)
        with dist_autograd.context() as context:
            loss = rpc.rpc_sync("worker1", product, args=(parameter, torch.ones(3))).sum()
            dist_autograd.backward(context, [loss])
            optimizer.step(context)


@hang("rendezvous", worker="worker1", joins=False)
def rendezvous_lacks_a_rank(worker: Worker) -> None:
    if worker.rank == 0:
        time.sleep(LONG)
    options = rpc.TensorPipeRpcBackendOptions(init_method=worker.init_method)
    rpc.init_rpc("worker1", None, 1, 2, options)  # culprit: rendezvous_lacks_a_rank


def multiply_long() -> None:
    while True:
        torch.ones(600, 600) @ torch.ones(600, 600)  # culprit: rank_of_a_collective_computes


@hang("computes", size=2)
def rank_of_a_collective_computes(worker: Worker) -> None:
    init_process_group(worker)
    if worker.rank == 1:
        multiply_long()
    dist.all_reduce(torch.ones(4))
