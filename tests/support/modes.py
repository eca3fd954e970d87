"""Modes of a thread, as tests leave them in force and look at them."""

from __future__ import annotations

import contextvars
import decimal
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DEFAULTS", "LEAVERS", "USER", "leave_everything", "look"]

USER: Final = contextvars.ContextVar("USER", default="nobody")

_entered: Final[list[Any]] = []
"""Blocks that were entered and never left: their guards must not die, since that leaves some of them."""


class Functions(TorchFunctionMode):
    """Changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Changes nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _enter(*blocks: Any) -> None:
    for block in blocks:
        block.__enter__()
        _entered.append(block)


def leave_everything() -> None:
    """Leave modes of all kinds, a context variable, a decimal context and NumPy's error state."""
    USER.set("somebody")
    decimal.getcontext().prec = 3
    np.seterr(all="raise")
    torch.set_default_device("meta")
    _enter(
        Functions(),
        torch.autocast("cpu", torch.float16, cache_enabled=False),
        torch.autograd.graph.save_on_cpu(),
        torch.inference_mode(),
        Dispatches(),
    )


LEAVERS: Final[dict[str, Callable[[], object]]] = {
    "no_grad": lambda: torch.set_grad_enabled(False),
    "inference_mode": lambda: _enter(torch.inference_mode()),
    "autocast": lambda: _enter(torch.autocast("cpu", torch.float16)),
    "autocast of another device": lambda: torch.set_autocast_enabled("xla", True),
    "autocast cache": lambda: torch.set_autocast_cache_enabled(False),
    "autocast dtype": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "set_default_device": lambda: torch.set_default_device("meta"),
    "device": lambda: _enter(torch.device("meta")),
    "function modes": lambda: _enter(Functions(), Functions()),
    "dispatch modes": lambda: _enter(Dispatches(), Dispatches()),
    "saved tensors": lambda: _enter(torch.autograd.graph.save_on_cpu(), torch.autograd.graph.save_on_cpu()),
    "all": leave_everything,
}
"""Functions that leave a mode in force."""


def look() -> dict[str, Any]:
    """What is in force now, as can be sent."""
    hooks: Any = torch._C._autograd
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return {
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "default device": torch.get_default_device().type,
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": {name: torch.is_autocast_enabled(name) for name in ("cpu", "cuda", "xla")},
        "dtypes": {name: str(torch.get_autocast_dtype(name)) for name in ("cpu", "cuda", "xla")},
        "cache": torch.is_autocast_cache_enabled(),
        "nesting": nesting,
        "hooks": hooks._top_saved_tensors_default_hooks(False) is not None,
        "user": USER.get(),
        "decimal": decimal.getcontext().prec,
        "numpy": np.geterr()["divide"],
    }


DEFAULTS: Final = {
    "function modes": 0,
    "dispatch modes": 0,
    "default device": "cpu",
    "grad": True,
    "inference": False,
    "autocast": {"cpu": False, "cuda": False, "xla": False},
    "dtypes": {"cpu": "torch.bfloat16", "cuda": "torch.float16", "xla": "torch.bfloat16"},
    "cache": True,
    "nesting": 0,
    "hooks": False,
    "user": "nobody",
    "decimal": 28,
    "numpy": "warn",
}
"""What ``look`` sees on a new thread."""
