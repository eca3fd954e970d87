"""The setup of the device ``spmd:0``.

PyTorch's one slot for third-party devices (``PrivateUse1``) is set up from Python. Operators that create
tensors are registered for the device; all others are dispatched through their tensors (``dispatch.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from rpc.runtime.torch_internals import pytree
from spmd.engine.driver import autocast, generator
from spmd.engine.driver.backward_errors import DeviceGuard, raise_what_was_taken
from spmd.engine.driver.current import DEVICE, NAME
from spmd.engine.driver.device_module import DeviceModule
from spmd.engine.driver.dispatch import dispatch, is_composite
from spmd.engine.driver.handlers import HANDLERS
from spmd.engine.driver.lazy import let_lazy_modules_be_made_there
from spmd.engine.driver.logical_tensor import LogicalTensor, dispatch_with
from spmd.engine.driver.saved import restored
from spmd.torch_internals import (
    INTERNALS,
    NO_SPMD_MODE,
    AutoDispatchBelowAutograd,
    DisableAutocast,
    FrameAction,
    FrameExecStrategy,
    copy_from,
    foreach_types,
    names_of_operators,
    set_code_exec_strategy,
    set_up_device,
)

__all__ = ["operators_that_make_from_nothing", "set_up"]

aten: Final = torch.ops.aten
_library: Any = None
_BEFORE_OTHERS: Final = 5
"""Priority with which ``torch.load`` asks this device for storages: the CPU's is 10."""


def set_up() -> torch.device:
    """Register the device with PyTorch; once in a process, permanently.

    Raises:
        RuntimeError: the process has another device in this slot.
    """
    global _library
    if _library is not None:
        return DEVICE
    INTERNALS.check()
    INTERNALS.require(NO_SPMD_MODE)
    set_up_device(NAME, backend_module=DeviceModule(), device_guard=DeviceGuard())
    raise_what_was_taken()
    dispatch_with(dispatch)
    _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, operator in operators_that_make_from_nothing():
        _library.impl(name, _kernel(operator), "PrivateUse1")
    for name, operator in operators_composed_into_out():
        _library.impl(name, _kernel_of_out(operator), "AutogradPrivateUse1")
    _library.impl("_pin_memory", lambda tensor, device=None: tensor, "CPU")  # workers accept any memory
    _library.impl("_copy_from", HANDLERS[copy_from], "PrivateUse1")
    # what they are composed of is chosen above autograd, and for devices of others always the same
    composed = (aten.scaled_dot_product_attention.default, aten.ctc_loss.Tensor)
    for operator in composed:
        _library.impl(operator, HANDLERS[operator], "AutogradPrivateUse1")
    autocast.install(_library)
    generator.install()
    _let_optimizers_take_lists()
    let_lazy_modules_be_made_there()
    torch.serialization.register_package(_BEFORE_OTHERS, lambda storage: None, restored)
    kernels = (_kernel(aten.empty.memory_format), _kernel_of_out(aten.kron.out))
    _keep_compilers_out((*kernels, *(HANDLERS[each] for each in (copy_from, *composed))))
    return DEVICE


def operators_that_make_from_nothing() -> Iterator[tuple[str, Any]]:
    """Return the operators of ``aten`` that take a device and no tensor, with their names in libraries."""
    for name in names_of_operators():
        if name.startswith("aten::") and not is_composite(name):
            operator = _overload(name)
            if operator is not None and _makes_from_nothing(operator):
                yield name.removeprefix("aten::"), operator


def operators_composed_into_out() -> Iterator[tuple[str, Any]]:
    """Return the operators of ``aten`` that have ``out=`` and that PyTorch composes of others, with their
    names in libraries.

    PyTorch composes them above autograd, where this device is not asked unless they are registered.
    """
    for name in names_of_operators():
        if name.startswith("aten::") and "out" in name.partition(".")[2] and is_composite(name):
            operator = _overload(name)
            if operator is not None and any(each.is_out for each in operator._schema.arguments):
                yield name.removeprefix("aten::"), operator


def _overload(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(aten, packet), overload or "default", None)


def _makes_from_nothing(operator: Any) -> bool:
    arguments = operator._schema.arguments
    return any(each.name == "device" for each in arguments) and not any(
        "Tensor" in str(each.type) for each in arguments
    )


def _kernel(operator: Any) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        return dispatch(operator, (), args, kwargs)

    return make


def _kernel_of_out(operator: Any) -> Callable[..., Any]:
    """Return the kernel of an operator with ``out=``, with the behaviour of PyTorch's autograd for operators
    that are not composed.
    """
    names = [each.name for each in operator._schema.arguments if each.is_out]

    def write(*args: Any, **kwargs: Any) -> Any:
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
            raise RuntimeError(
                f"{operator._schema.name.removeprefix('aten::')}(): functions with out=... arguments don't "
                "support automatic differentiation, but one of the arguments requires grad."
            )
        with DisableAutocast(), AutoDispatchBelowAutograd():
            written = dispatch(operator, (), args, kwargs)
        for each in names:
            increment_version(kwargs[each])
        return written

    return write


def _let_optimizers_take_lists() -> None:
    for types in foreach_types:
        types.append(LogicalTensor)


def _keep_compilers_out(kernels: Iterable[Any]) -> None:
    """Make ``torch.compile`` skip operations on this device's tensors: they are recorded, as without it."""
    if None in (FrameAction, FrameExecStrategy, set_code_exec_strategy):
        return
    never = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    for each in (LogicalTensor.__torch_dispatch__, *kernels):
        set_code_exec_strategy(each.__code__, never)
