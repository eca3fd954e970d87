"""Parameters in calls and answers: they get their gradients, but in modules they are copies."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import dist_autograd
import rpc
from rref import RemoteModule, RRef
from tests.support.serving import in_standing_group, in_worker0

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


@in_standing_group()
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


class Listed(nn.Linear):
    """A layer with a list of parameters."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(1))])


def kinds(value: Any, module: Listed) -> list[type]:
    return [type(value), *{type(each) for each in module.parameters()}]


@in_standing_group()
def test_where_nothing_is_recorded_and_in_modules_parameters_stay_parameters() -> None:
    layer = Listed()
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    assert rpc.rpc_sync(OTHER, kinds, args=(layer.weight, layer)) == [nn.Parameter, nn.Parameter]
    with dist_autograd.context():
        assert rpc.rpc_sync(OTHER, kinds, args=(frozen, layer)) == [nn.Parameter, nn.Parameter]
        with torch.no_grad():
            assert rpc.rpc_sync(OTHER, kinds, args=(layer.weight, layer)) == [nn.Parameter, nn.Parameter]


@dataclass
class Weights:
    """Holds a parameter."""

    matrix: Any


class Pair(NamedTuple):
    matrix: Any
    number: int


class Reduces(Weights):
    """Says itself how it is pickled."""

    def __reduce__(self) -> Any:
        return Reduces, (self.matrix,)


class Scale(nn.Parameter):
    """A parameter of a class of its own."""


class Marked(Tensor):
    """A tensor of a class of its own."""


def marked(data: Tensor) -> nn.Parameter:
    return nn.Parameter(data.as_subclass(Marked))


def squared(holder: Any) -> Tensor:
    while not isinstance(holder, Tensor):
        if isinstance(holder, Weights | Pair):
            holder = holder.matrix
        else:
            holder = next(iter(holder.values() if isinstance(holder, dict | nn.ParameterDict) else holder))
    return holder.square()


def call(function: Callable[[], Any]) -> Any:
    return function()


WRAPS: list[Callable[[Any], Any]] = [
    lambda p: {"layer": {"w": p}},
    lambda p: [(p, 1)],
    lambda p: [[[{"deep": (p,)}]]],
    Weights,
    lambda p: Pair(p, 1),
    lambda p: {"holder": Weights(Reduces(p))},
    lambda p: nn.ParameterList([p]),
    lambda p: {"dict": nn.ParameterDict({"w": p})},
]


@in_standing_group()
def test_at_any_depth_it_gets_its_gradient() -> None:
    for kind in (nn.Parameter, Scale, marked):
        for wrap in WRAPS:
            weight = kind(torch.tensor([2.0, 3.0]))
            for again in (lambda x: x, lambda x: [x, x]):
                with dist_autograd.context() as context_id:
                    result = rpc.rpc_sync(OTHER, squared, args=(again(wrap(weight)),))
                    dist_autograd.backward(context_id, [result.sum()])
                    found = dist_autograd.get_gradients(context_id)
                torch.testing.assert_close(found, {weight: 2 * weight.detach()})
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [rpc.rpc_sync(OTHER, call, args=(lambda: weight + 0,)).sum()])
        torch.testing.assert_close(dist_autograd.get_gradients(context_id), {weight: torch.ones(2)})


class Owner:
    """Owns a layer."""

    def __init__(self) -> None:
        self.layer = nn.Linear(3, 1)

    def weight(self) -> Tensor:
        return self.layer.weight

    def everything(self) -> Any:
        return {"weights": Weights(self.layer.weight), "bias": [self.layer.bias]}

    def gradients(self, context_id: int) -> list[Tensor | None]:
        found = dist_autograd.get_gradients(context_id)
        return [found.get(each) for each in self.layer.parameters()]


def gradients_of(context_id: int, parameters: list[RRef[Tensor]]) -> list[Tensor | None]:
    found = dist_autograd.get_gradients(context_id)
    return [found.get(each.local_value()) for each in parameters]


def doubled(tensor: Tensor) -> Tensor:
    return 2 * tensor.detach()


@in_standing_group()
def test_a_parameter_in_a_result_gets_its_gradient_at_its_owner() -> None:
    owner = rpc.remote(OTHER, Owner)
    results: list[Callable[[], list[Tensor]]] = [
        lambda: [owner.rpc_sync().weight()],
        lambda: [owner.rpc_async().weight().wait()],
        lambda: [owner.remote().weight().to_here()],
        lambda: [(every := owner.rpc_sync().everything())["weights"].matrix, every["bias"][0]],
    ]
    for result in results:
        with dist_autograd.context() as context_id:
            tensors = result()
            assert all(type(each) is Tensor for each in tensors)
            dist_autograd.backward(context_id, [torch.stack([each.square().sum() for each in tensors]).sum()])
            found = owner.rpc_sync().gradients(context_id)
        torch.testing.assert_close(found[: len(tensors)], [doubled(each) for each in tensors])
    assert type(owner.rpc_sync().weight()) is nn.Parameter
    with dist_autograd.context(), torch.no_grad():
        assert type(owner.rpc_sync().weight()) is nn.Parameter
        assert type(owner.rpc_sync().everything()["bias"][0]) is nn.Parameter


@in_standing_group()
def test_a_penalty_on_remote_weights_reaches_their_owner() -> None:
    parameters = RemoteModule(f"{OTHER}/cpu", nn.Linear, args=(3, 1)).remote_parameters()
    with dist_autograd.context() as context_id:
        here = [each.to_here() for each in parameters]
        dist_autograd.backward(context_id, [torch.stack([each.square().sum() for each in here]).sum()])
        found = rpc.rpc_sync(OTHER, gradients_of, args=(context_id, parameters))
    torch.testing.assert_close(found, [doubled(each) for each in here])


def is_tied(*parts: Any) -> list[bool]:
    """Whether the module or optimizer among the parts has parameters, and the other parts contain them."""
    owner = next(each for each in parts if isinstance(each, nn.Module | torch.optim.Optimizer))
    own = list(owner.parameters()) if isinstance(owner, nn.Module) else owner.param_groups[0]["params"]
    others = [each["deep"]["w"] for each in parts if each is not owner]
    return [*(type(each) is nn.Parameter for each in own), *(any(x is y for y in own) for x in others)]


def stepped(layer: nn.Linear, optimizer: torch.optim.Optimizer) -> bool:
    layer(torch.ones(1, 2)).sum().backward()
    before = layer.weight.detach().clone()
    optimizer.step()
    return not torch.equal(before, layer.weight)


@in_worker0()
def test_modules_and_optimizers_consist_of_parameters_wherever_else_these_occur() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rpc.serialization.tracked").addHandler(handler)
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    beside = {"deep": {"w": layer.weight}}
    x = torch.ones(1, requires_grad=True)
    with dist_autograd.context() as context_id:
        for parts in ((layer, beside), (beside, layer), (optimizer, beside), (beside, optimizer)):
            assert rpc.rpc_sync(OTHER, is_tied, args=parts) == [True] * 3
        assert rpc.rpc_sync(OTHER, stepped, args=(layer, optimizer))
        # Other tensors of the message keep their places.
        factors = [{"deep": {"w": layer.weight}}, x, layer]
        dist_autograd.backward(context_id, [rpc.rpc_sync(OTHER, second_squared, args=(factors,))])
        torch.testing.assert_close(dist_autograd.get_gradients(context_id), {x: torch.full((1,), 2.0)})
    (line,) = lines
    assert "no gradients of them flow back" in line


def second_squared(parts: list[Any]) -> Tensor:
    x: Tensor = parts[1]
    return x.square().sum()
