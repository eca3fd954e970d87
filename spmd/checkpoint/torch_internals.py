"""The private names of PyTorch that checkpoints need: their gate, see ``rpc/runtime/internals.py``.

PyTorch's reader and writer for any file system that ``fsspec`` knows are in a private module up to version
2.14; 2.15 has a public one, and a later version is going to remove the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rpc.runtime.internals import Internals

__all__ = ["INTERNALS", "FileRange", "FsspecReader", "FsspecWriter"]

INTERNALS: Final = Internals()

FileRange: Final[Any] = INTERNALS.find(
    "torch.distributed.checkpoint.filesystem:_StorageInfo", "checkpoints cannot be restored"
)
"""The class of an entry in a checkpoint's metadata: a range of bytes in a file."""

if TYPE_CHECKING:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
else:
    _module = INTERNALS.find(
        "torch.distributed.checkpoint._fsspec_filesystem",
        "checkpoints cannot be written and read",
        instead=None,
        until=(2, 14),
    )
    if _module is None:
        from torch.distributed.checkpoint import fsspec_filesystem as _module
    FsspecReader, FsspecWriter = _module.FsspecReader, _module.FsspecWriter
