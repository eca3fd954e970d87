"""Parameters in calls: as arguments they get their gradients, in modules they are copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import dist_autograd
import rpc
from tests.support.serving import in_worker0

OTHER = "worker1"


def product(a: Tensor, b: Tensor) -> Tensor:
    return a * b


def product_of_list(factors: list[Tensor]) -> Tensor:
    return factors[0] * factors[1]


def product_with(a: Tensor, by: dict[str, Tensor]) -> Tensor:
    return a * by["factor"]


def square_of_one(a: Tensor, b: Tensor) -> Tensor:
    assert a is b
    return a * b


class Applied:
    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b


@in_worker0()
def test_a_parameter_among_the_arguments_gets_its_gradient() -> None:
    weight, x = nn.Parameter(torch.tensor([2.0, 3.0])), torch.tensor([5.0, 7.0], requires_grad=True)
    applied = rpc.remote(OTHER, Applied)
    calls: list[Callable[[], Any]] = [
        lambda: rpc.rpc_sync(OTHER, product, args=(weight, x)),
        lambda: rpc.rpc_async(OTHER, product, args=(x,), kwargs={"b": weight}).wait(),
        lambda: rpc.remote(OTHER, product, args=(weight, x)).to_here(),
        lambda: applied.rpc_sync().__call__(weight, x),
        lambda: rpc.rpc_sync(OTHER, product_of_list, args=([weight, x],)),
        lambda: rpc.rpc_sync(OTHER, product_with, args=(x, {"factor": weight})),
    ]
    for call in calls:
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [call().sum()])
            found = dist_autograd.get_gradients(context_id)
        assert set(found) == {weight, x}
        torch.testing.assert_close(found[weight], x.detach())
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [rpc.rpc_sync(OTHER, square_of_one, args=(weight, weight)).sum()])
        torch.testing.assert_close(dist_autograd.get_gradients(context_id), {weight: 2 * weight.detach()})
    assert weight.grad is None


def kinds(value: Any, module: nn.Linear) -> list[type]:
    return [type(value), type(module.weight)]


@in_worker0()
def test_where_nothing_is_recorded_and_in_modules_parameters_stay_parameters() -> None:
    layer = nn.Linear(1, 1)
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    assert rpc.rpc_sync(OTHER, kinds, args=(layer.weight, layer)) == [nn.Parameter, nn.Parameter]
    with dist_autograd.context():
        assert rpc.rpc_sync(OTHER, kinds, args=(frozen, layer)) == [nn.Parameter, nn.Parameter]
        with torch.no_grad():
            assert rpc.rpc_sync(OTHER, kinds, args=(layer.weight, layer)) == [nn.Parameter, nn.Parameter]
