"""Tensors on the device ``spmd:0``, without data.

They are of a wrapper subclass, so that copies that C++ makes of them (views, gradients, saved tensors) are of
this class, too. Autograd works as on any device; below it, PyTorch passes each operation to the function set
by ``dispatch_with``.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from rpc.runtime.torch_internals import DisableTorchFunctionSubclass, InferenceMode
from rpc.serialization.pickler import sending
from spmd.engine.driver.aliases import Alias, Value, read
from spmd.engine.driver.current import DEVICE, NAME, engine, is_running
from spmd.engine.program.metas import spec_of
from spmd.torch_internals import (
    BaseTensor,
    disabled_torch_function,
    is_dense,
    make_wrapper,
    rebuild_on_device,
    rebuild_parameter,
)

__all__ = [
    "LogicalTensor",
    "alias_of",
    "dispatch_with",
    "fetched",
    "in_message",
    "know_gradient",
    "parameter_of",
    "show_instead",
    "uploaded",
    "wrap",
    "wrap_view",
]

_inference: Final = torch.is_inference_mode_enabled
_STRIDED: Final = torch.strided

Dispatch = Callable[[Any, Any, tuple[Any, ...], "dict[str, Any] | None"], Any]


class LogicalTensor(torch.Tensor):
    """A tensor on ``spmd:0``. Its data, if it is computed at all, is on the workers."""

    __slots__ = ("_alias",)
    _alias: Alias
    __torch_function__ = disabled_torch_function

    @staticmethod
    def __torch_dispatch__(*operation: Any) -> Any:
        """Raise an error, until ``dispatch_with`` has replaced this."""
        raise AssertionError("the device is not set up")

    @property
    def data(self) -> Tensor:
        """As for any tensor: the same memory, with a version counter of its own. Assigning it makes this
        tensor show the other one's memory.
        """
        shown: Tensor = _TENSOR_DATA.__get__(self)
        return shown

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, LogicalTensor):
            raise RuntimeError(
                "incompatible tensor type: .data of a tensor on spmd:0 can only be one on spmd:0; use "
                ".data.copy_(value), or .data = value.to(spmd.device())"
            )
        show_instead(self, value)

    def untyped_storage(self) -> torch.UntypedStorage:
        """As for any tensor, but of the storage only the size is known."""
        storage: torch.UntypedStorage = _TENSOR_STORAGE(self)
        storage.__class__ = _Storage
        return storage

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if not self.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol")
        if id(self) in memo:
            found: Tensor = memo[id(self)]
            return found
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        copied.__dict__.update(
            {
                name: deepcopy(each, memo)
                for name, each in self.__dict__.items()
                if name not in ("_alias", _KNOWN)
            }
        )
        if self.grad is not None:
            copied.grad = deepcopy(self.grad, memo)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return the reduction that PyTorch uses for XLA's tensors, so that ``torch.load`` restores it on any
        device.
        """
        if isinstance(self, Parameter):
            return rebuild_parameter, (self.detach(), self.requires_grad, OrderedDict())
        return rebuild_on_device, (
            self.detach().cpu(),
            self.dtype,
            str(DEVICE),
            self.requires_grad,
        )

    def __format__(self, spec: str) -> str:
        return format(self.item() if self.dim() == 0 else repr(self), spec)

    def tolist(self) -> Any:
        """As for any tensor; waits for the workers."""
        return self.detach().cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Raise an error, as for any tensor that is not on the CPU, unless ``force``."""
        if not force:
            raise TypeError(
                "can't convert spmd:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
                "host memory first."
            )
        return self.detach().cpu().numpy()

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shown = repr(self.detach().cpu())
        more = f", device='{NAME}:0'"
        if self.grad_fn is not None:
            more += f", grad_fn=<{type(self.grad_fn).__name__}>"
        elif self.requires_grad:
            more += ", requires_grad=True"
        return f"{shown[:-1]}{more})"


_TENSOR_DATA: Final[Any] = vars(BaseTensor).get("data")
_TENSOR_STORAGE: Final[Any] = torch.Tensor.untyped_storage


def _refuse(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "the storage of a tensor on spmd:0 has a size, but no content in this process: use the tensor's own "
        "methods, such as x.resize_(), x.copy_(), x.clone() and x.cpu()"
    )


class _Storage(torch.UntypedStorage):
    """A storage without content."""

    clone = copy_ = cpu = fill_ = resize_ = tolist = __getitem__ = __setitem__ = _refuse


def in_message(tensor: LogicalTensor) -> tuple[Any, ...]:
    """Return the reduction of a tensor in a message, whose receiver need not have the device.

    In an autograd context the copy on the CPU is part of the graph, so that gradients flow back through it;
    not that of a parameter whose module is sent with it.
    """
    is_parameter, message = isinstance(tensor, Parameter), sending.pickler
    is_owned = is_parameter and message is not None and id(tensor) in (message.owned or ())
    data = (tensor.detach() if is_owned else tensor).cpu()
    return _received, (data, tensor.requires_grad, is_parameter)


def _received(data: Tensor, requires_grad: bool, is_parameter: bool) -> Tensor:
    """Return a tensor on the device, if there is one; otherwise on the CPU."""
    tensor = data.to(DEVICE) if is_running() else data
    if data.grad_fn is not None:
        return tensor
    tensor = tensor.detach()
    return Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def wrap(alias: Alias) -> LogicalTensor:
    """Make a tensor that shows an alias."""
    spec = alias.spec
    made: LogicalTensor = make_wrapper(LogicalTensor, *spec.geometry, None, spec.dtype, _STRIDED, DEVICE)
    made._alias = alias
    return made


def wrap_view(viewed: Tensor, alias: Alias) -> LogicalTensor:
    """Make a tensor that shows an alias of another tensor's memory: an inference tensor if that one is."""
    is_inference = viewed.is_inference()
    if is_inference is _inference():
        return wrap(alias)
    with InferenceMode(is_inference):
        return wrap(alias)


