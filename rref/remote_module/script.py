"""A remote module as TorchScript sees it.

TorchScript compiles source code, and can neither hold a reference nor call a method of ours. So for each
interface the source of a module is generated, with the interface's own argument and return types; that module
calls back into Python. What TorchScript cannot hold is attached as a Python attribute to an empty tensor,
which it can hold: such an attribute lives exactly as long as the tensor, even if only TorchScript refers to
it.
"""

from __future__ import annotations

import functools
import linecache
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

from rpc.runtime.torch_internals import qualified_name
from rref.torch_internals import script_functions

__all__ = ["begin_call", "check_interface", "end_call", "script_face"]

ForwardAsync = Callable[..., torch.futures.Future[Any]]

_SOURCE: Final = """
from typing import *

import torch
from torch import Tensor, nn
from torch.futures import Future

from rref.remote_module.script import begin_call, end_call


class ScriptRemoteModule(nn.Module):
    def __init__(self, module: Tensor) -> None:
        super().__init__()
        self.module = module

    def forward(self, {parameters}) -> {returns}:
        return end(begin(self.module, {arguments}))

    @torch.jit.export
    def forward_async(self, {parameters}) -> Future[{returns}]:
        return torch.jit.fork(self.end_later, begin(self.module, {arguments}))

    @torch.jit.export
    def end_later(self, call: Tensor) -> {returns}:
        return end(call)

    @torch.jit.export
    def __getstate__(self) -> int:
        raise RuntimeError("{unsendable}")

    @torch.jit.export
    def __setstate__(self, state: int) -> None:
        raise RuntimeError("{unsendable}")


@torch.jit.ignore
def begin(module: Tensor, {parameters}) -> Tensor:
    return begin_call(module, {arguments})


@torch.jit.ignore
def end(call: Tensor) -> {returns}:
    return end_call(call)
"""

_UNSENDABLE: Final = (
    "Passing a script RemoteModule over RPC is not supported, nor saving one: a RemoteModule can only be "
    "pickled when using RPC, and before torch.jit.script. Send its get_module_rref(), and use "
    "RemoteModule.init_from_module_rref there."
)


def check_interface(interface: type) -> None:
    """Raise ``ValueError`` unless ``interface`` can be the interface of a remote module."""
    if not getattr(interface, "__torch_script_interface__", False):
        raise ValueError(
            f"module_interface_cls {interface} must be a type object decorated by @torch.jit.interface"
        )
    methods = _compiled(interface).getMethodNames()
    if "forward" not in methods:
        raise ValueError(f"the interface {interface.__name__} has no forward; it has {', '.join(methods)}")


def script_face(interface: type, forward_async: ForwardAsync) -> nn.Module:
    """Return what ``torch.jit.script`` compiles: a module with the interface's ``forward``, and
    ``forward_async``.

    Args:
        interface: a class decorated with ``@torch.jit.interface``.
        forward_async: calls the remote module.
    """
    module = torch.empty(0)
    module.forward_async = forward_async  # type: ignore[attr-defined]
    face: nn.Module = _source_module(interface).ScriptRemoteModule(module)
    return face


def begin_call(module: Tensor, *args: Any) -> Tensor:
    """Start a call of a remote module. Called from TorchScript."""
    call = torch.empty(0)
    call.future = module.forward_async(*args)  # type: ignore[attr-defined]
    return call


def end_call(call: Tensor) -> Any:
    """Wait for the end of a call. Called from TorchScript."""
    return call.future.wait()  # type: ignore[attr-defined]


def _compiled(interface: type) -> Any:
    return script_functions.get_interface(qualified_name(interface))


@functools.cache
def _source_module(interface: type) -> Any:
    """Return the Python module generated for an interface; TorchScript looks up its source line by line."""
    schema = _compiled(interface).getMethod("forward")
    arguments = schema.arguments[1:]  # without self; an interface has no defaults
    source = _SOURCE.format(
        parameters=", ".join(f"{argument.name}: {argument.type.annotation_str}" for argument in arguments),
        arguments=", ".join(argument.name for argument in arguments),
        returns=schema.returns[0].type.annotation_str,
        unsendable=_UNSENDABLE,
    )
    name = f"rref.remote_module.script_of_{qualified_name(interface).replace('.', '_')}"
    file = f"<{name}>"
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = file
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec", dont_inherit=True), vars(module))
    return module
