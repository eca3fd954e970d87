"""The process of a worker that ``use_spmd`` starts."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

from spmd.engine.start import serve

__all__ = ["main"]


def main() -> None:
    """Be a worker. Arguments of the process: INIT_METHOD NAME RANK WORLD_SIZE FD.

    It writes a byte to the file descriptor when it is about to join.
    """
    for each in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # are the driver's, which may still save, and ends its workers
        signal.signal(each, signal.SIG_IGN)
    init_method, name, rank, world_size, sign = sys.argv[1:]
    try:
        os.write(int(sign), b"1")
        os.close(int(sign))
        serve(name, int(rank), int(world_size), init_method)
    finally:
        shutil.rmtree(_where(init_method), ignore_errors=True)  # a driver that was killed has left it


def _where(init_method: str) -> Path:
    """The folder in which driver and workers meet."""
    return Path(init_method.removeprefix("file://")).parent
