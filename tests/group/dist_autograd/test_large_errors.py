"""Errors of a backward that are too large to be sent to its root, which must not wait for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dist_autograd
import rpc
from rpc.errors import BackwardError
from tests.support.default_device import not_on_devices
from tests.support.serving import in_worker0

MIB = 1 << 20


class BulkyError(Exception):
    content: Any = None


def with_long_text() -> BulkyError:
    return BulkyError("x" * 2 * MIB)


def with_tensor() -> BulkyError:
    error = BulkyError("bulky")
    error.content = torch.ones(MIB)
    return error


WITH_TENSOR = pytest.param(with_tensor, marks=not_on_devices("an error leaves a device tensor out"))


class Failing(torch.autograd.Function):
    """Its backward raises what a function of this module makes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, make_error: Any) -> Tensor:
        ctx.make_error = make_error
        return x * 1

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        raise ctx.make_error()


def failing(x: Tensor, make_error: Any) -> Any:
    return Failing.apply(x, make_error)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("messages", [1, 2])
@pytest.mark.parametrize("make_error", [with_long_text, WITH_TENSOR])
@in_worker0(max_message_bytes=MIB)
def test_an_error_over_the_roots_limit_ends_the_backward(make_error: Any, messages: int) -> None:
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id:
        total = rpc.rpc_sync("worker1", failing, args=(x, make_error)).sum()
        for _message in range(1, messages):
            total = total + rpc.rpc_sync("worker1", torch.mul, args=(x, 2)).sum()
        with pytest.raises(BackwardError, match="BulkyError, raised by worker 'worker1'"):
            dist_autograd.backward(context_id, [total])
