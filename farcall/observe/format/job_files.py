"""Small files in the folder of a job: orders to its workers, what its launcher has noted, tokens."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any, BinaryIO, Final

from farcall.observe.format.jobs import own_folder

__all__ = ["open_file", "read_facts", "read_own", "write_facts", "write_private"]

_MAX_BYTES: Final = 1 << 16


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading, without waiting for a pipe's writer. Raises ``OSError``."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(file, "rb")


def write_private(path: Path, content: bytes, *, is_only_writer: bool = False) -> None:
    """Write a file that only this user can read, in one step, into a folder of this user.

    Args:
        path: the file, which is first written beside it, to a hidden file.
        content: its content.
        is_only_writer: whether nobody else writes this file: the hidden file always has the same name, and
            one that was left by a process that was killed is replaced.

    Raises:
        OSError: it cannot be written, or the folder is another user's, or others can write to it.
    """
    written = f".{path.name}.{'new' if is_only_writer else secrets.token_hex(8)}"
    with own_folder(path.parent) as folder:
        if is_only_writer:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(written, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(written, flags, 0o600, dir_fd=folder)
        try:
            with open(file, "wb") as target:
                target.write(content)
            os.replace(written, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(written, dir_fd=folder)
            raise


def write_facts(path: Path, facts: dict[str, Any]) -> None:
    """Write a file as ``write_private`` does."""
    write_private(path, json.dumps(facts).encode())


def read_own(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of this user.

    Args:
        limit: maximum size, in bytes.

    Raises:
        OSError: it cannot be read, or is another user's, larger, or no regular file.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        known = os.fstat(file)
        if not stat.S_ISREG(known.st_mode):
            raise OSError(errno.EINVAL, "it is no file")
        if known.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, f"it belongs to another user ({known.st_uid})")
        if known.st_size > limit:
            raise OSError(errno.EFBIG, f"it has {known.st_size} bytes, more than any such file")
        with open(file, "rb", closefd=False) as opened:
            return opened.read(limit)
    finally:
        os.close(file)


def read_facts(path: Path) -> dict[str, Any]:
    """Read a file; empty if there is none, or it is damaged or of another user."""
    try:
        found = json.loads(read_own(path, _MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
