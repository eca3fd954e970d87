"""Stands in for ``torch.distributed.rpc.options``."""

from __future__ import annotations

from farcall.compat.torch_rpc.without_counterpart import without_counterpart
from rpc.device_maps import DeviceLike, to_device_list, to_device_map
from rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions

__all__ = ["TensorPipeRpcBackendOptions"]

DeviceType = DeviceLike

_TensorPipeRpcBackendOptionsBase = RpcBackendOptions
_is_tensorpipe_available = True
_to_device_list = to_device_list
_to_device_map = to_device_map

__getattr__ = without_counterpart("torch.distributed.rpc.options")
