"""The methods of ``nn.Module`` that a remote module cannot have, each with an alternative.

They work on local tensors or submodules. A remote module has none: they are on its owner. Raising an error is
better than silently doing nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

__all__ = ["WithoutLocalState"]


def unavailable(name: str, instead: str) -> Callable[..., NoReturn]:
    """Return a method that raises an error, which says what to use instead."""

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(f"Method ``{name}`` not supported for RemoteModule. {instead}")

    method.__name__ = name
    method.__qualname__ = f"RemoteModule.{name}"
    method.__doc__ = f"Raises ``ValueError``. {instead}"
    return method


def _on_owner(name: str, instead: str = "") -> Callable[..., NoReturn]:
    here = f"Call a function on the owner that does it, and pass it ``get_module_rref()``{instead}."
    return unavailable(name, here)


def _moves(name: str) -> Callable[..., NoReturn]:
    return unavailable(name, "Its device is given when it is created, by ``remote_device``.")


def _converts(name: str) -> Callable[..., NoReturn]:
    return unavailable(name, "Pass a ``module_cls`` that creates the module with the dtype you want.")


def _lists_parameters(name: str) -> Callable[..., NoReturn]:
    return unavailable(name, "Please use ``remote_parameters`` instead.")


def _lists_parts(name: str) -> Callable[..., NoReturn]:
    return _on_owner(name, "; its parts are not here. Of a model that contains it, take the local parts")


def _makes_state(name: str) -> Callable[..., NoReturn]:
    return unavailable(name, "Pass a ``module_cls`` that adds it in its ``__init__``.")


class WithoutLocalState(nn.Module):
    """A module without local parameters, buffers or submodules, whose methods for them raise."""

    register_buffer = _makes_state("register_buffer")
    register_parameter = _makes_state("register_parameter")
    add_module = _makes_state("add_module")
    register_module = _makes_state("register_module")
    apply = _on_owner("apply")
    cuda = _moves("cuda")
    ipu = _moves("ipu")
    xpu = _moves("xpu")
    mtia = _moves("mtia")
    spmd = _moves("spmd")  # added to modules once SPMD mode has been used
    cpu = _moves("cpu")
    to = _moves("to")
    to_empty = _moves("to_empty")
    type = _converts("type")
    float = _converts("float")
    double = _converts("double")
    half = _converts("half")
    bfloat16 = _converts("bfloat16")
    register_backward_hook = _on_owner("register_backward_hook")
    register_full_backward_hook = _on_owner("register_full_backward_hook")
    register_full_backward_pre_hook = _on_owner("register_full_backward_pre_hook")
    register_forward_pre_hook = _on_owner("register_forward_pre_hook")
    register_forward_hook = _on_owner("register_forward_hook")
    register_state_dict_pre_hook = _on_owner("register_state_dict_pre_hook")
    register_state_dict_post_hook = _on_owner("register_state_dict_post_hook")
    register_load_state_dict_pre_hook = _on_owner("register_load_state_dict_pre_hook")
    register_load_state_dict_post_hook = _on_owner("register_load_state_dict_post_hook")
    compile = _on_owner("compile")
    state_dict = unavailable("state_dict", "Use ``get_module_rref().rpc_sync().state_dict()``.")
    load_state_dict = unavailable(
        "load_state_dict", "Use ``get_module_rref().rpc_sync().load_state_dict(state_dict)``."
    )
    parameters = _lists_parameters("parameters")
    named_parameters = _lists_parameters("named_parameters")
    buffers = _on_owner("buffers")
    named_buffers = _on_owner("named_buffers")
    children = _lists_parts("children")
    named_children = _lists_parts("named_children")
    modules = _lists_parts("modules")
    named_modules = _lists_parts("named_modules")
    get_parameter = _lists_parameters("get_parameter")
    get_buffer = _on_owner("get_buffer")
    get_submodule = _lists_parts("get_submodule")
    set_submodule = _lists_parts("set_submodule")
    requires_grad_ = _on_owner("requires_grad_")
    zero_grad = unavailable(
        "zero_grad",
        "Under distributed autograd there is nothing to reset: gradients belong to the context, not to "
        "the parameters.",
    )
    share_memory = _on_owner("share_memory")
    extra_repr = unavailable("extra_repr", "Use ``repr``.")
