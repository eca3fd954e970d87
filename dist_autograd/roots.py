"""Checks the roots of a backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rpc.errors import AutogradError

__all__ = ["checked"]


def checked(roots: Sequence[Any]) -> list[Tensor]:
    """Return the roots, if a backward pass can start at each of them.

    Raises:
        AutogradError, TypeError: there is none, or one that was not computed, or is not a scalar.
    """
    if not roots:
        raise AutogradError("No tensors provided for gradient computation: roots is empty")
    for position, root in enumerate(roots):
        if not isinstance(root, Tensor):
            raise TypeError(
                "backward(): incompatible function arguments: the roots must be tensors, not "
                f"{type(root).__name__}"
            )
        which = f"root {position}, of shape {tuple(root.shape)},"
        if not root.requires_grad:
            raise AutogradError(f"requires_grad not set on {which} so nothing leads back from it")
        if root.numel() != 1:
            raise AutogradError(
                f"{which} is not a scalar, all roots need to be scalar: take its sum() or mean() first"
            )
        if root.grad_fn is None:
            raise AutogradError(
                f"{which} does not have a valid gradient function: it is a leaf, which nothing computes"
            )
    return list(roots)
