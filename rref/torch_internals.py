"""The private names of PyTorch that references use; see ``rpc/runtime/internals.py``."""

from __future__ import annotations

from typing import Any, Final

from rpc.runtime.internals import Internals

__all__ = ["INTERNALS", "script_functions"]

INTERNALS: Final = Internals()

script_functions: Final[Any] = INTERNALS.find(
    "torch.jit._state:_python_cu",
    "RemoteModule cannot take an interface of TorchScript, and its functions cannot be called by name",
)
"""All functions and interfaces that this process has compiled with TorchScript."""
