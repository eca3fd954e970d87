"""The token of a job's page: in a file of the job's folder, which nobody but this user can read."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from farcall.observe.format.jobs import own_folder

__all__ = ["page_token"]

_FILE: Final = "page.token"
_BYTES: Final = 32


def page_token(folder: Path) -> str:
    """The token of the page of a job; made when it is first needed.

    Raises:
        OSError: the file cannot be made or read, or belongs to somebody else; says why.
    """
    with own_folder(folder) as directory:
        with contextlib.suppress(FileExistsError):
            written = f".{_FILE}.{secrets.token_hex(8)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(written, flags, 0o600, dir_fd=directory)
            try:
                os.write(file, secrets.token_urlsafe(_BYTES).encode())
                os.link(written, _FILE, src_dir_fd=directory, dst_dir_fd=directory)
            finally:
                os.close(file)
                os.unlink(written, dir_fd=directory)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(_FILE, flags, dir_fd=directory)
    try:
        known = os.fstat(file)
        is_private = stat.S_ISREG(known.st_mode) and known.st_uid == os.getuid() and not known.st_mode & 0o077
        token = os.read(file, 1024).decode(errors="replace").strip()
    finally:
        os.close(file)
    if not is_private or len(token) < _BYTES:
        raise PermissionError(f"{folder / _FILE} is not a private file of this user with a token: remove it")
    return token
