"""Sets the device ``spmd:0`` up.

PyTorch's one slot for a device of others (``PrivateUse1``) is set up from Python. Operators that make tensors
from nothing are registered for the device; others come through their tensors (``spmd/engine/dispatch.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from spmd.engine import autocast
from spmd.engine.current import DEVICE, NAME
from spmd.engine.device_module import DeviceModule
from spmd.engine.dispatch import dispatch, is_composite
from spmd.engine.handlers import HANDLERS
from spmd.engine.logical_tensor import LogicalTensor, dispatch_with

__all__ = ["operators_that_make_from_nothing", "set_up"]

aten: Final = torch.ops.aten
_library: Any = None


def set_up() -> torch.device:
    """Give PyTorch the device; once in a process, for good.

    Raises:
        RuntimeError: the process has another device in this slot.
    """
    global _library
    if _library is not None:
        return DEVICE
    _setup_privateuseone_for_python_backend(NAME, backend_module=DeviceModule())
    dispatch_with(dispatch)
    _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, operator in operators_that_make_from_nothing():
        _library.impl(name, _kernel(operator), "PrivateUse1")
    _library.impl("_pin_memory", lambda tensor, device=None: tensor, "CPU")  # workers take from any memory
    _library.impl("_copy_from", HANDLERS[aten._copy_from.default], "PrivateUse1")
    # what it is composed of is chosen above autograd, and for devices of others always the same
    attention = aten.scaled_dot_product_attention.default
    _library.impl("scaled_dot_product_attention", HANDLERS[attention], "AutogradPrivateUse1")
    autocast.install(_library)
    _let_optimizers_take_lists()
    _keep_compilers_out((_kernel(attention), HANDLERS[aten._copy_from.default], HANDLERS[attention]))
    return DEVICE


def operators_that_make_from_nothing() -> Iterator[tuple[str, Any]]:
    """Those of ``aten`` that are given a device and no tensor, with the names that libraries know them by."""
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and not is_composite(name):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            operator = getattr(getattr(aten, packet), overload or "default", None)
            if operator is not None and _makes_from_nothing(operator):
                yield name.removeprefix("aten::"), operator


def _makes_from_nothing(operator: Any) -> bool:
    arguments = operator._schema.arguments
    return any(each.name == "device" for each in arguments) and not any(
        "Tensor" in str(each.type) for each in arguments
    )


def _kernel(operator: Any) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        return dispatch(operator, args, kwargs)

    return make


def _let_optimizers_take_lists() -> None:
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for module in (optimizer, _foreach_utils):
        module._foreach_supported_types.append(LogicalTensor)


def _keep_compilers_out(kernels: Iterable[Any]) -> None:
    """Have ``torch.compile`` leave what is done to our tensors alone: it is recorded, as without it."""
    never = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for each in (LogicalTensor.__torch_dispatch__, *kernels):
        set_code_exec_strategy(each.__code__, never)
