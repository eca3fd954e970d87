"""What tests of ``farcall.serve`` serve, and what the fixtures that make servers and clients give."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from farcall.client import Client
from farcall.serving import Server

__all__ = ["Connect", "Gate", "Scale", "Serve", "count", "fail", "memory_mib"]

Serve = Callable[..., Server]
Connect = Callable[..., Client]


class Scale(nn.Module):
    """Scales rows."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(3.0))

    def forward(self, rows: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        """Scale."""
        return rows * self.by + shift


def count(to: int) -> Iterator[int]:
    yield from range(to)


def fail(text: str) -> None:
    raise LookupError(text)


class Gate:
    """Something to call that waits until it is opened, and tells how far its calls are."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()
        self.cancelled = threading.Event()
        self.closed = threading.Event()

    def __call__(self) -> str:
        self.entered.release()
        assert self.open.wait(60)
        return "through"

    async def without_end(self) -> None:
        self.entered.release()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def words(self) -> AsyncIterator[str]:
        try:
            yield "one"
            self.entered.release()
            await asyncio.Event().wait()
        finally:
            self.closed.set()


def memory_mib(pid: int) -> float:
    """Resident memory of a process."""
    said = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(said["VmRSS"].split()[0]) / 1024
