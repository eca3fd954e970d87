"""The private names of PyTorch that one-sided transfers need: a gate, see ``rpc/runtime/internals.py``."""

from __future__ import annotations

from typing import Any, Final

from rpc.runtime.internals import Internals

__all__ = ["INTERNALS", "Transport", "wait_all"]

INTERNALS: Final = Internals()

Transport: Any = INTERNALS.find(
    "torch.distributed._transport:Transport", "there are no one-sided transfers", since=(2, 15)
)
"""The base class of transports."""

wait_all: Final[Any] = INTERNALS.find(
    "torch.distributed._transport:wait_all",
    "transports of one-sided transfers cannot be closed in coroutines",
    since=(2, 15),
)
"""Waits for works in a coroutine."""
