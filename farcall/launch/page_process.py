"""The process that serves the page of a job which a launcher runs; it ends with the launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

__all__ = ["PageProcess"]

_END_SECONDS: Final = 5.0
"""Time in seconds that the process has to end."""


class PageProcess:
    """The page of one job. It prints its address itself, on standard error.

    Args:
        job_id: name of the job in the folder of all jobs.
    """

    def __init__(self, job_id: str) -> None:
        command = [
            sys.executable,
            "-m",
            "farcall",
            "page",
            "--job",
            job_id,
            "--launched-by",
            str(os.getpid()),
        ]
        # In a session of its own: signals of the terminal are for the launcher, which ends the page.
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), start_new_session=True
        )

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
