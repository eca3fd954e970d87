"""Lazy modules on the device before their first forward: parameters and buffers that wait for their shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from spmd.engine.driver.current import DEVICE
from spmd.engine.driver.logical_tensor import LogicalTensor, wrap
from spmd.torch_internals import allowed_while_uninitialized

__all__ = ["leave_uninitialized", "let_lazy_modules_be_made_there"]


def leave_uninitialized(target: LogicalTensor, source: Tensor) -> None:
    """Make a new tensor, to which an uninitialized one is copied, uninitialized as well."""
    target.__class__ = _Parameter if isinstance(source, UninitializedParameter) else _Buffer


def let_lazy_modules_be_made_there() -> None:
    """Extend ``device=`` of a lazy module, and ``with device:`` around it, to the logical device."""
    for kind in (UninitializedParameter, UninitializedBuffer):
        kind.__new__ = staticmethod(_maker(kind))  # type: ignore[method-assign]


def _maker(kind: Any) -> Callable[..., Any]:
    before = kind.__new__
    is_parameter = kind is UninitializedParameter

    def make(
        cls: Any,
        requires_grad: bool = is_parameter,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> Any:
        if torch.empty(0, device=device).device != DEVICE:
            return before(cls, requires_grad, device, dtype, **options)
        with torch.no_grad():
            made = before(cls, requires_grad, "cpu", dtype, **options).to(DEVICE)
        made.requires_grad_(requires_grad)
        made._is_param = is_parameter
        return made

    return make


_PYTORCHS: Final[Any] = UninitializedParameter


class _Uninitialized:
    """Base before PyTorch's own class of uninitialized tensors."""

    kind: Any
    cls_to_become = LogicalTensor
    _allowed_methods = (*allowed_while_uninitialized, Tensor.requires_grad_)

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        """Run a function; tensors that result from a conversion are lazy as well."""
        parent: Any = super()
        made: Any = parent.__torch_function__(*args, **kwargs)
        if type(made) is LogicalTensor:
            made.__class__ = cls  # type: ignore[assignment]
        elif type(made) is Tensor:
            made = made.as_subclass(cls.kind)
        return made

    def detach(self: Any) -> Any:
        made = wrap(self._alias)
        made.__class__ = type(self)
        return made

    data: Any = property(detach, vars(LogicalTensor)["data"].fset)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = self.detach().requires_grad_(self.requires_grad)
            copied.__dict__.update(self.__dict__)
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return self.kind, (self.requires_grad,)


class _Parameter(_Uninitialized, UninitializedParameter, LogicalTensor):
    kind = UninitializedParameter


class _Buffer(_Uninitialized, UninitializedBuffer, LogicalTensor):
    kind = UninitializedBuffer
