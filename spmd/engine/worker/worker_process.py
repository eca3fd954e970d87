"""The main functions of processes that are workers of SPMD mode alone."""

from __future__ import annotations

import threading
from typing import NoReturn

import rpc
from rpc.options import AgentOptions
from rpc.runtime.current import current_agent

__all__ = ["await_driver", "await_end_of", "serve"]


def await_driver() -> None:
    """Have the coming shutdown wait for the driver for any time, without a word, since it may be idle."""
    current_agent().lifecycle.departure.expect_long()


def await_end_of(driver: str) -> None:
    """Serve until the driver has left the group, which is dynamic."""
    gone = threading.Event()

    def look(worker: rpc.WorkerInfo, reason: str) -> None:
        if worker.name == driver:
            gone.set()

    with rpc.on_worker_lost(look):
        gone.wait()


def serve(
    name: str, rank: int = -1, world_size: int | None = None, init_method: str | None = None
) -> NoReturn:
    """Serve as a worker until the driver ends the mode, and exit."""
    options = None if init_method is None else AgentOptions(init_method=init_method)
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    await_driver()
    rpc.shutdown()
    raise SystemExit(0)
