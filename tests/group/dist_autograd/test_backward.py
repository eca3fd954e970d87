"""Gradients through calls: of each way to call, and of each shape that a spread graph can have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import dist_autograd
import rpc
from rpc.errors import AutogradError
from tests.support import backend
from tests.support.serving import first_of, in_standing_group, in_worker0
from tests.support.workers import RunWorkers, Worker

OTHER = "worker1"


class Scale(torch.nn.Module):
    """A module with a parameter, to live on another worker."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def multiply(a: Tensor, b: Tensor) -> Tensor:
    return a * b


def pass_on(worker: str, function: Callable[..., Any], *args: Any) -> Any:
    return rpc.rpc_sync(worker, function, args=args)


def leaves() -> tuple[Tensor, Tensor]:
    return torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)


def check(run: Callable[..., Tensor], local: Callable[..., Tensor]) -> None:
    """The gradients of two leaves are those of the same computation done here."""
    a, b = leaves()
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [run(a, b)])
        found = dist_autograd.get_gradients(context_id)
    wanted = torch.autograd.grad(local(a, b), (a, b), allow_unused=True)
    pairs: list[tuple[Tensor, Tensor | None]] = list(zip((a, b), wanted, strict=True))
    assert set(found) == {x for x, gradient in pairs if gradient is not None}
    for x, gradient in pairs:
        if gradient is not None:
            torch.testing.assert_close(found[x], gradient)
    assert a.grad is None
    assert b.grad is None


@in_standing_group()
def test_gradients_go_through_every_kind_of_call() -> None:
    scale = rpc.remote(OTHER, Scale)
    calls: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda a, b: rpc.rpc_sync(OTHER, multiply, (a, b)),
        lambda a, b: rpc.rpc_sync(OTHER, torch.mul, (a,), {"other": b}),
        lambda a, b: rpc.rpc_async(OTHER, multiply, (a, b)).wait(),
        lambda a, b: rpc.remote(OTHER, multiply, (a, b)).to_here(),
        lambda a, b: rpc.rpc_sync("worker0", multiply, (a, b)),
        lambda a, b: rpc.remote("worker0", multiply, (a, b)).to_here(),
        lambda a, b: rpc.rpc_sync(OTHER, pass_on, (OTHER, multiply, a, b)),
        lambda a, b: scale.rpc_sync().forward(a) * b / 2,
        lambda a, b: scale.rpc_async().forward(a).wait() * b / 2,
        lambda a, b: scale.remote().forward(a).to_here() * b / 2,
    ]
    for call in calls:
        check(lambda a, b, call=call: call(a * 2, b).sum(), lambda a, b: (a * 2 * b).sum())


@in_standing_group()
def test_gradients_of_several_roots_and_backwards_add_up() -> None:
    a, b = leaves()
    with dist_autograd.context() as context_id:
        product = rpc.rpc_sync(OTHER, multiply, (a, b))
        loss = product.sum()
        dist_autograd.backward(context_id, [loss, product[0]], retain_graph=True)
        dist_autograd.backward(context_id, [loss])
        found = dist_autograd.get_gradients(context_id)
        torch.testing.assert_close(found[a], b.detach() * torch.tensor([3.0, 2.0, 2.0]))
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            dist_autograd.backward(context_id, [loss])


def requires_grad(tensor: Tensor) -> bool:
    return tensor.requires_grad


@in_standing_group()
def test_calls_under_no_grad_are_without_history() -> None:
    a, b = leaves()
    calls: list[Callable[..., Any]] = [
        lambda function, *args: rpc.rpc_sync(OTHER, function, args),
        lambda function, *args: rpc.rpc_async(OTHER, function, args).wait(),
        lambda function, *args: rpc.remote(OTHER, function, args).to_here(),
    ]
    with dist_autograd.context() as context_id:
        scale = rpc.remote(OTHER, Scale)
        for call in calls:
            with torch.no_grad():
                assert call(requires_grad, a * 2) is False
                product = call(multiply, a, b)
                scaled = scale.rpc_sync().forward(a)
            assert not product.requires_grad
            assert not scaled.requires_grad
        assert rpc.rpc_sync(OTHER, dist_autograd.has_context, (context_id,))


@in_standing_group()
def test_gradients_that_were_got_do_not_change_any_more() -> None:
    a, b = leaves()
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync(OTHER, multiply, (a, b)).sum() + a.sum()
        dist_autograd.backward(context_id, [loss], retain_graph=True)
        held = dist_autograd.get_gradients(context_id)
        before = {x: gradient.clone() for x, gradient in held.items()}
        dist_autograd.backward(context_id, [loss])
        for x, gradient in dist_autograd.get_gradients(context_id).items():
            torch.testing.assert_close(gradient, 2 * before[x])
            torch.testing.assert_close(held[x], before[x])


def sum_of_both(a: Tensor, b: Tensor) -> Tensor:
    return (a + b).sum()


@in_standing_group()
def test_each_gradient_of_leaves_that_were_sent_can_be_changed_alone() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(1000, dtype=dtype, requires_grad=True) for _ in range(2))
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [rpc.rpc_sync(OTHER, sum_of_both, (a, b))])
            found = dist_autograd.get_gradients(context_id)
            found[a].mul_(2)
            torch.testing.assert_close(found[a], torch.full_like(a, 2.0))
            torch.testing.assert_close(found[b], torch.ones_like(b))


def twice(a: Tensor) -> Tensor:
    return a * 2


def thrice(a: Tensor) -> Tensor:
    return a * 3


def send_large_gradients_first(_: Worker, elements: int) -> None:
    x = torch.ones(elements, requires_grad=True)
    with dist_autograd.context() as context_id:
        few, many = rpc.rpc_sync(OTHER, thrice, args=(x[:2],)), rpc.rpc_sync(OTHER, twice, args=(x,))
        dist_autograd.backward(context_id, [(few * 2).sum() + (many * 3).sum()])
        gradient = dist_autograd.get_gradients(context_id)[x]
    assert gradient[:3].tolist() == [12.0, 12.0, 6.0]


@pytest.mark.parametrize(
    "options",
    [{}, {"transports": [backend.BETWEEN_HOSTS], "shared_memory_bytes": 0}],
    ids=["near", "far"],
)
@pytest.mark.parametrize("elements", [1_000, 20_000, 3_000_000])
def test_gradients_may_overtake_larger_ones_of_the_same_worker(
    run_workers: RunWorkers, elements: int, options: dict[str, Any]
) -> None:
    first_of(run_workers, send_large_gradients_first, elements, **options)


@in_worker0(world_size=1)
def test_a_backward_whose_context_is_left_as_it_begins_ends() -> None:
    x = torch.ones(2, requires_grad=True)
    entered = dist_autograd.context()

    def roots() -> Iterator[Tensor]:
        yield (x * 2).sum()
        entered.__exit__(None, None, None)

    context_id = entered.__enter__()
    with pytest.raises(AutogradError, match="was left during its"):
        dist_autograd.backward(context_id, roots())  # type: ignore[arg-type]
