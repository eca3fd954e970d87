"""A spare process of ``farcall launch --spares``, until it becomes a worker; ``spares`` starts it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from farcall.compat.own_source import installed_imports

__all__ = ["FLAG", "READY", "become_a_worker"]

FLAG: Final = "--spare="
"""Before the number of the socket to the launcher, in the command line of a spare."""

READY: Final = b"r"
"""What a spare sends when it has imported everything."""


def become_a_worker(number: int, program: Path | None) -> bool:
    """In a spare: import everything, and wait until this process is to be a worker.

    Args:
        number: number of the socket to the launcher.
        program: a file whose imports of installed packages are imported, too.

    Returns:
        Whether it is to be a worker; false if no more are needed.
    """
    for name in ("farcall.elastic", "farcall.rpc", *_imports(program)):
        with contextlib.suppress(Exception):  # the program imports it again, and shows the error
            import_module(name)
    with contextlib.suppress(Exception):
        torch: Any = import_module("torch")
        torch.optim.SGD([torch.zeros(())], 0.1)  # imports what the first optimizer of a process needs
    with socket.socket(fileno=number) as launcher:
        with contextlib.suppress(OSError):  # the launcher may have sent the line already, and closed its end
            launcher.sendall(READY)
        received = b""
        while not received.endswith(b"\n"):
            try:
                part = launcher.recv(1 << 16)
            except OSError:
                part = b""
            if not part:
                return False  # the launcher has ended
            received += part
    os.environ.update(json.loads(received))
    return True


def _imports(program: Path | None) -> list[str]:
    try:
        return (
            [] if program is None else installed_imports(program.read_bytes(), str(program.resolve().parent))
        )
    except OSError:  # the program cannot be run either, and that is shown
        return []
