"""The purpose of stripes: networks that limit each connection."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.transfers import swallow
from benchmarks.workload import CALLEE, MIB, Bar, Workload, seconds_per_call

__all__ = ["limit_connections", "workloads"]

_STRIPES: Final = 4
_CONNECTION_BYTES: Final = 50 * MIB
"""Rate limit of a connection, in bytes per second."""
_TENSOR_BYTES: Final = 64 * MIB
_BATCHES: Final = 3
_OPENING_SECONDS: Final = 0.5
_SO_MAX_PACING_RATE: Final = 47  # Linux's; Python has no name for it


def limit_connections(bytes_per_second: int) -> int:
    """Make the kernel limit the rate of each TCP connection of this process, even to itself.

    Returns:
        How many there are.
    """
    limited = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as sock:
                    if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getpeername():
                        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, bytes_per_second)
                        limited += 1
    return limited


def _gain(rpc: Any) -> float:
    """How many connections' worth of bandwidth a large tensor gets."""
    tensor = torch.ones(_TENSOR_BYTES // 4)
    for _ in range(2):  # the first is what stripes are opened after
        rpc.rpc_sync(CALLEE, swallow, args=(tensor,))
        time.sleep(_OPENING_SECONDS)
    limit_connections(_CONNECTION_BYTES)
    seconds = seconds_per_call(lambda: rpc.rpc_sync(CALLEE, swallow, args=(tensor,)), _BATCHES)
    return _TENSOR_BYTES / _CONNECTION_BYTES / seconds


def workloads() -> Iterator[Workload]:
    """All that are about stripes."""
    for count, least in ((1, 0.8), (_STRIPES, 0.8 * _STRIPES)):
        yield Workload(
            f"stripes-{count}",
            f"64 MB at 50 MB/s each, {count} connection{'s' if count > 1 else ''}",
            "x one",
            _gain,
            Bar(least, at_least=True, absolute=True),
            network=True,
            stripes=count,
            part="tensors",
        )
