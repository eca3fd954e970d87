"""Tensors in files of ``torch.load`` that are restored on the device.

PyTorch restores a storage where the file, or ``map_location``, says, and makes tensors of it. The device has
no storages: it gets one on the CPU that claims to be on the device, so that tensors are made there, with its
content.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from spmd.engine.driver.current import DEVICE, NAME
from spmd.engine.driver.handlers import HANDLERS
from spmd.engine.driver.logical_tensor import LogicalTensor, show_instead, uploaded

__all__ = ["NAMES", "restored"]

aten: Final = torch.ops.aten
NAMES: Final = {NAME}
"""Names of the device in files."""


class _StorageOnDevice(torch.UntypedStorage):
    """The content of a storage that must be on the device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE


def restored(storage: Any, location: str) -> Any:
    """Return the storage that ``torch.load`` makes tensors of.

    Args:
        storage: storage on the CPU.
        location: its device in the file, or of ``map_location``.

    Returns:
        None if the location is another device.
    """
    if location.partition(":")[0] not in NAMES:
        return None
    there = _StorageOnDevice(storage.nbytes())  # type: ignore[no-untyped-call]
    return there.copy_(storage)


def _set_storage(
    target: LogicalTensor,
    storage: torch.UntypedStorage,
    offset: int = 0,
    size: Sequence[int] = (),
    stride: Sequence[int] = (),
) -> Tensor:
    """Make a tensor show a storage's content, as ``torch.load`` does with an empty one."""
    if storage.device.type == NAME and not isinstance(storage, _StorageOnDevice):
        raise NotImplementedError(
            "the storage of a tensor on spmd:0 has no content in this process, and no tensor can be set to "
            "it: pass the tensor itself, x.set_(other), or x.set_(other.as_strided(size, stride, offset))"
        )
    content = torch.empty(0, dtype=target.dtype).set_(storage, offset, size, stride)
    show_instead(target, uploaded(content.clone()))
    return target


def _set_whole_storage(target: LogicalTensor, storage: torch.UntypedStorage) -> Tensor:
    count = storage.nbytes() // target.dtype.itemsize
    return _set_storage(target, storage, 0, (count,), (1,))


HANDLERS[aten.set_.source_Storage_storage_offset] = _set_storage
HANDLERS[aten.set_.source_Storage] = _set_whole_storage
