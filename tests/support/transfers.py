"""Large tensors on their way between workers on different hosts, and what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rpc
from rpc.errors import RpcError, WorkerLostError
from tests.support import backend

MIB = 1 << 20
ACROSS: dict[str, Any] = {"transports": [backend.BETWEEN_HOSTS], "shared_memory_bytes": 0}
"""Options of workers that are to behave as if they were on different hosts."""

waiting: list[rpc.Future[Any]] = []


def echo(value: Any) -> Any:
    return value


def total(*tensors: torch.Tensor) -> float:
    return sum(float(tensor.sum()) for tensor in tensors)


def begin_to_send(count: int) -> None:
    tensor = torch.ones(16 * MIB)
    waiting.extend(rpc.rpc_async("worker1", total, args=(tensor,)) for _ in range(count))


def all_are_lost(error: type[RpcError] = WorkerLostError) -> int:
    for future in waiting:
        with pytest.raises(error, match="'worker1'"):
            future.wait()
    return len(waiting)


def small_call(to: str) -> int:
    return int(rpc.rpc_sync(to, torch.add, args=(1, 0)))
