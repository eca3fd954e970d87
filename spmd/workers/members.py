"""Waits for workers that join a dynamic RPC group."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

import rpc
from rpc.errors import RpcTimeoutError

__all__ = ["await_members"]


def await_members(names: Collection[str], seconds: float) -> None:
    """Wait until this process knows workers.

    Raises:
        RpcTimeoutError: they are not there in time.
    """
    changed = threading.Event()
    deadline = time.monotonic() + seconds
    with rpc.on_worker_joined(lambda worker: changed.set()):
        while missing := sorted(set(names) - {each.name for each in rpc.get_worker_infos()}):
            if not changed.wait(deadline - time.monotonic()):
                raise RpcTimeoutError(f"{', '.join(missing)} did not join this group within {seconds:g} s")
            changed.clear()
