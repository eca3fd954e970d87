"""``DistributedOptimizer``: trainers that step the same parameters at the same time."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn, optim

import dist_autograd
import rpc
from dist_optim import DistributedOptimizer
from dist_optim.local_optimizer import LocalOptimizer
from rref import RemoteModule
from tests.group.dist_optim.models import Tied
from tests.support.default_device import placed
from tests.support.serving import in_standing_group, in_worker0

STEPS = 20


class Counted(nn.Module):
    """The gradient of its parameter is the input, whatever the parameter is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def train_often(module: RemoteModule, optimizer: DistributedOptimizer | None, value: float) -> None:
    if optimizer is None:
        optimizer = DistributedOptimizer(optim.SGD, module.remote_parameters(), lr=1.0)
    for _ in range(STEPS):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [module(torch.tensor(value)).sum()])
            optimizer.step(context_id)


@pytest.mark.parametrize("shared", [True, False], ids=["one optimizer", "one for each"])
@in_worker0(world_size=3)
def test_concurrent_steps_of_several_trainers_lose_nothing(shared: bool) -> None:
    module = RemoteModule(placed("worker0"), Counted)
    optimizer = DistributedOptimizer(optim.SGD, module.remote_parameters(), lr=1.0) if shared else None
    values = (1.0, 64.0)
    calls = [
        rpc.rpc_async(f"worker{index + 1}", train_often, args=(module, optimizer, value))
        for index, value in enumerate(values)
        for _ in range(2)  # two threads of each worker
    ]
    for call in calls:
        call.wait()
    weight: Tensor = module.remote_parameters()[0].to_here()
    assert sorted(set(weight.tolist())) == [-2.0 * STEPS * 65]


def overtake(**options: bool) -> Tensor:
    """A step comes between the forward and the backward of another context; the parameter that results."""
    module = RemoteModule(placed("worker1"), Tied)
    x = torch.ones(2, 3, requires_grad=True)
    references = module.remote_parameters()
    optimizer = DistributedOptimizer(optim.SGD, references, lr=0.1, **options)
    with dist_autograd.context() as context_id:
        loss = module(x).sum()
        rpc.rpc_sync("worker0", step_once, args=(module, optimizer))
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    result: Tensor = references[0].to_here()
    return result


def step_once(module: RemoteModule, optimizer: DistributedOptimizer) -> None:
    taking = threading.Thread(target=step_alone, args=(module, optimizer))  # in a context of its own
    taking.start()
    taking.join()


def step_alone(module: RemoteModule, optimizer: DistributedOptimizer) -> None:
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [module(torch.ones(2, 3)).sum()])
        optimizer.step(context_id)


@in_standing_group()
def test_a_step_before_anothers_backward_is_usual_and_refused_if_asked() -> None:
    assert overtake().isfinite().all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        overtake(stale_gradients=False)
    assert "stale_gradients=False" in "".join(caught.value.__notes__)


class Deep(nn.Module):
    """The gradient of the first parameter needs the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor(2.0))
        self.second = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.first * x * self.second


@in_standing_group()
def test_a_backward_goes_on_with_the_parameters_that_it_finds() -> None:
    module = RemoteModule(placed("worker1"), Deep)
    references = module.remote_parameters()
    optimizer = DistributedOptimizer(optim.SGD, references, lr=1.0)
    with dist_autograd.context() as context_id:
        loss = module(torch.tensor(1.0))
        with_step_of_another = threading.Thread(target=step_with, args=(module, optimizer))
        with_step_of_another.start()
        with_step_of_another.join()  # (2, 3) becomes (-1, 1)
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    values = [float(reference.to_here().detach()) for reference in references]
    assert values == [
        -1.0 - 1.0,
        1.0 - 2.0,
    ]  # by the second as it was found, and by the product of the forward


def step_with(module: RemoteModule, optimizer: DistributedOptimizer) -> None:
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [module(torch.tensor(1.0))])
        optimizer.step(context_id)


@in_worker0(world_size=1)
def test_stale_gradients_step_a_parameter_that_was_given_other_memory() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = LocalOptimizer(optim.SGD, [parameter], (), {"lr": 0.5, "momentum": 0.5}, stale_gradients=True)
    for value, expected in ((1.0, -1.0), (5.0, 2.0), (5.0, 1.5)):
        parameter.data = torch.full((2,), value, dtype=torch.float64 if expected == 1.5 else None)
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [(parameter * 4).sum()])
            optimizer.step(context_id)
        assert parameter.tolist() == [expected] * 2
        assert parameter.grad is None
