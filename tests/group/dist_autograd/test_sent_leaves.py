"""Leaves that are sent themselves: whatever happens to their gradients in one process happens here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import dist_autograd
import rpc
from tests.support.serving import Gate, in_standing_group, in_worker0

OTHER = "worker1"


class FirstOnly(Function):
    """The sum of two tensors, of which the second gets no gradient."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def add_for_first_only(a: Tensor, b: Tensor) -> Tensor:
    total: Tensor = FirstOnly.apply(a, b)  # type: ignore[no-untyped-call]
    return total


class Marked(torch.Tensor):
    """A tensor of another class."""


def leaf(*elements: float) -> Tensor:
    return torch.tensor(elements, requires_grad=True)


@in_standing_group()
def test_hook_of_a_leaf_without_gradient_is_called_as_in_one_process() -> None:
    seen: list[list[Any]] = []
    here = torch.autograd.backward
    for call in (add_for_first_only, lambda *args: rpc.rpc_sync(OTHER, add_for_first_only, args=args)):
        a, b = leaf(1.0), leaf(2.0)
        seen.append([])
        b.register_hook(seen[-1].append)  # type: ignore[no-untyped-call]
        with dist_autograd.context() as context_id:
            total = call(a, b).sum()
            if call is add_for_first_only:
                here([total])
            else:
                dist_autograd.backward(context_id, [total])
                assert list(dist_autograd.get_gradients(context_id)) == [a]
    assert seen[0] == seen[1]


@in_standing_group()
def test_leaf_of_another_class_gets_its_gradient() -> None:
    x = torch.ones(2).as_subclass(Marked).requires_grad_()
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [rpc.rpc_sync(OTHER, torch.mul, args=(x, 3)).sum()])
        found: list[float] = dist_autograd.get_gradients(context_id)[x].tolist()
    assert found == [3.0, 3.0]


@in_standing_group()
def test_leaf_frozen_after_the_forward_gets_none_and_others_get_theirs() -> None:
    x, y = leaf(2.0), leaf(3.0)
    with dist_autograd.context() as context_id:
        total = rpc.rpc_sync(OTHER, torch.mul, args=(x, y)) + rpc.rpc_sync(OTHER, torch.mul, args=(x * 2, y))
        x.requires_grad_(False)
        dist_autograd.backward(context_id, [total.sum()])
        found = dist_autograd.get_gradients(context_id)
    assert found[y].tolist() == [6.0]
    assert (x in found, y in found) == (False, True)


class Remote:
    """A layer, some of whose parameters change between forward and backward."""

    def __init__(self) -> None:
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result

    def freeze(self) -> None:
        self.layer.weight.requires_grad_(False)

    def widen(self) -> None:
        self.layer.weight.data = self.layer.weight.data.double()

    def which(self, context_id: int) -> tuple[bool, bool]:
        found = dist_autograd.get_gradients(context_id)
        return self.layer.weight in found, self.layer.bias in found


@pytest.mark.parametrize(("change", "with_gradient"), [("freeze", (False, True)), ("widen", (True, True))])
@in_standing_group()
def test_a_parameter_that_changes_before_the_backward_spoils_no_gradient(
    change: str, with_gradient: tuple[bool, bool]
) -> None:
    """Frozen, it gets none; with data of another type, it gets its own."""
    remote = rpc.remote(OTHER, Remote)
    x = leaf(1.0, 2.0)
    with dist_autograd.context() as context_id:
        total = remote.rpc_sync().forward(x).sum()
        getattr(remote.rpc_sync(), change)()
        dist_autograd.backward(context_id, [total])
        assert x in dist_autograd.get_gradients(context_id)
        assert remote.rpc_sync().which(context_id) == with_gradient


WEIGHTS = torch.ones(4, requires_grad=True)
enough = Gate()


def weights() -> Tensor:
    return WEIGHTS


def compute_with_weights() -> None:
    """On threads of their own: make and forget nodes of the leaf, again and again."""

    def compute() -> None:
        while not enough.is_open():
            WEIGHTS * 2  # unlike ``mul``, it takes a reference of its own only in the middle

    for _ in range(2):
        threading.Thread(target=compute).start()


def stop_computing() -> None:
    enough.open()


def hook_weights() -> None:
    """From now on a gradient of the leaf goes through the engine, even where it could be handed over."""
    WEIGHTS.register_hook(lambda _: None)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.nightly)], ids=["once", "twice"])
@in_worker0()
def test_leaf_that_other_threads_compute_with_can_be_sent(times: int) -> None:
    rpc.rpc_sync(OTHER, hook_weights)
    rpc.rpc_sync(OTHER, compute_with_weights)
    try:
        for _times in range(300):
            with dist_autograd.context() as context_id:
                fetched = [rpc.rpc_sync(OTHER, weights) for _time in range(times)]
                dist_autograd.backward(context_id, [torch.stack(fetched).prod(0).sum()])
    finally:
        rpc.rpc_sync(OTHER, stop_computing)


@in_standing_group()
def test_hooks_on_the_node_of_a_received_tensor_run() -> None:
    """How often a hook on a received tensor's node runs: where a run ends there, and where also at a leaf."""
    counts: list[int] = []
    users: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda out, _: out.sum(),
        lambda out, y: (out * y).sum(),
    ]
    for use in users:
        runs: list[None] = []
        with dist_autograd.context() as context_id:
            out: Any = rpc.rpc_sync(OTHER, torch.mul, args=(leaf(1.0), 2))
            out.grad_fn.register_prehook(lambda _, runs=runs: runs.append(None))
            dist_autograd.backward(context_id, [use(out, leaf(4.0)).sum()])
        counts.append(len(runs))
    assert counts == [1, 1]
