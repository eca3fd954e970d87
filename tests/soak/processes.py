"""Processes of a soak test that may be killed, and write files to a folder."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

__all__ = ["Processes"]

_KILL_WITH_PARENT: Final = 1  # PR_SET_PDEATHSIG


class Processes:
    """Processes forked from this one, which has imported everything.

    Args:
        folder: folder of their logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.living: dict[str, int] = {}
        self.statuses: dict[str, int] = {}

    def start(self, name: str, program: Callable[[], object]) -> None:
        """Start one more."""
        pid = os.fork()
        if pid:
            self.living[name] = pid
            return
        ctypes.CDLL(None).prctl(_KILL_WITH_PARENT, signal.SIGKILL)
        status = 0
        try:
            with open(self.folder / f"{name}.err", "wb", buffering=0) as errors:
                os.dup2(errors.fileno(), 1)
                os.dup2(errors.fileno(), 2)
            logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s", force=True)
            torch.set_num_threads(1)
            program()
        except BaseException:
            traceback.print_exc()
            status = 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def collect(self) -> None:
        """Note which have ended."""
        for name, pid in list(self.living.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.living[name]
                self.statuses[name] = os.waitstatus_to_exitcode(status)
