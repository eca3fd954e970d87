"""Replicated objects in real processes: their workers are killed while others call."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn, optim

import dist_autograd
import rpc
from dist_optim import DistributedOptimizer
from rpc.errors import NameTakenError, RpcTimeoutError, WorkerLostError
from spmd.elastic.errors import ElasticError, StateLostError
from spmd.elastic.replicated.handle import Replicated
from tests.support.workers import RunWorkers, Worker


def init(worker: Worker) -> None:
    options = rpc.AgentOptions(init_method=worker.init_method, dynamic=True)
    rpc.init_rpc(worker.name, rpc_backend_options=options)


class Server:
    """Sums what it is sent, and draws random numbers from a generator of its own."""

    def __init__(self) -> None:
        self.total = torch.zeros(3, dtype=torch.float64)
        self.updates = 0
        self.random = torch.Generator().manual_seed(3)

    def push(self, gradient: torch.Tensor) -> int:
        self.total += gradient + torch.rand(3, generator=self.random, dtype=torch.float64)
        self.updates += 1
        return self.updates

    def fail(self) -> None:
        self.updates += 1
        raise ValueError(f"update {self.updates} fails")

    def look(self) -> tuple[torch.Tensor, int, str]:
        return self.total, self.updates, rpc.get_worker_info().name

    def keep(self) -> Any:
        self.updates += 1
        return threading.Lock()


def expected(updates: int, each: float) -> torch.Tensor:
    random = torch.Generator().manual_seed(3)
    total = torch.zeros(3, dtype=torch.float64)
    for _ in range(updates):
        total += each + torch.rand(3, generator=random, dtype=torch.float64)
    return total


def serve(worker: Worker, name: str = "server") -> None:
    """Keep a copy until the test ends."""
    init(worker)
    Replicated(Server, name=name)
    worker.report("serves")
    worker.wait_for("end")


def test_no_update_is_lost_or_doubled_when_servers_are_killed(run_workers: RunWorkers) -> None:
    def train(worker: Worker) -> Any:
        init(worker)
        server = Replicated.find("server")
        for number in range(300):
            server.rpc_sync().push(torch.ones(3, dtype=torch.float64))
            if number == 100:
                worker.report("a third is done")
        worker.report("pushed")
        worker.wait_for("look")
        return server.rpc_sync().look()

    workers = run_workers.start([serve, serve, serve, train, train], 5, time_limit=60)
    workers[3].wait_for("a third is done")
    workers[0].kill()
    for each in workers[3:]:
        each.wait_for("pushed")
    workers[1].kill()
    for each in workers[3:]:
        each.tell("look")
    for each in workers[3:]:
        total, updates, name = each.result()
        assert (updates, name) == (600, "worker2")
        assert torch.equal(total, expected(600, 1.0))
    workers[2].tell("end")
