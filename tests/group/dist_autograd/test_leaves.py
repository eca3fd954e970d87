"""Gradients as they go into a context: copied where somebody else holds them, and only there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import dist_autograd
import rpc
from dist_autograd.engine import owned
from tests.support.serving import in_standing_group

INPUTS = torch.ones(2, 3)


def addresses(gradients: Sequence[Tensor | None]) -> list[int]:
    """Where the elements of gradients lie, in order."""
    return [(each._values() if each.is_sparse else each).data_ptr() for each in gradients if each is not None]


def weight() -> Tensor:
    return torch.ones(3, 3, requires_grad=True)


class Kept(Function):
    """Its gradient is a tensor, or a view of one, that somebody goes on using."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Callable[[], Tensor]) -> Tensor:
        ctx.gradient = gradient
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.gradient(), None


apply_kept: Callable[..., Tensor] = Kept.apply


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2,
        lambda x: nn.functional.linear(INPUTS, x),
        lambda x: x.reshape(9) * 2,
        lambda x: nn.functional.embedding(torch.tensor([[1, 2], [2, 0]]), x, sparse=True),
    ],
    ids=["elementwise", "linear", "reshaped", "sparse"],
)
def test_a_gradient_that_nobody_else_holds_is_not_copied(function: Callable[[Tensor], Tensor]) -> None:
    x = weight()
    gradients = torch.autograd.grad(function(x).square().sum(), [x])
    assert owned(gradients) is gradients


@pytest.mark.parametrize(
    "kept",
    [lambda each: each, Tensor.detach, Tensor.t, Tensor.numpy, lambda each: each._base],
    ids=["itself", "detached", "view", "array", "base"],
)
def test_a_gradient_of_which_a_hook_keeps_something_is_copied(kept: Callable[[Tensor], Any]) -> None:
    x, held = weight(), list[Any]()
    x.register_hook(lambda gradient: held.append(kept(gradient)))  # type: ignore[no-untyped-call]
    gradients = torch.autograd.grad(nn.functional.linear(INPUTS, x).sum(), [x])
    (copied,) = owned(gradients)
    assert addresses([copied]) != addresses(gradients)
    assert torch.equal(torch.as_tensor(copied), gradients[0])


CONSTANT = torch.full((3, 3), 8.0)


@pytest.mark.parametrize(
    "gradient",
    [lambda: CONSTANT, CONSTANT.t, CONSTANT.detach, lambda: CONSTANT.to_sparse().detach()],
    ids=["itself", "transposed", "detached", "sparse"],
)
def test_a_gradient_that_a_function_goes_on_using_is_copied(gradient: Callable[[], Tensor]) -> None:
    x, used = weight(), gradient()
    gradients = torch.autograd.grad(apply_kept(x, lambda: used), [x], [torch.ones(3, 3)])
    (copied,) = owned(gradients)
    assert addresses([copied]) != addresses([used])


def test_a_copy_does_not_require_grad_though_what_a_function_uses_does() -> None:
    used = weight()
    (copied,) = owned([used])
    assert copied is not None
    assert not copied.requires_grad


@in_standing_group()
def test_scaling_a_contexts_gradients_in_place_changes_nothing_of_the_users() -> None:
    used, held = torch.full((3,), 8.0), list[Tensor]()
    x = torch.ones(3, requires_grad=True)
    y = torch.ones(3, requires_grad=True)
    y.register_hook(held.append)  # type: ignore[no-untyped-call]
    with dist_autograd.context() as context_id:
        total = apply_kept(x, lambda: used).sum() + rpc.rpc_sync("worker1", torch.mul, args=(y, 4)).sum()
        dist_autograd.backward(context_id, [total])
        for gradient in dist_autograd.get_gradients(context_id).values():
            gradient.mul_(0.5)
    assert [used[0].item(), held[0][0].item()] == [8.0, 4.0]


@in_standing_group()
def test_a_gradient_that_came_in_a_message_is_not_copied() -> None:
    x, seen = torch.ones(3, requires_grad=True), list[int]()
    x.register_hook(lambda gradient: seen.append(gradient.data_ptr()))  # type: ignore[no-untyped-call]
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, args=(x, 4)).sum()])
        assert addresses(list(dist_autograd.get_gradients(context_id).values())) == seen
