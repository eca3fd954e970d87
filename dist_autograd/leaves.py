"""Gradients as they leave the engine, made the context's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["owned"]


def owned(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The same gradients, each with memory that none of the others has, and as large as it looks.

    The engine passes one tensor to every input of an addition, and an expanded one out of a sum. Whoever
    changes a gradient in place, as clipping does, must change that one alone.
    """
    elements = [_elements(gradient) for gradient in gradients]
    uses = Counter(_address(tensor) for tensor in elements if tensor is not None)
    return [
        gradient.clone()
        if gradient is not None
        and tensor is not None
        and (uses[_address(tensor)] > 1 or tensor.untyped_storage().nbytes() != tensor.nbytes)
        else gradient
        for gradient, tensor in zip(gradients, elements, strict=True)
    ]


def _elements(gradient: Tensor | None) -> Tensor | None:
    """The strided tensor that holds a gradient's elements; None for kinds that share none."""
    if gradient is None or gradient.layout is torch.strided:
        return gradient
    return gradient._values() if gradient.layout is torch.sparse_coo else None


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
