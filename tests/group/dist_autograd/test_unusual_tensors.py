"""Tensors of unusual kinds in a context: gradients flow through them, or an error says why they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.masked import masked_tensor
from torch.nested import nested_tensor
from torch.utils.checkpoint import checkpoint

import dist_autograd
import rpc
from rpc.errors import BackwardError, SerializationError
from tests.support.default_device import not_on_devices
from tests.support.serving import in_standing_group

CALLEE = "worker1"

LAYOUTS = {"jagged": torch.jagged, "strided": torch.strided}
NESTED = pytest.mark.parametrize(
    "layout",
    ["jagged", pytest.param("strided", marks=not_on_devices("PyTorch has these for CPU and CUDA only"))],
)

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def double(x: Any) -> Any:
    return x * 2


def total(x: Any) -> torch.Tensor:
    return torch.stack([part.sum() for part in x.unbind()]).sum()


@NESTED
@pytest.mark.parametrize("computed", [False, True])
@in_standing_group()
def test_gradients_flow_through_nested_tensors(layout: str, computed: bool) -> None:
    parts = [torch.ones(2), torch.ones(3)]
    leaf = nested_tensor(parts, layout=LAYOUTS[layout], requires_grad=True)
    with dist_autograd.context() as context:
        sent = leaf * 3 if computed else leaf
        doubled = rpc.rpc_sync(CALLEE, double, args=(sent,))
        assert doubled.layout is LAYOUTS[layout]
        dist_autograd.backward(context, [total(doubled)])
        gradient = dist_autograd.get_gradients(context)[leaf]
    factor = 6.0 if computed else 2.0
    assert [part.tolist() for part in gradient.unbind()] == [[factor] * 2, [factor] * 3]


@in_standing_group()
def test_gradients_reach_the_values_of_a_nested_tensor_in_a_list() -> None:
    values = torch.ones(5, requires_grad=True)
    nested = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 5]))
    with dist_autograd.context() as context:
        arrived: list[torch.Tensor] = rpc.rpc_sync(CALLEE, list, args=([nested, nested],))
        first, second = arrived
        assert first is second
        dist_autograd.backward(context, [total(rpc.rpc_sync(CALLEE, double, args=(first,)))])
        assert dist_autograd.get_gradients(context)[values].tolist() == [2.0] * 5


@NESTED
@in_standing_group()
def test_nested_tensors_under_no_grad_have_no_history(layout: str) -> None:
    leaf = nested_tensor([torch.ones(2)], layout=LAYOUTS[layout], requires_grad=True)
    with dist_autograd.context(), torch.no_grad():
        assert not rpc.rpc_sync(CALLEE, double, args=(leaf,)).requires_grad


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.parametrize("computed", [False, True])
@in_standing_group()
def test_gradients_flow_through_masked_tensors(computed: bool) -> None:
    mask = torch.tensor([True, False, True])
    leaf = masked_tensor(torch.ones(3), mask, requires_grad=True)
    with dist_autograd.context() as context:
        doubled = rpc.rpc_sync(CALLEE, double, args=(leaf * 3 if computed else leaf,))
        dist_autograd.backward(context, [doubled.to_tensor(0.0).sum()])
        gradient: Any = dist_autograd.get_gradients(context)[leaf]
    factor = 6.0 if computed else 2.0
    assert gradient.get_mask().equal(mask)
    assert gradient.to_tensor(0.0).tolist() == [factor, 0.0, factor]


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "vmap": lambda call, x: torch.vmap(call)(x),
    "grad": lambda call, x: torch.func.grad(lambda t: call(t).sum())(x),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
    "functionalize": lambda call, x: torch.func.functionalize(call)(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@in_standing_group()
def test_a_tensor_of_a_transform_is_refused(transform: str) -> None:
    def call(x: torch.Tensor) -> Any:
        return rpc.rpc_sync(CALLEE, double, args=(x,))

    for in_context in (False, True):
        with dist_autograd.context() if in_context else torch.enable_grad():
            with pytest.raises(SerializationError, match="it belongs to a transform") as failed:
                TRANSFORMS[transform](call, torch.ones(3))
            assert "outside of the transform" in str(failed.value)


def reentrant(x: torch.Tensor) -> Any:
    return checkpoint(torch.sin, x, use_reentrant=True)


def not_reentrant(x: torch.Tensor) -> Any:
    return checkpoint(torch.sin, x, use_reentrant=False)


@in_standing_group()
def test_a_reentrant_checkpoint_in_a_callee_is_refused_in_one_sentence() -> None:
    x = torch.zeros(3, requires_grad=True)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [rpc.rpc_sync(CALLEE, not_reentrant, args=(x,)).sum()])
        assert dist_autograd.get_gradients(context)[x].tolist() == [1.0] * 3
    with dist_autograd.context() as context:
        loss = rpc.rpc_sync(CALLEE, reentrant, args=(x,)).sum()
        with pytest.raises(BackwardError, match="pass use_reentrant=False") as failed:
            dist_autograd.backward(context, [loss])
        assert "`inputs`" not in str(failed.value)
