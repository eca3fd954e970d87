"""``RemoteModule``: an ``nn.Module`` whose parameters and computation are on another worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import nn

from rpc.agent.futures import Future
from rpc.api import keywords, positional, rpc_async, rpc_sync
from rpc.errors import NotInitializedError, with_article
from rpc.runtime.blocking import check_may_block
from rpc.runtime.current import current_agent, is_initialized
from rref.reference import RRef
from rref.remote import remote
from rref.remote_module.owner import (
    call_on_device,
    check_device,
    make_module,
    parameter_references,
    set_training,
)
from rref.remote_module.remote_device import RemoteDevice
from rref.remote_module.script import check_interface, script_face
from rref.remote_module.unavailable import WithoutLocalState

__all__ = ["RemoteModule", "reduce_remote_module"]


class RemoteModule(WithoutLocalState):
    """A module that is created on another worker, lives there, and is called from here.

    It can be part of a local model, and can be sent to other workers, which then use the same module. Inside
    ``dist_autograd.context``, gradients flow through it. ``parameters()`` and similar methods of a local
    model that contains it raise, since they would omit what is remote: give optimizers the parameters of the
    local parts, and ``remote_parameters()`` of this one.

    Calling it calls the remote module as usual, so hooks that are registered there run.

    Args:
        remote_device: worker and device: ``"worker1/cpu"``, ``"worker1/cuda:0"``, ``"rank:1/cpu"``, or
            ``"worker1"``, which means its CPU. If the device is not the CPU, tensors among the arguments are
            moved to it, and tensors in the result are moved to the CPU unless this worker has a device map
            for the remote one.
        module_cls: a class derived from ``nn.Module``, or a function that returns a module.
        args: positional arguments for ``module_cls``.
        kwargs: keyword arguments for ``module_cls``.
        _module_interface_cls: a class decorated with ``@torch.jit.interface``: the module is then created in
            TorchScript, and ``torch.jit.script`` of this object returns a module with that interface and a
            ``forward_async``. As in PyTorch, it may change.

    Attributes:
        on: name of the worker that the module lives on.
        device: device of the module on that worker.
        is_device_map_set: whether this worker has a device map for that worker.
        is_scriptable: whether ``torch.jit.script`` can compile this object.
        module_rref: the reference that ``get_module_rref`` returns.

    Raises:
        NotInitializedError: ``rpc.init_rpc`` has not been called.
        TypeError: ``module_cls`` is a module, or cannot be called.
        ValueError: ``remote_device`` is malformed, or ``_module_interface_cls`` is not an interface.
        UnknownWorkerError: there is no such worker.
        RuntimeError: the worker has no such device.

    Any other error in creating the module is raised when it is first used.

    Example::

        layer = RemoteModule("worker1/cpu", nn.Linear, args=(20, 30))
        output = layer(torch.randn(128, 20))                     # computed on worker1
        future = layer.forward_async(torch.randn(128, 20))       # a torch.futures.Future of it
        optimizer = DistributedOptimizer(optim.SGD, layer.remote_parameters(), lr=0.1)
    """

    on: str
    device: str
    is_device_map_set: bool
    is_scriptable: bool
    module_rref: RRef[nn.Module]

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: type | None = None,
    ) -> None:
        super().__init__()
        _check_initialized()
        place = RemoteDevice.parse(remote_device)
        _check_maker(module_cls)
        if _module_interface_cls is not None:
            check_interface(_module_interface_cls)
        if place.device.type != "cpu":
            rpc_sync(place.worker, check_device, args=(str(place.device),))
        making = (module_cls, positional(args), keywords(kwargs), str(place.device), _module_interface_cls)
        module: RRef[nn.Module] = remote(place.worker, make_module, args=making)
        self._bind(module, place.device, _module_interface_cls)

    @classmethod
    def init_from_module_rref(
        cls, remote_device: str, module_rref: RRef[nn.Module], _module_interface_cls: type | None = None
    ) -> Self:
        """Make a remote module from a reference to an existing module, which is then shared.

        Args:
            remote_device: as for ``RemoteModule``; the worker is always the reference's owner, and the device
                must be the one that the module is on.
            module_rref: a reference to an ``nn.Module``.
            _module_interface_cls: as for ``RemoteModule``.

        Raises:
            TypeError: ``module_rref`` is not a reference.

        Example::

            shared = RemoteModule.init_from_module_rref("worker1/cpu", layer.get_module_rref())
        """
        _check_initialized()
        place = RemoteDevice.parse(remote_device)
        given: Any = module_rref
        if not isinstance(given, RRef):
            raise TypeError(
                f"module_rref is {with_article(type(given))}, not a reference to a module: pass what "
                "rpc.remote(worker, ModuleClass) or get_module_rref() returned"
            )
        if _module_interface_cls is not None:
            check_interface(_module_interface_cls)
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._bind(module_rref, place.device, _module_interface_cls)
        return self

    def _bind(self, module: RRef[nn.Module], device: torch.device, interface: type | None) -> None:
        self.on = module.owner_name()
        self.device = str(device)
        self.is_device_map_set = bool(current_agent().options.device_maps.get(self.on))
        self.is_scriptable = interface is not None
        self.module_rref = module
        self._interface = interface

    # ---- calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module's output for these inputs on its owner.

        Raises:
            WorkerLostError: the owner is gone.
            RpcTimeoutError: there was no answer within the timeout of calls.
            Exception: the error raised by the module's constructor or its ``forward``.
        """
        if self.device == "cpu":
            return self.module_rref.rpc_sync().__call__(*args, **kwargs)
        check_may_block()
        return self.forward_async(*args, **kwargs).wait()

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Like ``forward``, but returns a future of the output immediately."""
        module = self.module_rref
        if self.device == "cpu":
            future: Future[Any] = module.rpc_async().__call__(*args, **kwargs)
            return future
        how = (module, self.device, self.is_device_map_set, args, kwargs)
        return rpc_async(module.owner(), call_on_device, args=how)

    # ---- parts of the module

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """Return references to the module's parameters, as ``DistributedOptimizer`` accepts them.

        Args:
            recurse: whether to include the parameters of submodules.
        """
        references: list[RRef[nn.Parameter]] = rpc_sync(
            self.module_rref.owner(), parameter_references, args=(self.module_rref, recurse)
        )
        return references

    def get_module_rref(self) -> RRef[nn.Module]:
        """Return the reference to the module itself."""
        return self.module_rref

    def train(self, mode: bool = True) -> Self:
        """Set the remote module, and this object, to training mode, or to evaluation mode if not ``mode``."""
        rpc_sync(self.module_rref.owner(), set_training, args=(self.module_rref, mode))
        self.training = mode
        return self

    # ---- as a Python object

    if not TYPE_CHECKING:  # so that type checkers find misspelled names

        def __getattr__(self, name: str) -> Any:
            """Called only for names that a remote module does not define itself."""
            try:
                return super().__getattr__(name)
            except AttributeError as error:
                hint = ""
                if not name.startswith("_"):
                    hint = (
                        f": if the module has it, call get_module_rref().rpc_sync().{name}(...), or fetch "
                        "the module by get_module_rref().to_here()"
                    )
                raise AttributeError(f"{error}{hint}", name=name, obj=self) from None

    def __repr__(self) -> str:
        return f"RemoteModule(on='{self.on}', device='{self.device}', {self.module_rref!r})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC: "
            "save get_module_rref().rpc_sync().state_dict() instead."
        )

    def __prepare_scriptable__(self) -> nn.Module:
        """Return the module that ``torch.jit.script`` compiles in place of this object."""
        if self._interface is None:
            raise RuntimeError(f"{self!r} was made without _module_interface_cls: it cannot be scripted")
        return script_face(self._interface, self.forward_async)


def _check_initialized() -> None:
    if not is_initialized():
        raise NotInitializedError("RemoteModule only works in RPC: call rpc.init_rpc first")


def _check_maker(module_cls: Any) -> None:
    """Raise ``TypeError`` unless calling ``module_cls`` can create a module."""
    if isinstance(module_cls, nn.Module):
        kind = type(module_cls).__name__
        raise TypeError(
            f"module_cls is {with_article(type(module_cls))}, not a class of modules: pass the class and its "
            f"arguments, RemoteModule(remote_device, {kind}, args=(...)), and the module is created there. "
            "To use a module that exists, make a reference to it on its worker, rpc.RRef(module), and pass "
            "this to RemoteModule.init_from_module_rref"
        )
    if not callable(module_cls):
        raise TypeError(
            f"module_cls is {with_article(type(module_cls))}, not a class derived from nn.Module, or a "
            "function that returns a module"
        )


def reduce_remote_module(remote_module: RemoteModule) -> tuple[Any, ...]:
    """Reduce a remote module for a message: it travels as the reference to the module, and its device."""
    kind, state = type(remote_module), vars(remote_module)
    place = f"{state['on']}/{state['device']}"
    return kind.init_from_module_rref, (place, state["module_rref"], state["_interface"])
