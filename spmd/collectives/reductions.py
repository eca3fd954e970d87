"""Reductions: one tensor from several of the same shape and dtype, by PyTorch's own kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed import ReduceOp

__all__ = ["Reduction", "reduction_of"]

_KERNELS: Final[dict[Any, tuple[str, Callable[..., torch.Tensor]]]] = {
    ReduceOp.SUM: ("sum", torch.add),
    ReduceOp.AVG: ("average", torch.add),
    ReduceOp.PRODUCT: ("product", torch.mul),
    ReduceOp.MIN: ("minimum", torch.minimum),
    ReduceOp.MAX: ("maximum", torch.maximum),
    ReduceOp.BAND: ("bitwise and", torch.bitwise_and),
    ReduceOp.BOR: ("bitwise or", torch.bitwise_or),
    ReduceOp.BXOR: ("bitwise xor", torch.bitwise_xor),
    ReduceOp.PREMUL_SUM: ("scaled sum", torch.add),
}
_NARROW: Final = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction of several tensors to one.

    Attributes:
        name: name of the reduction, with its factor if it has one.
    """

    name: str
    _kernel: Callable[..., torch.Tensor]
    _averages: bool
    _factor: Any = None

    def check(self, dtype: torch.dtype) -> None:
        """Raise ``TypeError`` if tensors of this dtype cannot be reduced by it."""
        if not (_performs(self, dtype) if self._factor is None else _performs.__wrapped__(self, dtype)):
            raise TypeError(f"tensors of {dtype} cannot be reduced by {self.name}")

    def reduce(self, tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Replace ``out`` by the reduction of ``tensors``, in their order; it must not be one of them.

        More than two tensors of 16-bit floating point are reduced in 32 bits and rounded once.
        """
        if len(tensors) > 2 and out.dtype in _NARROW:
            total = torch.empty_like(out, dtype=torch.float32)
            self.reduce([each.float() for each in tensors], total)
            out.copy_(total)
            return
        if self._factor is not None:
            tensors = [each * self._factor for each in tensors]
        first, *rest = tensors
        for each in rest:
            first = self._kernel(first, each, out=out)
        if not rest:
            out.copy_(first)

    def merge(self, mine: torch.Tensor, other: torch.Tensor, out: torch.Tensor) -> None:
        """Replace ``out``, which may be ``mine``, by the reduction of two tensors that are ``prepare``d."""
        self._kernel(mine, other, out=out)

    def prepare(self, tensor: torch.Tensor) -> None:
        """Prepare a tensor for merging partial results, in place."""
        if self._factor is not None:
            tensor.mul_(self._factor)

    def prepared(self, tensor: torch.Tensor) -> torch.Tensor:
        """Like ``prepare``, without changing the tensor: the result is another one, if it differs."""
        return tensor if self._factor is None else tensor.clone().mul_(self._factor)

    def finish(self, tensor: torch.Tensor, count: int) -> None:
        """Finish the reduction of ``count`` tensors, once, at the end."""
        if self._averages:
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.div_(count)
            else:
                tensor.div_(count, rounding_mode="trunc")


@functools.cache
def _performs(reduction: Reduction, dtype: torch.dtype) -> bool:
    """Whether PyTorch has the kernels that a reduction of this dtype needs, found by reducing one element.

    Kernels differ between dtypes, operations and versions of PyTorch. A missing kernel must be noticed on the
    calling rank: once ranks exchange data, an error is final for the group.
    """
    if dtype.is_floating_point and dtype.itemsize == 1:
        return False  # the product exists, rounded at each step
    try:
        with torch.inference_mode():
            terms = [torch.zeros(1, dtype=dtype, device="cpu") for _ in range(3)]
            for count in (2, 3):
                total = torch.empty_like(terms[0])
                reduction.reduce(terms[:count], total)
                reduction.finish(total, count)
            reduction.prepare(total)
            reduction.merge(total, terms[0], total)
    except (RuntimeError, TypeError):
        return False
    return True


def reduction_of(operation: Any) -> Reduction:
    """Return the reduction that a ``torch.distributed.ReduceOp`` names.

    Raises:
        ValueError: there is no such reduction.
    """
    kind = getattr(operation, "op", operation)
    try:
        name, kernel = _KERNELS[kind]
    except KeyError:
        known = ", ".join(each for each, _ in _KERNELS.values())
        raise ValueError(f"expected a reduction ({known}), got {operation}") from None
    factor = getattr(operation, "factor", None) if kind == ReduceOp.PREMUL_SUM else None
    if isinstance(factor, torch.Tensor):
        name, factor = f"{name} by a tensor", factor.detach().cpu().reshape(())  # it has one element
    elif factor is not None:
        name = f"{name} by {float(factor):g}"
    return Reduction(name, kernel, kind == ReduceOp.AVG, factor)
