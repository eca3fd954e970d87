"""Stands in for ``torch.distributed.rpc.options``."""

from __future__ import annotations

import torch

from farcall.compat.torch_rpc import constants as rpc_contants
from farcall.compat.torch_rpc.without_counterpart import without_counterpart
from rpc.device_maps import DeviceLike, to_device_list, to_device_map
from rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions

__all__ = ["TensorPipeRpcBackendOptions"]

DeviceType = DeviceLike

_TensorPipeRpcBackendOptionsBase = RpcBackendOptions
_is_tensorpipe_available = True
_to_device_list = to_device_list
_to_device_map = to_device_map


def _to_device(device: DeviceLike) -> torch.device:
    """Return an accelerator's device."""
    return to_device_list([device])[0]


_LENT = (rpc_contants,)

__getattr__ = without_counterpart("torch.distributed.rpc.options")
