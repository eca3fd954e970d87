"""The private names of PyTorch that one-sided transfers need: see ``rpc/runtime/internals.py``.

The whole interface is private, in PyTorch 2.15 and newer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from rpc.runtime.internals import Internals

__all__ = ["INTERNALS", "Transport", "wait_all"]

INTERNALS: Final = Internals()

_NO_TRANSFERS: Final = "one-sided transfers do not work"

Transport: Final[Any] = INTERNALS.find("torch.distributed._transport:Transport", _NO_TRANSFERS, since=(2, 15))
wait_all: Final[Callable[..., Any]] = INTERNALS.find(
    "torch.distributed._transport:wait_all", _NO_TRANSFERS, since=(2, 15)
)
