"""Groups whose workers send tensors on devices."""

from __future__ import annotations

import time
from typing import Any, Final

import torch

from farcall import rpc
from rpc.devices.ipc import SMALLEST_BYTES
from rpc.runtime.current import current_agent
from tests.support.devices import FIRST, ONE_TO_ONE
from tests.support.workers import Worker

LARGE: Final = SMALLEST_BYTES // 4
"""Number of elements, of four bytes each, of the smallest tensor that is read in place."""


def one_to_one(worker: Worker) -> dict[str, Any]:
    """Options with which each worker's devices stand for the same ones of the others."""
    others = [f"worker{rank}" for rank in range(worker.world_size) if rank != worker.rank]
    return {"device_maps": dict.fromkeys(others, ONE_TO_ONE)}


def is_read_in_place(by: str) -> bool:
    """Whether another worker reads large tensors in this one's memory."""
    agent: Any = current_agent()
    return bool(agent.calls.requests.border.reads(by, torch.ones(LARGE, device=FIRST)))


def until_agreed(here: str, there: str) -> None:
    """Return when both workers read each other's memory, or fail; none of what is sent for it is large."""
    end = time.monotonic() + 20
    while not (is_read_in_place(there) and rpc.rpc_sync(there, is_read_in_place, args=(here,))):
        rpc.rpc_sync(there, torch.neg, args=(torch.ones(1, device=FIRST),))
        assert time.monotonic() < end, "the workers do not read each other's memory"
