"""Versions of weight stores whose bits tell which one they are, and workers that behave as on other hosts."""

from __future__ import annotations

from typing import Any, Final

import torch

from farcall.weights import Block, Store
from farcall.weights import handle as handle_module
from farcall.weights import keeper as keeper_module

__all__ = ["SHAPE", "be_on", "empty", "holds", "rows", "same", "whole"]

SHAPE: Final = (6, 10)


def whole(number: int) -> torch.Tensor:
    """The tensor of a version, with NaNs in it."""
    bits = torch.arange(60, dtype=torch.int16) + number * 1000
    bits[:3] = torch.tensor([0x7FC1, 0x7F81, -1])
    return bits.view(torch.bfloat16).view(SHAPE)


def rows(number: int, rank: int) -> dict[str, Block]:
    """The part of one of two writers."""
    return {"w": Block(whole(number)[3 * rank : 3 * rank + 3], (3 * rank, 0), SHAPE)}


def empty() -> torch.Tensor:
    """A tensor to read a version into."""
    return torch.zeros(SHAPE, dtype=torch.bfloat16)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    return torch.equal(left.contiguous().view(torch.int16), right.contiguous().view(torch.int16))


def holds(store: Store, number: int, **wanted: Any) -> bool:
    """Whether what is read is this version."""
    into = empty()
    return store.get({"w": into}, **wanted) == number and same(into, whole(number))


def be_on(host: str) -> None:
    """Have this process behave as on a host of that name."""
    for module in (handle_module, keeper_module):
        setattr(module, "host_identity", lambda: host)  # noqa: B010  # mypy knows both
