"""What fails while gradients are computed raises from ``backward()``, and the process goes on."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from spmd.engine.driver.current import DEVICE
from tests.support.spmd_session import inline_session

pytestmark = pytest.mark.logical_device


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    with inline_session():
        yield


def leaf() -> Any:
    return torch.ones(3, device=DEVICE, requires_grad=True)


def fail(*_: Any) -> Any:
    raise KeyError("the hook's")


def test_an_operation_that_cannot_be_recorded_raises() -> None:
    embedding = nn.Embedding(4, 2, sparse=True).to(DEVICE)
    loss: Any = embedding(torch.tensor([1, 2], device=DEVICE)).sum()
    with pytest.raises(NotImplementedError, match="tensors on spmd:0 are dense"):
        loss.backward()


@pytest.mark.parametrize("where", ["tensor", "leaf", "node", "accumulated"])
def test_the_error_of_a_hook_is_raised_with_its_place(where: str) -> None:
    x = leaf()
    y = x * 2
    if where == "node":
        y.grad_fn.register_hook(fail)
    elif where == "accumulated":
        x.register_post_accumulate_grad_hook(fail)
    else:
        (x if where == "leaf" else y).register_hook(fail)
    with pytest.raises(KeyError, match="the hook's") as raised:
        y.sum().backward()
    assert traceback.extract_tb(raised.tb)[-1].name == "fail"


def test_grad_raises_and_the_next_one_does_not() -> None:
    x = leaf()
    y = x * 2
    handle = y.register_hook(fail)
    with pytest.raises(KeyError, match="the hook's"):
        torch.autograd.grad(y.sum(), x, retain_graph=True)
    handle.remove()
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.tolist() == [2.0, 2.0, 2.0]


def test_an_error_passes_through_a_backward_inside_of_another() -> None:
    def layer(x: Any) -> Any:
        y = x * 2
        if y.requires_grad:
            y.register_hook(fail)
        return y.exp()

    x = leaf()
    made: Any = checkpoint(layer, x * 1.0, use_reentrant=True)
    with pytest.raises(KeyError, match="the hook's"):
        made.sum().backward()
