"""The state file of this process, as its writer has it.

It is written by ``pwrite``, and not mapped: what has been written survives the process in both cases, and a
full disk is an error that can be handled, while a mapped page would end the process by SIGBUS.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from farcall.observe.format.jobs import make_private
from farcall.observe.format.layout import (
    BEAT_OFFSET,
    FILE_BYTES,
    HEADER_BYTES,
    Beat,
    pack_beat,
    pack_header,
    pack_record,
    pack_snapshot,
    record_offset,
    snapshot_offset,
)

__all__ = ["StateFile"]

_MAX_TEXT = 60
"""Maximum length of a text in a record that would not fit otherwise, in characters."""


class StateFile:
    """Writes one state file. For one thread.

    Args:
        path: the file; an existing file is replaced.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        make_private(path.parent)
        self.path = path
        self._snapshots = 0
        self._records = 0
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(path, flags, 0o600)
        try:
            os.ftruncate(self._file, FILE_BYTES)
            os.pwrite(self._file, pack_header().ljust(HEADER_BYTES, b"\0"), 0)
        except OSError:
            self.close()
            raise

    def beat(self, beat: Beat) -> None:
        """Write the heartbeat. This and the following methods raise ``OSError``."""
        os.pwrite(self._file, pack_beat(beat), BEAT_OFFSET)

    def snapshot(self, snapshot: dict[str, Any], *, keep: bool = False) -> bool:
        """Write a snapshot over the older one; false if it is too large.

        Args:
            keep: whether to write it over the newer one, so that the older stays.
        """
        number = self._snapshots + (2 if keep else 1)
        packed = pack_snapshot(number, snapshot)
        if packed is None:
            return False
        os.pwrite(self._file, packed, snapshot_offset(number))
        self._snapshots = number
        return True

    def record(self, records: Iterable[dict[str, Any]]) -> None:
        """Append records to the ring."""
        for fields in records:
            self._records += 1
            os.pwrite(self._file, pack_record(self._records, fields, _cut), record_offset(self._records))

    def move(self, path: Path) -> None:
        """Rename the file."""
        make_private(path.parent)
        os.rename(self.path, path)
        self.path = path

    def close(self) -> None:
        """Close the file; it stays."""
        os.close(self._file)


def _cut(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value[:_MAX_TEXT] if isinstance(value, str) else value
        for name, value in fields.items()
        if not isinstance(value, list | dict)
    }
