"""A context with thousands of calls: its backward takes time in proportion to them."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

import dist_autograd
import rpc
from tests.support.serving import in_standing_group

FEW, MANY = 400, 6000


def doubled(x: Tensor) -> Tensor:
    return x * 2


def processor_seconds(calls: int) -> float:
    """Of the root's thread in a backward through this many calls with the same argument."""
    x = torch.ones(4, requires_grad=True)
    with dist_autograd.context() as context_id:
        total = torch.zeros(())
        for _ in range(calls):
            total = total + rpc.rpc_sync("worker1", doubled, args=(x,)).sum()
        begin = time.thread_time()
        dist_autograd.backward(context_id, [total])
        seconds = time.thread_time() - begin
        assert dist_autograd.get_gradients(context_id)[x].tolist() == [2 * calls] * 4
    return seconds


@pytest.mark.nightly
@in_standing_group()
def test_the_time_of_a_backward_is_in_proportion_to_its_calls() -> None:
    processor_seconds(FEW)
    few, many = processor_seconds(FEW) / FEW, processor_seconds(MANY) / MANY
    assert many < 3 * few
