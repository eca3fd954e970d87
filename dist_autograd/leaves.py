"""Gradients as they leave the engine, made the context's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

__all__ = ["owned"]

_STRIDED: Final = torch.strided


def owned(gradients: Iterable[Tensor | None]) -> list[Tensor | None]:
    """The same gradients, each with memory that none of the others has, and as large as it looks.

    The engine passes one tensor to every input of an addition, and an expanded one out of a sum. Whoever
    changes a gradient in place, as clipping does, must change that one alone.
    """
    seen: set[int] = set()
    result: list[Tensor | None] = []
    for gradient in gradients:
        if gradient is None or gradient.layout is not _STRIDED:
            result.append(gradient)
            continue
        memory = gradient.untyped_storage()
        if memory.data_ptr() in seen or memory.nbytes() != gradient.nbytes:
            result.append(gradient.clone())
        else:
            seen.add(memory.data_ptr())
            result.append(gradient)
    return result
