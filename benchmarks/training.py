"""Distributed autograd and optimizers: one operation, and steps of a model on other workers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.workload import CALLEE, Bar, Workload, seconds_per_call

__all__ = ["workloads"]

_WIDTH = 512
_BATCH = 32
_MICRO_BATCHES = 4

_COMPANIONS = {
    "rpc": ("dist_autograd", "dist_optim"),
    "torch.distributed.rpc": ("torch.distributed.autograd", "torch.distributed.optim"),
}


def _companions(rpc: Any) -> tuple[Any, Any]:
    """The modules of distributed autograd and of the distributed optimizer that belong to an RPC module."""
    autograd, optim = _COMPANIONS[rpc.__name__]
    return importlib.import_module(autograd), importlib.import_module(optim)


class _Layers(nn.Module):
    """Some layers of an MLP."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [module for _ in range(count) for module in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU())]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


def _parameters(module: str, model: Any) -> list[Any]:
    """On the owner: references to the parameters."""
    reference = importlib.import_module(module).RRef
    return [reference(parameter) for parameter in model.local_value().parameters()]


def _one_operation(rpc: Any) -> float:
    autograd, _ = _companions(rpc)
    x, y = torch.rand(16, requires_grad=True), torch.rand(16, requires_grad=True)

    def step() -> None:
        with autograd.context() as context:
            out = rpc.rpc_sync(CALLEE, torch.add, args=(x, y))
            autograd.backward(context, [out.sum()])
            autograd.get_gradients(context)

    return 1e6 * seconds_per_call(step)


def _steps(
    rpc: Any, stages: list[Any], forward: Callable[[torch.Tensor], torch.Tensor], *, together: bool
) -> float:
    """Milliseconds of a training step: forward, backward and the optimizer.

    Args:
        together: whether backward and step are asked for by one call, where there is one.
    """
    autograd, optim = _companions(rpc)
    parameters = [
        parameter
        for stage in stages
        for parameter in rpc.rpc_sync(stage.owner(), _parameters, args=(rpc.__name__, stage))
    ]
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.01)
    x, target = torch.rand(_BATCH, _WIDTH), torch.rand(_BATCH, _WIDTH)

    def two_calls(context: int, roots: list[torch.Tensor]) -> None:
        autograd.backward(context, roots)
        optimizer.step(context)

    update = getattr(optimizer, "backward_and_step", two_calls) if together else two_calls

    def step() -> None:
        with autograd.context() as context:
            update(context, [nn.functional.mse_loss(forward(x), target)])

    return 1e3 * seconds_per_call(step)


def _parameter_server(rpc: Any, *, together: bool = False) -> float:
    model = rpc.remote(CALLEE, _Layers, args=(4,))
    return _steps(rpc, [model], lambda x: model.rpc_sync().forward(x), together=together)


def _pipeline(rpc: Any, *, together: bool = False) -> float:
    first, second = rpc.remote("worker1", _Layers, args=(2,)), rpc.remote("worker2", _Layers, args=(2,))

    def forward(x: torch.Tensor) -> torch.Tensor:
        begun = [first.rpc_async().forward(part) for part in x.chunk(_MICRO_BATCHES)]
        handed_on = [second.rpc_async().forward(future.wait()) for future in begun]
        return torch.cat([future.wait() for future in handed_on])

    return _steps(rpc, [first, second], forward, together=together)


def _optimizer(rpc: Any) -> float:
    autograd, optim = _companions(rpc)
    model = rpc.remote(CALLEE, _Layers, args=(4,))
    parameters = rpc.rpc_sync(CALLEE, _parameters, args=(rpc.__name__, model))
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.01)
    with autograd.context() as context:
        autograd.backward(context, [model.rpc_sync().forward(torch.rand(_BATCH, _WIDTH)).sum()])
        return 1e3 * seconds_per_call(lambda: optimizer.step(context))


def _alone(micro_batches: int) -> float:
    """The computation of a step, in one process: what no RPC can make shorter."""
    model = _Layers(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, target = torch.rand(_BATCH, _WIDTH), torch.rand(_BATCH, _WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        y = torch.cat([model(part) for part in x.chunk(micro_batches)])
        loss: Any = nn.functional.mse_loss(y, target)
        loss.backward()
        optimizer.step()

    return 1e3 * seconds_per_call(step)


def workloads() -> Iterator[Workload]:
    """All that train."""
    yield Workload(
        "autograd-op", "forward and backward of one op", "µs", _one_operation, Bar(0.35), part="training"
    )
    yield Workload(
        "pipeline-step",
        "step of an MLP 4 x 512, 2 stages",
        "ms",
        _pipeline,
        Bar(0.7),
        workers=3,
        part="training",
    )
    yield Workload(
        "parameter-server-step",
        "step of an MLP 4 x 512, 1 server",
        "ms",
        _parameter_server,
        Bar(0.7),
        part="training",
    )
    yield Workload(
        "pipeline-together",
        "that pipeline's, backward_and_step",
        "ms",
        partial(_pipeline, together=True),
        workers=3,
        part="training",
    )
    yield Workload(
        "server-together",
        "that server's, backward_and_step",
        "ms",
        partial(_parameter_server, together=True),
        part="training",
    )
    yield Workload(
        "pipeline-alone",
        "that pipeline in one process",
        "ms",
        lambda rpc: _alone(_MICRO_BATCHES),
        workers=3,
        part="training",
    )
    yield Workload(
        "server-alone", "that server's step in one process", "ms", lambda rpc: _alone(1), part="training"
    )
    yield Workload("optimizer-step", "its optimizer alone", "ms", _optimizer, part="training")
