"""Where tensors lie: what of this process's memory is shared with other workers."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import rpc

__all__ = [
    "echo_through_segments",
    "in_segment",
    "mapped_segments",
    "resident_bytes",
    "send_through_segments",
]

_ATTEMPTS = 2000


def mapped_segments(least_bytes: int = 1 << 16) -> list[tuple[int, int]]:
    """The addresses, from and to, of all segments that this process has mapped."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:farcall" in line:
            begin, end = (int(each, 16) for each in re.findall("[0-9a-f]+", line)[:2])
            if end - begin >= least_bytes:  # and not a ledger
                found.append((begin, end))
    return found


def in_segment(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is part of a segment."""
    address = tensor.data_ptr()
    return any(begin <= address < end for begin, end in mapped_segments())


def resident_bytes(kind: str = "RssAnon") -> int:
    """How much memory this process has, of the kind that ``/proc`` names so."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{kind}:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def _echo(value: torch.Tensor) -> torch.Tensor:
    return value


def send_through_segments(to: str, size: int) -> None:
    """Call a worker with tensors of ``size`` bytes until they arrive there in a segment."""
    tensor = torch.zeros(size, dtype=torch.uint8)
    for _ in range(_ATTEMPTS):
        if rpc.rpc_sync(to, in_segment, args=(tensor,)):
            return
    raise AssertionError("tensors go through the socket")


def echo_through_segments(to: str, size: int) -> None:
    """The same, until they come back in a segment, too."""
    send_through_segments(to, size)
    tensor = torch.zeros(size, dtype=torch.uint8)
    for _ in range(_ATTEMPTS):
        if in_segment(rpc.rpc_sync(to, _echo, args=(tensor,))):
            return
    raise AssertionError("tensors come back through the socket")
