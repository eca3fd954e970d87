"""Puts our facades where Python looks for ``torch.distributed.rpc`` and its kin, and takes them away again.

PyTorch imports ``torch.distributed.rpc`` itself, long before a program does. So the entries of
``sys.modules`` are replaced, and the attributes of parent packages, and those few places in PyTorch that
hold on to its classes and work on objects of a program's. We never import PyTorch's modules ourselves.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any, Final

import rpc
from dist_autograd.recording import RECV_NODE, SEND_NODE
from farcall.compat import lending
from farcall.compat.torch_internals import INTERNALS
from farcall.compat.torch_rpc import testing
from farcall.compat.torch_rpc.without_counterpart import displaced
from rpc.agent.collected_futures import replace_collect_all, restore_collect_all

__all__ = ["CompatError", "install", "is_installed", "uninstall"]

_RPC: Final = "torch.distributed.rpc"

_FACADES: Final = {
    _RPC: "farcall.compat.torch_rpc",
    _RPC + "._testing": "farcall.compat.torch_rpc.testing",
    _RPC + ".api": "farcall.compat.torch_rpc.api",
    _RPC + ".backend_registry": "farcall.compat.torch_rpc.backend_registry",
    _RPC + ".constants": "farcall.compat.torch_rpc.constants",
    _RPC + ".functions": "farcall.compat.torch_rpc.functions",
    _RPC + ".internal": "farcall.compat.torch_rpc.internal",
    _RPC + ".options": "farcall.compat.torch_rpc.options",
    _RPC + ".rref_proxy": "farcall.compat.torch_rpc.rref_proxy",
    _RPC + ".server_process_global_profiler": "farcall.compat.torch_rpc.server_process_global_profiler",
    "torch._C._distributed_rpc": "farcall.compat.torch_rpc.extension",
    "torch._C._distributed_rpc_testing": "farcall.compat.torch_rpc.testing",
    "torch._C._distributed_autograd": "farcall.compat.torch_autograd",
    "torch.distributed.autograd": "farcall.compat.torch_autograd",
    "torch.distributed.nn.api.remote_module": "farcall.compat.torch_nn",
    "torch.distributed.optim.optimizer": "farcall.compat.torch_optim",
}
"""The facade of each of PyTorch's modules. Submodules of these without a facade cannot be imported."""

_SHOWN_BY: Final = {
    "torch.distributed.nn": ("RemoteModule", "farcall.compat.torch_nn"),
    "torch.distributed.optim": ("DistributedOptimizer", "farcall.compat.torch_optim"),
}
"""Packages of PyTorch's that stay, but offer a name of a module that is replaced."""

_IMPORTED_BY: Final = {"torch.distributed.nn.api.remote_module": "torch.distributed.nn.jit.instantiator"}
"""Modules that stay PyTorch's, and that programs find because one that is replaced imports them."""

_GENERATED: Final = "_remote_module_"
"""Prefix of modules that ``torch.distributed.nn.jit.instantiator`` generates, which import PyTorch's RPC."""

_NAMES_HELD: Final = frozenset({"RRef", "init_rpc", "remote", "rpc_async", "rpc_sync", "shutdown"})
"""Modules that programs import by name."""

_MISSING: Final = object()

_lock = threading.RLock()
_undo: list[tuple[Any, str, Any]] = []
_modules: dict[str, ModuleType] | None = None
_not_imported: list[str] = []
"""Of the packages in ``_SHOWN_BY``, those that were imported only after the installation, if at all."""


class CompatError(rpc.errors.RpcError):
    """The compatibility layer cannot be installed or removed now."""


def is_installed() -> bool:
    """Whether ``torch.distributed.rpc`` means farcall now."""
    return _modules is not None


def install(xla: bool = False) -> None:
    """Make ``torch.distributed.rpc`` and its kin mean farcall, until :func:`uninstall`; and ``torch_xla``
    as well, where it is not installed, for a program that asks for it.

    Call it before the program imports them; a module that has imported them keeps the old ones, and a
    warning names it. Idempotent.

    Args:
        xla: libraries find ``torch_xla`` at once, and take the program for one for a TPU, as accelerate and
            transformers do. False: they do so once the program's own source has imported it.

    Raises:
        CompatError: an agent of PyTorch's own is running in this process.
    """
    global _modules
    with _lock:
        if _modules is not None:
            lending.lend(at_once=xla)
            return
        theirs = sys.modules.get(_RPC)
        if theirs is not None and _agent_runs(theirs):
            raise CompatError(
                "torch.distributed.rpc is running in this process (its init_rpc was called): call its "
                "shutdown() first, or install farcall.compat before init_rpc"
            )
        INTERNALS.check()
        facades = {name: importlib.import_module(facade) for name, facade in _FACADES.items()}
        _warn_of_holders(theirs)
        _modules = {name: module for name, module in sys.modules.items() if _is_removed(name)}
        for name in _modules:
            del sys.modules[name]
        displaced.update({name: module for name, module in _modules.items() if name in facades})
        for name, facade in facades.items():
            _put(name, facade)
        sys.meta_path.insert(0, _finder)
        lending.lend(at_once=xla)
        testing.register()
        _show()
        _rebind()


