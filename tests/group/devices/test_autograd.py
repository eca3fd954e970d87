"""Distributed autograd and optimizers with tensors on devices: the same numbers as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from dist_autograd import backward, context, get_gradients
from dist_optim import DistributedOptimizer
from dist_optim.local_optimizer import LocalOptimizer
from farcall import rpc
from rref.remote_module import RemoteModule
from tests.support.device_groups import in_device_group, on_device_workers, one_to_one
from tests.support.devices import (
    FIRST,
    SECOND,
    SIZE,
    LateSGD,
    device_kind,
    is_all,
    late,
    mode,
    sleep,
)
from tests.support.workers import Worker

__all__ = ["device_kind", "mode"]


def scaled(tensor: Tensor, factor: float) -> Tensor:
    sleep(tensor.device)
    return tensor * factor


def scaled_elsewhere(tensor: Tensor, factor: float, name: str) -> Tensor:
    theirs: Tensor = rpc.rpc_sync(name, scaled, args=(tensor * 2, factor))
    return theirs * 3


class LateInBackward(torch.autograd.Function):
    """Passes tensors on; their gradients come late."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        sleep(gradients[0].device)
        return gradients[0] * 1


def on_two_devices(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    sleep(second.device)
    return first * 2, second * 3


class Weighted:
    """Has a leaf of its own."""

    def __init__(self, value: float) -> None:
        self.weight = late(value).requires_grad_()

    def apply(self, tensor: Tensor) -> Tensor:
        return tensor * self.weight

    def gradient(self, context_id: int) -> Tensor:
        return get_gradients(context_id)[self.weight]


@in_device_group(3)
def test_gradients_are_those_of_one_process() -> None:
    leaf = late(2.0).requires_grad_()
    with context() as number:
        backward(number, [rpc.rpc_sync("worker1", scaled, args=(leaf, 5.0)).sum()])
        with torch.Stream(device=FIRST):
            assert is_all(get_gradients(number)[leaf], 5.0), "one call"
    with context() as number:
        computed = leaf * leaf
        chained = rpc.rpc_sync("worker1", scaled_elsewhere, args=(computed, 5.0, "worker2"))
        backward(number, [chained.sum()])
        assert is_all(get_gradients(number)[leaf], 120.0), "chain of three"
    with context() as number:
        backward(number, [rpc.rpc_async("worker1", scaled, args=(leaf, 7.0)).wait().sum()])
        backward(number, [rpc.rpc_sync("worker2", scaled, args=(leaf, 1.0)).sum()])
        with torch.Stream(device=FIRST):
            assert is_all(get_gradients(number)[leaf], 8.0), "accumulated"
    with context() as number:
        other = torch.full((1000,), 3.0, device=SECOND, requires_grad=True)
        one, two = rpc.rpc_sync("worker1", on_two_devices, args=(leaf * 1, other * 1))
        backward(number, [one.sum() + two.sum().to(FIRST)])
        gradients = get_gradients(number)
        assert is_all(gradients[leaf], 2.0), "two devices, first"
        assert is_all(gradients[other], 3.0), "two devices, second"
    with context() as number:
        _, two = rpc.rpc_sync("worker1", on_two_devices, args=(leaf * 1, other * 1))
        with torch.Stream(device=SECOND):
            delayed: Tensor = LateInBackward.apply(two)  # type: ignore[no-untyped-call]  # untyped in torch
            total = delayed.sum()
        torch.accelerator.synchronize(torch.device(SECOND).index)
        backward(number, [total.to(FIRST) * 5])
        assert is_all(get_gradients(number)[other], 15.0), "two devices, the second one late"
    with context() as number:  # graphs that meet: the callee's parts share its leaf, and this worker's its
        weighted = rpc.remote("worker1", Weighted, args=(4.0,))
        first = weighted.rpc_sync().apply(leaf * 2)
        second = weighted.rpc_sync().apply(first * leaf)
        third = rpc.rpc_sync("worker2", scaled, args=(second + first, 0.5))
        backward(number, [third.sum()])
        # third = (4*2*x*x*w... with w = 4 and x = 2: first = 2xw, second = 2x^2w^2
        x, w = 2.0, 4.0
        assert is_all(get_gradients(number)[leaf], (4 * x * w * w + 2 * w) / 2), "meeting graphs, here"
        theirs = weighted.rpc_sync().gradient(number)
        assert is_all(theirs, (4 * x * x * w + 2 * x) / 2), "meeting graphs, there"


def _product(factor: float, elsewhere: bool, leaf: Tensor) -> Tensor:
    """Goes from the CPU to a device, and back, between two calls."""
    multiply = torch.mul
    factors = torch.full((4,), factor)
    first = rpc.rpc_sync("worker1", multiply, args=(leaf, factors)) if elsewhere else leaf * factors
    moved = first.to(FIRST)
    for _ in range(20):
        moved = moved * 1.5
    back = moved.cpu()
    return rpc.rpc_sync("worker2", multiply, args=(back, leaf)) if elsewhere else back * leaf


class Refusing(torch.autograd.Function):
    """Passes tensors on, and raises in a backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ValueError("a node on a device refuses")


@pytest.mark.parametrize("times", [3, pytest.param(100, marks=pytest.mark.nightly)])
@in_device_group(3)
def test_gradients_through_a_device_between_two_calls_of_the_cpu(times: int) -> None:
    wrong: list[str] = []
    for turn in range(times):
        for on_device in (False, True):
            here, there = (torch.full((4,), 2.0, requires_grad=True) for _ in range(2))
            losses = []
            for elsewhere, leaf in ((False, here), (True, there)):
                with context() as number:
                    product = _product(turn + 1.0, elsewhere, leaf)
                    loss = (product.to(FIRST) if on_device else product).sum()
                    losses.append(loss.detach().cpu())
                    if elsewhere:
                        backward(number, [loss])
                        gradient = get_gradients(number)[leaf]
                    else:
                        (gradient,) = torch.autograd.grad(loss, leaf)
                        expected = gradient
            if not torch.equal(gradient, expected) or losses[0] != losses[1]:
                wrong.append(f"{turn}, {on_device}: {gradient}, expected {expected}")
    assert wrong == []


@in_device_group(3, mode="eager")
def test_a_node_that_fails_on_a_device_ends_the_backward() -> None:
    leaf = torch.full((4,), 2.0, requires_grad=True)
    with context() as number:
        first = rpc.rpc_sync("worker1", torch.mul, args=(leaf, leaf))
        moved: Tensor = Refusing.apply(first.to(FIRST))  # type: ignore[no-untyped-call]  # untyped in torch
        loss = rpc.rpc_sync("worker2", torch.mul, args=(moved.cpu(), leaf)).sum()
        with pytest.raises(RuntimeError, match="a node on a device refuses"):
            backward(number, [loss])


class Layer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.linear(inputs))


def _batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)) for _ in range(5)
    ]


def _trained_here() -> list[Tensor]:
    layers = [Layer(0), Layer(1), Layer(2)]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    optimizer = optim.SGD(parameters, 0.1, momentum=0.9)
    for inputs, targets in _batches():
        optimizer.zero_grad()
        for layer in layers:
            inputs = layer(inputs)  # noqa: PLW2901
        torch.autograd.backward(((inputs - targets) ** 2).mean())
        torch.nn.utils.clip_grad_norm_(parameters, 0.05)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@in_device_group(3)
def test_training_gives_the_parameters_of_one_process() -> None:
    here = Layer(0).to(FIRST)
    layers = [RemoteModule(f"worker{rank}/{FIRST}", Layer, args=(rank,)) for rank in (1, 2)]
    mine = [rpc.RRef(parameter) for parameter in here.parameters()]
    remote = [parameter for layer in layers for parameter in layer.remote_parameters()]
    optimizer = DistributedOptimizer(optim.SGD, [*mine, *remote], lr=0.1, momentum=0.9)
    for inputs, targets in _batches():
        with context() as number:
            outputs = here(inputs.to(FIRST))
            for layer in layers:
                outputs = layer(outputs)
            backward(number, [((outputs - targets.to(FIRST)) ** 2).mean()])
            optimizer.clip_grad_norm_(number, 0.05)
            optimizer.step(number)
    parameters: list[Any] = [*here.parameters(), *(each.to_here() for each in remote)]
    trained = [parameter.detach().cpu() for parameter in parameters]
    torch.testing.assert_close(trained, _trained_here())


@in_device_group()
def test_training_here_sees_each_step() -> None:
    weight = nn.Parameter(torch.full((1000,), 3.0, device=FIRST))
    optimizer = DistributedOptimizer(LateSGD, [rpc.RRef(weight)], lr=1.0)
    for turn in range(3):
        with torch.Stream(device=FIRST), context() as number:
            backward(number, [(weight * 1).sum()])
            optimizer.step(number)
            assert is_all(weight, 2.0 - turn)


_kept: list[nn.Parameter] = []
"""A parameter that requests find by themselves."""


def keep() -> rpc.RRef[Tensor]:
    _kept.append(nn.Parameter(torch.full((1000,), 3.0, device=FIRST)))
    return rpc.RRef(_kept[0])


def multiplied_by_kept(tensor: Tensor) -> Tensor:
    return _kept[0] * tensor


def kept() -> Tensor:
    return _kept[0].detach() * 1


def step_and_look(optimizer: rpc.RRef[LocalOptimizer], number: int) -> Tensor:
    """What other requests see of a step while the one that has made it goes on."""
    optimizer.local_value().step(number)
    seen: Tensor = rpc.rpc_sync(rpc.get_worker_info(), kept)
    return seen


@pytest.mark.parametrize("both_have_maps", [True, False], ids=["all maps", "the caller's map"])
@on_device_workers()
def test_requests_after_a_step_see_it(worker: Worker, both_have_maps: bool) -> None:
    with worker.group(**(one_to_one(worker) if both_have_maps or not worker.rank else {})):
        if worker.rank:
            return
        optimizer = DistributedOptimizer(LateSGD, [rpc.rpc_sync("worker1", keep)], lr=1.0)
        ones = torch.ones(1000, device=FIRST)
        for turn in range(3):
            with context() as number:
                backward(number, [rpc.rpc_sync("worker1", multiplied_by_kept, args=(ones,)).sum()])
                optimizer.step(number)
                assert is_all(rpc.rpc_sync("worker1", kept), 2.0 - turn)
        with context() as number:
            backward(number, [rpc.rpc_sync("worker1", multiplied_by_kept, args=(ones,)).sum()])
            local = optimizer.local_optimizers["worker1"]
            assert is_all(rpc.rpc_sync("worker1", step_and_look, args=(local, number)), -1.0)


class Nested(torch.autograd.Function):
    """Its backward begins another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        with torch.enable_grad(), context() as number:
            weight = torch.ones(3, device=FIRST, requires_grad=True)
            backward(number, [rpc.rpc_sync("worker1", scaled, args=(weight * 1, 3.0)).sum()])
        return gradients[0]


@in_device_group()
def test_a_backward_in_another_on_a_device_is_refused() -> None:
    x = torch.ones(3, device=FIRST, requires_grad=True)
    with context() as number:
        nested: Tensor = Nested.apply(x * 2)  # type: ignore[no-untyped-call]  # untyped in torch
        with pytest.raises(RuntimeError) as caught:
            backward(number, [nested.sum()])
    assert f"thread for backwards of {FIRST}" in str(caught.value)


@in_device_group()
def test_a_backward_in_a_hook_is_on_the_streams_and_device_of_its_thread() -> None:
    found: list[bool] = []
    for elsewhere in (False, True):
        leaf = torch.full((SIZE,), 2.0, device=FIRST, requires_grad=True)
        product: Any = torch.ones(3, requires_grad=True) * 2
        with context() as number:
            square = leaf * leaf
            tripled = rpc.rpc_sync("worker1", scaled, args=(square, 3.0)) if elsewhere else square * 3
            loss = tripled.sum()
            torch.accelerator.synchronize(0)

            def begin(_: Tensor, number: int = number, loss: Tensor = loss, leaf: Tensor = leaf) -> None:
                sleep(FIRST)  # on the stream on which the gradient of the loss is made
                backward(number, [loss])
                found.append(is_all(get_gradients(number)[leaf], 12.0))

            product.register_hook(begin)
            with torch.Stream(device=FIRST):
                backward(number, [product.sum()])
    with context() as number:
        factor: Any = torch.ones((), requires_grad=True) * 1
        moved = torch.ones(SIZE, device=SECOND) * factor.to(SECOND)
        loss = rpc.rpc_sync("worker1", scaled, args=(moved, 3.0)).sum()
        factor.register_hook(lambda _: found.append(torch.accelerator.current_device_index() == 0))
        product = torch.ones(3, requires_grad=True) * 2
        product.register_hook(lambda _: backward(number, [loss]))
        backward(number, [product.sum()])
    assert found == [True] * 3
