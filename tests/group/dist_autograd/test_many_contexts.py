"""Contexts come and go by the thousand, from several threads: nothing of them stays on any worker."""

from __future__ import annotations

import ctypes
import functools
import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dist_autograd
import rpc
from tests.fuzz.autograd.distribution import leftovers
from tests.support.serving import in_standing_group

OTHER = "worker1"
SIDE = 88
CONTEXTS = 600
"""Each records three tensors of 62 KB on either side: 110 MB in all, if nothing were freed."""


@functools.cache
def factor() -> Tensor:
    return torch.full((SIDE, SIDE), 2.0, dtype=torch.float64, requires_grad=True)


def scaled(x: Tensor) -> Tensor:
    return x * factor()


def train(count: int, backward: bool = True) -> None:
    x = torch.full((SIDE, SIDE), 3.0, dtype=torch.float64, requires_grad=True)
    for _ in range(count):
        with dist_autograd.context() as context_id:
            loss = rpc.rpc_sync(OTHER, scaled, args=(x * 1,)).sum()
            if backward:
                dist_autograd.backward(context_id, [loss])
                assert dist_autograd.get_gradients(context_id)[x][0, 0] == 2


def megabytes() -> float:
    """Memory of this process, except for freed memory that the allocator can give back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def growth(train_more: int, **options: bool) -> list[float]:
    """By how many megabytes both workers grow."""
    train(300, **options)  # until each thread has had memory of its own
    before = [megabytes(), rpc.rpc_sync(OTHER, megabytes)]
    train(train_more, **options)
    assert leftovers(range(2)) == []
    after = [megabytes(), rpc.rpc_sync(OTHER, megabytes)]
    return [late - early for late, early in zip(after, before, strict=True)]


@pytest.mark.parametrize("backward", [True, False])
@in_standing_group()
def test_memory_stays_where_it_is(backward: bool) -> None:
    assert max(growth(CONTEXTS, backward=backward)) < 16
