"""PyTorch's reader and writer of checkpoints on any file system that ``fsspec`` knows.

Up to version 2.14 their module is private; 2.15 has a public one, and is going to remove the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
else:
    try:
        from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader, FsspecWriter
    except ImportError:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

__all__ = ["FsspecReader", "FsspecWriter"]
