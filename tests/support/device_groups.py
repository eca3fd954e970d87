"""Options of groups whose workers send tensors on devices."""

from __future__ import annotations

from typing import Any

from tests.support.devices import ONE_TO_ONE
from tests.support.workers import Worker


def one_to_one(worker: Worker) -> dict[str, Any]:
    """Options with which each worker's devices stand for the same ones of the others."""
    others = [f"worker{rank}" for rank in range(worker.world_size) if rank != worker.rank]
    return {"device_maps": dict.fromkeys(others, ONE_TO_ONE)}
