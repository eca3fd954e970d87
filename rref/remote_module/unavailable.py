"""The methods of ``nn.Module`` that a remote module cannot have.

They work on local tensors or submodules. A remote module has none: they are on its owner. Raising an error is
better than silently doing nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn

from torch import nn

__all__ = ["WithoutLocalState"]

_ON_OWNER: Final = (
    "Its parts are on its owner: call a function there that does it, and pass it ``get_module_rref()``. "
    "Device and dtype are given when it is created, by ``remote_device`` and ``module_cls``."
)

_INSTEAD: Final = {
    "state_dict": "Use ``get_module_rref().rpc_sync().state_dict()``.",
    "load_state_dict": "Use ``get_module_rref().rpc_sync().load_state_dict(state_dict)``.",
    **dict.fromkeys(
        ("parameters", "named_parameters", "get_parameter"), "Please use ``remote_parameters`` instead."
    ),
    "zero_grad": "Gradients belong to the context of distributed autograd, not to the parameters.",
    "extra_repr": "Use ``repr``.",
    **dict.fromkeys(
        (
            *("register_buffer", "register_parameter", "add_module", "register_module", "apply", "compile"),
            *("cuda", "ipu", "xpu", "mtia", "cpu", "to", "to_empty"),
            "spmd",  # added to modules once SPMD mode has been used
            *("type", "float", "double", "half", "bfloat16"),
            *("register_backward_hook", "register_full_backward_hook", "register_full_backward_pre_hook"),
            *("register_forward_pre_hook", "register_forward_hook"),
            *("register_state_dict_pre_hook", "register_state_dict_post_hook"),
            *("register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"),
            *("buffers", "named_buffers", "children", "named_children", "modules", "named_modules"),
            *("get_buffer", "get_submodule", "set_submodule", "requires_grad_", "share_memory"),
        ),
        _ON_OWNER,
    ),
}
"""What to use in place of each method."""


def _unavailable(name: str) -> Callable[..., NoReturn]:
    """Return a method that raises an error, which says what to use instead."""

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(f"Method ``{name}`` not supported for RemoteModule. {_INSTEAD[name]}")

    method.__name__ = name
    method.__qualname__ = f"RemoteModule.{name}"
    method.__doc__ = f"Raises ``ValueError``. {_INSTEAD[name]}"
    return method


class WithoutLocalState(nn.Module):
    """A module without local parameters, buffers or submodules, whose methods for them raise."""


for _name in _INSTEAD:
    setattr(WithoutLocalState, _name, _unavailable(_name))
