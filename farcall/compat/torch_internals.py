"""The private names of PyTorch that only ``farcall.compat`` needs: see ``rpc/runtime/internals.py``."""

from __future__ import annotations

from typing import Final

from rpc.runtime.internals import Internals

__all__ = ["INTERNALS"]

INTERNALS: Final = Internals()

INTERNALS.expect("torch.library:Library._destroy", without="farcall.compat cannot be uninstalled")
