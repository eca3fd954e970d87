"""The forms in which a program can import farcall's packages. It is checked, and not run."""

from __future__ import annotations

from typing import assert_type

import torch

import farcall.dist_autograd as autograd
import farcall.rpc as calls
import farcall.spmd
import rpc
from farcall.dist_optim import DistributedOptimizer
from farcall.rpc import RRef, remote, rpc_async, rpc_sync
from farcall.rpc.api import get_worker_info
from farcall.rpc.errors import RpcTimeoutError
from farcall.rpc.functions import async_execution
from farcall.rref import RemoteModule
from farcall.spmd.tensor_parallel import ColwiseParallel


@async_execution
def later() -> torch.futures.Future[int]:
    """A function that answers later."""
    return rpc_async("worker1", int)


def main() -> None:
    """The types are those of the packages with the short names."""
    assert_type(rpc_sync("worker1", int), int)
    assert_type(remote("worker1", int), rpc.RRef[int])
    assert_type(calls.get_worker_info(), rpc.WorkerInfo)
    assert_type(get_worker_info(), calls.WorkerInfo)
    assert_type(RpcTimeoutError("late"), rpc.errors.RpcTimeoutError)
    reference: RRef[int] = rpc.RRef(3)
    module = RemoteModule("worker1", torch.nn.Linear, args=(2, 2))
    optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.1)
    with autograd.context() as context_id:
        assert_type(context_id, int)
        optimizer.step(context_id)
    farcall.spmd.init_process_group()
    print(reference, ColwiseParallel(), later)
