"""Reads files that a user names, such as keys, without waiting and in bounded memory, whatever the name
refers to.

Opening a FIFO waits for a writer, reading a device such as ``/dev/zero`` never ends, and a wrong name may be
that of a checkpoint of many gigabytes.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

__all__ = ["open_regular_file", "read_regular_file"]


def open_regular_file(path: str, *, dir_fd: int | None = None, flags: int = 0) -> BinaryIO:
    """Open a file for reading.

    Args:
        path: path of the file.
        dir_fd: descriptor of the folder that ``path`` is relative to.
        flags: flags of ``os.open``, in addition to those for reading.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    flags |= os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, dir_fd=dir_fd)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"it is not a regular file, but {_kind(mode)}", path)
    return open(descriptor, "rb")


def read_regular_file(path: str, limit: int) -> bytes:
    """Return the content of a file.

    Args:
        path: path of the file.
        limit: maximum size in bytes.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger.
    """
    with open_regular_file(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes", path)
    return content


def _kind(mode: int) -> str:
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
    return next((name for is_one, name in kinds.items() if is_one(mode)), "a device")
