"""What tests of ``farcall.serve`` serve, and what the fixtures that make servers and clients give."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

import torch
from torch import nn

from farcall.client import Client
from farcall.serving import Server

__all__ = ["Connect", "Gate", "Scale", "Serve", "ServerProcess", "count", "fail", "memory_mib", "with_server"]

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


class ServerProcess:
    """A server that has a process of its own; as ``with``, it is killed at the end if it still lives.

    Args:
        serve: what the process does: send its port, serve until something comes, and end.
    """

    def __init__(self, serve: Callable[[Connection], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,))
        self.process.start()
        theirs.close()  # so that a process which ends is not waited for
        self.port: int = self._pipe.recv()
        self._told = False

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def stop(self) -> None:
        """Have it end; returns at once."""
        if not self._told:
            self._told = True
            self._pipe.send("stop")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def with_server(serve: Callable[[Connection], None], attack: Callable[[ServerProcess], list[str]]) -> int:
    """The rest of a command that does something to a server: runs both, and prints what is wrong.

    Args:
        serve: see ``ServerProcess``.
        attack: returns what is wrong; it may have stopped the server.

    Returns:
        The exit status.
    """
    with ServerProcess(serve) as server:
        wrong = attack(server)
        server.stop()
        server.process.join(60)
        if server.process.exitcode != 0:
            wrong.append(f"the server ended with {server.process.exitcode}; None: it has not ended")
    for each in wrong[:20]:
        print(f"FAILED: {each}")
    print(f"{len(wrong)} failures")
    return 1 if wrong else 0
