"""Models of several workers, whose parts are on devices: calls, gradients, steps and states in order."""

from __future__ import annotations

from typing import Final

import pytest
import torch
from torch import Tensor, nn, optim

from dist_autograd import backward, context, get_gradients
from dist_optim import DistributedOptimizer
from farcall import rpc
from rpc.errors import SerializationError
from spmd.tensor_parallel import ColwiseParallel, RowwiseParallel, ShardedModule, parallelize_module
from tests.support.device_groups import in_device_group, on_device_workers, one_to_one
from tests.support.devices import FIRST, SECOND, LateSGD, device_kind, mode, seen, sleep
from tests.support.workers import Worker

__all__ = ["device_kind", "mode"]

WIDTH = 6


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH))


PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def ones_late(module: nn.Module) -> None:
    for device in (FIRST, SECOND):
        sleep(device)
    for parameter in module.parameters():
        nn.init.ones_(parameter)


def inputs() -> Tensor:
    """Values that come late on the current stream."""
    given = torch.zeros(4, WIDTH, device=FIRST)
    sleep(FIRST)
    return given.copy_(torch.arange(4.0 * WIDTH).view(4, WIDTH) / 10)


def on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: seen(tensor) for name, tensor in tensors.items()}


def made() -> ShardedModule:
    workers = [f"worker1/{FIRST}", f"worker2/{SECOND}"]
    model = parallelize_module(mlp, workers=workers, parallelize_plan=PLAN, initialize=ones_late)
    assert isinstance(model, ShardedModule)
    return model


_POOL: Final = 32
"""Streams of a device in the pool that requests take theirs from."""


def delay_requests() -> None:
    """Have the streams that requests run on do nothing for a while."""
    for device in (FIRST, SECOND):
        for _ in range(_POOL * 20):
            with torch.Stream(device=device):
                sleep(device)


@on_device_workers(3)
def test_a_model_of_several_workers_is_that_of_one_process(worker: Worker) -> None:
    crossed = {FIRST: SECOND, SECOND: FIRST}  # to and from worker2
    maps = one_to_one(worker)["device_maps"]
    maps = {to: crossed if "worker2" in (to, worker.name) else same for to, same in maps.items()}
    if worker.rank == 0:
        del maps["worker2"]  # clients need maps to the first worker alone
    with worker.group(device_maps=maps):
        if worker.rank:
            return
        model, alone = made(), mlp()
        for parameter in alone.parameters():
            nn.init.ones_(parameter)
        x = torch.arange(4.0 * WIDTH).view(4, WIDTH) / 10
        with torch.Stream(device=FIRST):
            torch.testing.assert_close(seen(model(inputs())), alone(x))  # after it was filled
            for each in ("worker1", "worker2"):  # one at a time: the second waits for the first
                rpc.rpc_sync(each, delay_requests)
                torch.testing.assert_close(seen(model(inputs() + 1)), alone(x + 1))
        torch.manual_seed(0)
        alone = mlp()
        model.load_state_dict({name: value.to(FIRST) for name, value in alone.state_dict().items()})
        with torch.Stream(device=FIRST):
            torch.testing.assert_close(seen(model(inputs())), alone(x))  # after it was loaded

        optimizer = DistributedOptimizer(LateSGD, model.remote_parameters(), lr=0.5)
        theirs = optim.SGD(alone.parameters(), lr=0.5)
        x.requires_grad_()
        with torch.Stream(device=FIRST), context() as number:
            mine = inputs().requires_grad_()
            backward(number, [model(mine).square().sum()])
            gradient = seen(get_gradients(number)[mine])
            model.step(optimizer, number)
            state = model.state_dict()
        torch.autograd.backward(alone(x).square().sum())
        theirs.step()
        torch.testing.assert_close(gradient, x.grad)
        torch.testing.assert_close(state, dict(alone.state_dict()))

        before = {name: value.to(FIRST) for name, value in mlp().state_dict().items()}
        with context() as number:
            backward(number, [model(inputs()).square().sum()])
            model.step(optimizer, number)
        model.load_state_dict(before)  # after the step
        torch.testing.assert_close(model.state_dict(), on_host(before))
        model.close()


@in_device_group(3)
def test_gradients_are_moved_to_the_device_of_each_part() -> None:
    """Tensors for the second worker arrive on the device of the first, and are moved."""
    model, alone = made(), mlp()
    for parameter in alone.parameters():
        nn.init.ones_(parameter)
    x = torch.arange(4.0 * WIDTH).view(4, WIDTH) / 10
    x.requires_grad_()
    torch.autograd.backward(alone(x).square().sum())
    for place in (FIRST, "cpu"):
        given = x.detach().to(place).requires_grad_()
        with context() as number:
            backward(number, [model(given).square().sum()])
            torch.testing.assert_close(get_gradients(number)[given].cpu(), x.grad)
    model.close()


@on_device_workers(3)
def test_a_call_that_no_part_was_sent_leaves_the_model_in_order(worker: Worker) -> None:
    """The workers of the model cannot send each other tensors on devices."""
    maps = one_to_one(worker)["device_maps"]
    if worker.rank:
        maps = {"worker0": maps["worker0"]}
    with worker.group(device_maps=maps):
        if worker.rank:
            return
        model = made()
        x = torch.ones(4, WIDTH)
        for _ in range(2):
            with pytest.raises(SerializationError, match=f"set_device_map.'worker2', {{'{FIRST}'"):
                model(x.to(FIRST))
        assert seen(model(x)).shape == x.shape
        model.close()
