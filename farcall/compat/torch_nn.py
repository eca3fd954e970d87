"""Stands in for ``torch.distributed.nn.api.remote_module``."""

from __future__ import annotations

import importlib
from typing import Any, Final

from torch import nn

import rref
from farcall.compat import torch_rpc as rpc
from farcall.compat.torch_rpc.internal import _internal_rpc_pickler
from farcall.compat.torch_rpc.without_counterpart import without_counterpart

__all__ = ["RemoteModule"]

_METHODS_KEPT: Final = ("forward_async", "forward")


class RemoteModule(rref.RemoteModule):
    """A module that lives on another worker; see ``rref.RemoteModule``.

    As PyTorch's, it keeps ``forward_async`` and ``forward`` in its ``__dict__``, where programs may look.
    """

    def _bind(self, *args: Any) -> None:
        super()._bind(*args)
        for name in _METHODS_KEPT:
            vars(self)[name] = getattr(self, name)


_RemoteModule = RemoteModule

_REMOTE_MODULE_PICKLED_ATTRIBUTES: Final = (
    *vars(nn.Module()),
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "module_rref",
    "_interface",
)
"""The attributes of a remote module that has just arrived in a message, except for those methods."""

_LENT: Final = (rpc, _internal_rpc_pickler)

_lend_or_refuse = without_counterpart("torch.distributed.nn.api.remote_module")


def __getattr__(name: str) -> Any:
    if name == "instantiator":
        return importlib.import_module("torch.distributed.nn.jit.instantiator")
    return _lend_or_refuse(name)
