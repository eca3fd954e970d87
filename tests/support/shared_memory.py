"""Where tensors lie: what of this process's memory is shared with other workers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch

import rpc
from rpc.runtime.current import current_agent
from tests.support.streams import until


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


def all_returned() -> bool:
    """Whether none of this worker's segments is lent."""
    _, lent = current_agent().messages.shared_memory.usage()
    return bool(lent == 0)


def arriving_in_segment(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Make a call again and again until what it returns lies in a segment; that is returned."""
    arrived: list[torch.Tensor] = []

    def arrives() -> bool:
        arrived.clear()
        arrived.append(call())
        return in_segment(arrived[0])

    until(arrives)
    return arrived.pop()


def send_through_segments(to: str, size: int, receive: Callable[[torch.Tensor], bool] = in_segment) -> None:
    """Call a worker with tensors of ``size`` bytes until one arrives there in a segment.

    Args:
        receive: what is called with them, which says whether they did.
    """
    until(lambda: rpc.rpc_sync(to, receive, args=(torch.ones(size, dtype=torch.uint8),)))


def echo_through_segments(to: str, size: int) -> None:
    """The same, until they come back in a segment, too."""
    send_through_segments(to, size)
    tensor = torch.ones(size, dtype=torch.uint8)
    arriving_in_segment(lambda: rpc.rpc_sync(to, torch.neg, args=(tensor,)))