def uninstall() -> None:
    """Give ``torch.distributed.rpc`` back to PyTorch. Nothing happens if it is not installed.

    Raises:
        CompatError: an agent is running in this process.
    """
    global _modules
    with _lock:
        if _modules is None:
            return
        if rpc.is_initialized():
            raise CompatError("farcall is running in this process: call shutdown() before uninstall()")
        sys.meta_path.remove(_finder)
        lending.take_back()
        testing.deregister()
        for name in [name for name in sys.modules if _is_removed(name)]:
            del sys.modules[name]
        displaced.clear()
        sys.modules.update(_modules)
        while _undo:
            target, attribute, before = _undo.pop()
            if before is _MISSING:
                delattr(target, attribute)
            else:
                setattr(target, attribute, before)
        restore_collect_all(__name__)
        _forget_importers()
        _modules = None


def _is_replaced(name: str) -> bool:
    return any(_is_within(name, replaced) for replaced in _FACADES)


def _is_removed(name: str) -> bool:
    """Whether a module is imported anew after the installation, and after its end."""
    return _is_replaced(name) or name.startswith(_GENERATED)


def _is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def _put(name: str, facade: ModuleType) -> None:
    """Put a facade in its place, if the package around it is loaded; if not, ``_Finder`` will do it."""
    parent, _, leaf = name.rpartition(".")
    if parent in sys.modules:
        sys.modules[name] = facade
        if not _is_replaced(parent):
            _set(sys.modules[parent], leaf, facade)


class _Finder(MetaPathFinder, Loader):
    """Has Python find the facades below packages of PyTorch's that are imported only now."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname in _FACADES:
            return spec_from_loader(fullname, self)
        if _is_replaced(fullname):
            raise ModuleNotFoundError(f"farcall.compat has no counterpart of {fullname}", name=fullname)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        facade = importlib.import_module(_FACADES[spec.name])
        if spec.name in _IMPORTED_BY:
            with contextlib.suppress(ModuleNotFoundError):  # a later PyTorch may not have it
                importlib.import_module(_IMPORTED_BY[spec.name])
        self._own_spec = facade.__spec__
        return facade

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec


_finder = _Finder()


def _show() -> None:
    """Replace names in packages of PyTorch that are not replaced themselves."""
    for package, (attribute, facade) in _SHOWN_BY.items():
        if package in sys.modules:
            _set(sys.modules[package], attribute, getattr(sys.modules[facade], attribute))
        else:
            _not_imported.append(package)


def _forget_importers() -> None:
    """Forget packages that were imported meanwhile and have our names, so that they are imported again."""
    while _not_imported:
        package = _not_imported.pop()
        if sys.modules.get(package) is None:
            continue
        for name in [name for name in sys.modules if _is_within(name, package)]:
            del sys.modules[name]
        parent, _, leaf = package.rpartition(".")
        delattr(sys.modules[parent], leaf)


def _agent_runs(theirs: ModuleType) -> bool:
    is_set = getattr(theirs, "_is_current_rpc_agent_set", None)
    return is_set is not None and bool(is_set())


def _set(target: Any, attribute: str, value: Any) -> None:
    _undo.append((target, attribute, getattr(target, attribute, _MISSING)))
    setattr(target, attribute, value)


def _rebind() -> None:
    """Where PyTorch itself looks at a program's futures and references, and programs at its graph."""
    _set(SEND_NODE, "__name__", "torch::distributed::autograd::SendRpcBackward")
    _set(RECV_NODE, "__name__", "torch::distributed::autograd::RecvRpcBackward")

    data_parallel = sys.modules.get("torch.nn.parallel.distributed")
    if data_parallel is not None:
        _set(data_parallel, "RRef", rpc.RRef)  # DistributedDataParallel looks into the RRefs of an output
    replace_collect_all(__name__)


def _warn_of_holders(theirs: ModuleType | None) -> None:
    if theirs is None:
        return
    held = {id(theirs)} | {id(getattr(theirs, name, theirs)) for name in _NAMES_HELD}
    holders = sorted(
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in ("torch", "farcall")
        and not name.startswith(_GENERATED)
        and any(id(value) in held for value in list(getattr(module, "__dict__", {}).values()))
    )
    if holders:
        warnings.warn(
            f"{', '.join(holders)}: imported torch.distributed.rpc before farcall.compat.install(), and will "
            "go on using PyTorch's. Call install() first.",
            stacklevel=3,
        )
