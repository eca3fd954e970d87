"""``torch_xla.distributed.parallel_loader``."""

from __future__ import annotations

from spmd.sharding.loader import DeviceLoader as MpDeviceLoader

__all__ = ["MpDeviceLoader"]
