"""Tensor parallelism: layers cut over the ranks of a mesh, with ``DTensor`` parameters.

The names and meanings are those of ``torch.distributed.tensor.parallel``, whose plans work unchanged; layers
compute on local shards. It runs on any c10d backend.

Example, under ``torchrun --nproc-per-node 2``::

    dist.init_process_group("farcall")
    mesh = init_device_mesh("cpu", (2,))
    mlp = nn.Sequential(OrderedDict(w1=nn.Linear(8, 32), act=nn.ReLU(), w2=nn.Linear(32, 8)))
    parallelize_module(mlp, mesh, {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
    mlp(torch.ones(4, 8)).sum().backward()
"""

from __future__ import annotations

from spmd.tensor_parallel.api import parallelize_module
from spmd.tensor_parallel.explanation import explain
from spmd.tensor_parallel.loss import loss_parallel
from spmd.tensor_parallel.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from spmd.tensor_parallel.served import ShardedModule
from spmd.tensor_parallel.styles import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "ShardedModule",
    "explain",
    "loss_parallel",
    "parallelize_module",
]
