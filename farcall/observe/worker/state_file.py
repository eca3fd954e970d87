"""The state file of this process, as its writer has it.

It is written whole and renamed at each look: what has been written survives the process, and a full disk is
an error that can be handled.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

from farcall.observe.format.job_files import write_private
from farcall.observe.format.jobs import make_private
from farcall.observe.format.layout import Beat, pack_snapshot, pack_state

__all__ = ["StateFile"]


class StateFile:
    """Writes one state file. ``move`` may be called from any thread, the rest from one.

    Args:
        path: the file; an existing file is replaced.

    Raises:
        OSError: its folder cannot be made.
    """

    def __init__(self, path: Path) -> None:
        make_private(path.parent)
        self.path = path
        self._lock = threading.Lock()
        self._snapshot: bytes | None = None
        self._earlier: bytes | None = None

    def snapshot(self, snapshot: dict[str, Any], *, keep: bool = False) -> bool:
        """Set the snapshot that is written with the next beat; false if it is too large.

        Args:
            keep: whether the one before the last stays, and not the last.
        """
        packed = pack_snapshot(snapshot)
        if packed is None:
            return False
        if not keep:
            self._earlier = self._snapshot
        self._snapshot = packed
        return True

    def beat(self, beat: Beat) -> None:
        """Write the file, with this heartbeat; raises ``OSError``."""
        with self._lock:
            write_private(self.path, pack_state(beat, self._snapshot, self._earlier), is_only_writer=True)

    def touch(self) -> None:
        """Set the file's time, which needs no room and no descriptor: this process still looks."""
        now = time.time()  # a reader compares it with this host's clock, a file system may have its own
        with self._lock, contextlib.suppress(OSError):
            os.utime(self.path, (now, now), follow_symlinks=False)

    def move(self, path: Path) -> None:
        """Rename the file; raises ``OSError``."""
        make_private(path.parent)
        with self._lock:
            with contextlib.suppress(FileNotFoundError):  # it has not been written yet
                os.rename(self.path, path)
            self.path = path
