"""Custom autograd functions of the programs; each tells what its backward is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

Record = Callable[[str, Tensor | None], None]


class Linear(Function):
    """``3 * x``. An undefined gradient arrives as zeros."""

    @staticmethod
    def run(x: Tensor, record: Record, key: str) -> Tensor:
        result: Tensor = Linear.apply(x, record, key)  # type: ignore[no-untyped-call]
        return result

    @staticmethod
    def forward(ctx: Any, x: Tensor, record: Record, key: str) -> Tensor:
        ctx.record, ctx.key = record, key
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.record(ctx.key, gradient)
        return gradient * 3, None, None


class NonLinear(Function):
    """Its backward is not linear: gradients that arrive in parts do not add up to the right one."""

    @staticmethod
    def run(x: Tensor, record: Record, key: str) -> Tensor:
        result: Tensor = NonLinear.apply(x, record, key)  # type: ignore[no-untyped-call]
        return result

    @staticmethod
    def forward(ctx: Any, x: Tensor, record: Record, key: str) -> Tensor:
        ctx.record, ctx.key = record, key
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.record(ctx.key, gradient)
        return gradient.clamp(-4, 4) + 1, None, None


class Two(Function):
    """Product, sum and signs. Undefined gradients arrive as ``None``, and it makes some itself."""

    @staticmethod
    def run(a: Tensor, b: Tensor, record: Record, key: str) -> tuple[Tensor, Tensor, Tensor]:
        results: tuple[Tensor, Tensor, Tensor] = Two.apply(a, b, record, key)  # type: ignore[no-untyped-call]
        return results

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, record: Record, key: str) -> tuple[Tensor, Tensor, Tensor]:
        ctx.record, ctx.key = record, key
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a, b)
        signs = (a > 0).to(torch.int64)
        ctx.mark_non_differentiable(signs)
        return a * b, a + b, signs

    @staticmethod
    def backward(ctx: Any, of_product: Tensor | None, of_sum: Tensor | None, _of_signs: Tensor | None) -> Any:
        ctx.record(f"{ctx.key} product", of_product)
        ctx.record(f"{ctx.key} sum", of_sum)
        a, b = ctx.saved_tensors
        of_a, of_b = of_sum, None
        if of_product is not None:
            of_a = of_product * b if of_sum is None else of_product * b + of_sum
            of_b = of_product * a
        return of_a, of_b, None, None


class TwoMaterialized(Function):
    """Two multiples. If only one is used, the other's gradient arrives as zeros."""

    @staticmethod
    def run(x: Tensor, record: Record, key: str) -> tuple[Tensor, Tensor]:
        results: tuple[Tensor, Tensor] = TwoMaterialized.apply(x, record, key)  # type: ignore[no-untyped-call]
        return results

    @staticmethod
    def forward(ctx: Any, x: Tensor, record: Record, key: str) -> tuple[Tensor, Tensor]:
        ctx.record, ctx.key = record, key
        return x * 2, x * 5

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Any:
        ctx.record(f"{ctx.key} first", first)
        ctx.record(f"{ctx.key} second", second)
        return first * 2 + second * 5, None, None