def alias_of(tensor: Tensor) -> Alias:
    """Return the alias that a tensor shows.

    Raises:
        TypeError: it is not on the device.
    """
    if not isinstance(tensor, LogicalTensor):
        where = getattr(tensor, "device", type(tensor).__name__)
        raise TypeError(f"expected a tensor on spmd:0, got one on {where}: move it with .to(spmd.device())")
    return tensor._alias


def know_gradient(parameter: Tensor) -> None:
    """Make the gradients of a parameter refer to it. Once is enough."""
    if isinstance(parameter, LogicalTensor) and not hasattr(parameter, _KNOWN):
        register: Any = parameter.register_post_accumulate_grad_hook
        register(_tell_gradient)
        setattr(parameter, _KNOWN, True)


def parameter_of(gradient: Tensor) -> LogicalTensor | None:
    """Return the parameter of a gradient, or None."""
    found: weakref.ref[LogicalTensor] | None = getattr(gradient, _PARAMETER, None)
    return None if found is None else found()


_KNOWN: Final = "_gradient_knows"
_PARAMETER: Final = "_gradient_of"


def _tell_gradient(parameter: Tensor) -> None:
    setattr(parameter.grad, _PARAMETER, weakref.ref(parameter))


def uploaded(data: Tensor) -> LogicalTensor:
    """Return a tensor with this content, which is sent to the workers when it is first used there.

    Args:
        data: tensor on the CPU; taken over.
    """
    spec = spec_of(data)
    return wrap(Alias(Value(spec, data=data), spec))


def fetched(alias: Alias) -> Tensor:
    """Return the content, on the CPU."""
    current = engine()
    with current.recorder.lock:
        value = read(current.recorder, alias)
        spec = alias.spec
    content = current.fetch(value)
    if content.stride() != spec.stride and not spec.offset and content.numel():
        laid_out = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
        if is_dense(laid_out):
            return laid_out.copy_(content)
    return content


def show_instead(tensor: LogicalTensor, other: LogicalTensor) -> None:
    """Make a tensor show what another one does, as assigning its ``data`` does."""
    with DisableTorchFunctionSubclass():  # a parameter without a shape yet allows few functions
        is_alike = tensor.is_inference() is other.is_inference()
    shown = other if is_alike else wrap_view(tensor, other._alias)
    _TENSOR_DATA.__set__(tensor, shown)
    tensor._alias = other._alias


def dispatch_with(dispatch: Dispatch) -> None:
    """Set the function that PyTorch passes operations on these tensors to: it takes the operator, the types
    of its tensors, its arguments, and its keyword arguments.
    """
    LogicalTensor.__torch_dispatch__ = staticmethod(dispatch)  # type: ignore[method-assign]
