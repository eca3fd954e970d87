"""The process of a worker that ``use_spmd`` starts."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import NoReturn

import rpc
from rpc.options import AgentOptions
from rpc.runtime.current import current_agent

__all__ = ["main", "serve"]


def main() -> None:
    """Run a worker. Arguments of the process: INIT_METHOD NAME RANK WORLD_SIZE FD; without a world size, the
    group is dynamic, and the worker serves until its standard input ends, as the driver does.

    It writes a byte to the file descriptor when it is about to join. The driver has turned the garbage
    collector off for the imports.
    """
    gc.freeze()  # collections need not visit what PyTorch has made at its import
    gc.enable()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # the driver gets it, which may still save, and ends its workers
    init_method, name, rank, world_size, sign = sys.argv[1:]
    driver = os.getppid()
    try:
        os.write(int(sign), b"1")
        os.close(int(sign))
        if world_size:
            serve(name, int(rank), int(world_size), init_method)
        _serve_dynamic(name, init_method)
    finally:
        if world_size or os.getppid() != driver:  # otherwise others may still join there
            shutil.rmtree(_where(init_method), ignore_errors=True)  # a driver that was killed has left it


def _serve_dynamic(name: str, init_method: str) -> None:
    rpc.init_rpc(name, rpc_backend_options=AgentOptions(init_method=init_method, dynamic=True))
    while os.read(0, 1):
        pass
    rpc.shutdown(graceful=False)


def serve(
    name: str, rank: int = -1, world_size: int | None = None, init_method: str | None = None
) -> NoReturn:
    """Serve as a worker until the driver ends the mode, and exit."""
    options = None if init_method is None else AgentOptions(init_method=init_method)
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    current_agent().lifecycle.departure.expect_long()  # a driver may be idle for any time
    rpc.shutdown()
    raise SystemExit(0)


def _where(init_method: str) -> Path:
    """The folder through which driver and workers connect."""
    return Path(init_method.removeprefix("file://")).parent
