"""``torch_xla.distributed.parallel_loader``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from rpc.runtime.torch_internals import pytree
from spmd.engine import api as engine
from spmd.sharding.loader import DeviceLoader

__all__ = ["MpDeviceLoader"]


class MpDeviceLoader(DeviceLoader):
    """Ours, whose batches are with the workers when the program gets them.

    Its options are where libraries change them before they iterate: transformers' ``Trainer`` sets
    ``input_sharding`` there.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device | str, **options: Any) -> None:
        super().__init__(loader, device, **options)
        self._parallel_loader_kwargs = options

    def __iter__(self) -> Iterator[Any]:
        for batch in DeviceLoader(self._loader, self._device, **self._parallel_loader_kwargs):
            for each in pytree.tree_leaves(batch):
                if engine.is_logical(each):
                    engine.upload_data(each)
            yield batch
