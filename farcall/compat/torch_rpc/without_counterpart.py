"""Names of PyTorch's modules that a facade does not define: lent if they come from elsewhere, or refused.

The modules of PyTorch's RPC also have the names that they import, such as ``torch`` and ``Future``, and
programs import them from there.
"""

from __future__ import annotations

import logging
import opcode
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, Final

__all__ = ["displaced", "without_counterpart"]

displaced: Final[dict[str, ModuleType]] = {}
"""PyTorch's modules that facades have replaced, by name."""

_OF_RPC: Final = (
    "torch._C._distributed_rpc",
    "torch._C._distributed_autograd",
    "torch.distributed.rpc",
    "torch.distributed.autograd",
    "torch.distributed.nn",
    "torch.distributed.optim",
)
"""The parts of PyTorch whose own names are never lent."""


def without_counterpart(module: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module's facade.

    Args:
        module: PyTorch's name of the module.
    """

    def lend_or_refuse(name: str) -> Any:
        lent = getattr(displaced.get(module), name, None)
        if not name.startswith("_") and _is_from_elsewhere(lent):
            return lent
        text = f"farcall.compat has no counterpart of {module}.{name}"
        if _is_imported_in(sys._getframe(1)):  # Python would hide an AttributeError's text
            raise ImportError(f"cannot import name {name!r} from {module!r}: {text}", name=module)
        raise AttributeError(text)

    return lend_or_refuse


def _is_from_elsewhere(value: object) -> bool:
    """Whether something in a module of PyTorch's RPC was only imported there."""
    if isinstance(value, logging.Logger):
        return False
    home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return isinstance(home, str) and hasattr(value, "__name__") and not home.startswith(_OF_RPC)


def _is_imported_in(frame: FrameType | None) -> bool:
    """Whether a module's attribute is looked up by ``from module import name``."""
    while frame is not None and frame.f_code.co_name == "__getattr__":  # a facade's own, around this one
        frame = frame.f_back
    return frame is not None and frame.f_code.co_code[frame.f_lasti] == opcode.opmap["IMPORT_FROM"]
