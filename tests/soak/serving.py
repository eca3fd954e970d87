"""Many clients call a server without a pause, and in the end it is stopped while they do.

::

    python -m tests.soak.serving --clients 64 --seconds 60

The server is a process of its own; each client has a connection of its own. They call, stream, give streams
up, send several calls in one message, and have calls joined. It fails if a call fails or has a wrong result,
if memory or descriptors grow, or if a call that comes as the server is stopped is neither answered nor told
``UNAVAILABLE``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Final

import grpc
import numpy as np

import farcall
from farcall.client import AsyncClient, CallError
from farcall.serving import Batching, Endpoint
from tests.support.gateway import ServerProcess, memory_mib, with_server

__all__ = ["main"]

_SAMPLES: Final = 10
_WARM: Final = 3
"""Samples until caches and pools are full."""

_MEMORY_MIB: Final = 16.0
"""By so much may memory grow after that: what the allocator keeps."""

_CONNECTION: Final = [
    ("grpc.use_local_subchannel_pool", 1),  # without it, clients of one process share a connection
    ("grpc.max_receive_message_length", -1),
]


# ---- the server


def _count(to: int) -> Iterator[int]:
    yield from range(to)


async def _count_async(to: int) -> AsyncIterator[int]:
    for each in range(to):
        yield each


def _serve(connection: Connection) -> None:
    import torch
    from torch import nn

    torch.set_num_threads(1)
    endpoints = {
        "double": lambda x: x * 2,
        "joined": Endpoint(nn.Identity(), batching=Batching(32, 0.002)),
        "count": _count,
        "count_async": _count_async,
    }
    with farcall.serve(endpoints) as server:
        connection.send(server.port)
        connection.recv()


# ---- the clients


@dataclass
class _Seen:
    """What clients have seen."""

    calls: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    stopping: bool = False

    def note(self, error: CallError) -> None:
        if self.stopping and error.code is grpc.StatusCode.UNAVAILABLE:
            self.refused += 1
        else:
            when = "as it was stopped" if self.stopping else "before"
            self.wrong[f"{when}: {error.code.name}: {error}"[:200]] += 1


class _Caller:
    """One client.

    Args:
        port: of the server.
        seed: of what it calls.
        seen: where it notes what comes.
    """

    def __init__(self, port: int, seed: int, seen: _Seen) -> None:
        self.client = AsyncClient(grpc.aio.insecure_channel(f"127.0.0.1:{port}", _CONNECTION), None)
        self._chance = random.Random(seed)
        self._seen = seen

    async def until(self, ended: Callable[[], bool]) -> None:
        """Call without a pause, refused or not."""
        moves: list[Callable[[], Awaitable[bool]]]
        moves = [self.call, self.call_joined, self.stream, self.give_up, self.call_several]
        while not (self._seen.stopping and ended()):
            move = self._chance.choice(moves)
            try:
                right = await move()
            except CallError as error:
                self._seen.note(error)
                continue
            self._seen.calls[move.__name__] += 1
            if not right:
                self._seen.wrong[f"{move.__name__}: a wrong result"] += 1

    async def call(self) -> bool:
        x = np.full(self._chance.choice((1, 256, 60_000)), self._chance.random())
        return bool((await self.client.call("double", x) == 2 * x).all())

    async def call_joined(self) -> bool:
        x = np.full((self._chance.randint(1, 3), 64), self._chance.random(), np.float32)
        return bool((await self.client.call("joined", x) == x).all())

    async def stream(self) -> bool:
        name = self._chance.choice(("count", "count_async"))
        return [each async for each in self.client.stream(name, 20)] == list(range(20))

    async def give_up(self) -> bool:
        results = self.client.stream(self._chance.choice(("count", "count_async")), 1 << 40)
        async for each in results:
            if each == 3:
                break
        await results.aclose()  # type: ignore[attr-defined]
        return True

    async def call_several(self) -> bool:
        results = await self.client.batch([("double", [each]) for each in range(4)])
        for each in results:
            if isinstance(each, CallError):
                raise each
        return [int(each) for each in results] == [0, 2, 4, 6]


async def _load(count: int, seconds: float, server: ServerProcess) -> list[str]:
    """Print what happens; returns what is wrong."""
    seen = _Seen()
    memory: list[float] = []
    descriptors: list[int] = []
    callers = [_Caller(server.port, seed, seen) for seed in range(count)]
    async with asyncio.TaskGroup() as group:
        for each in callers:
            group.create_task(each.until(lambda: not server.process.is_alive()))
        begun = perf_counter()
        for number in range(1, _SAMPLES + 1):
            await asyncio.sleep(begun + seconds * number / _SAMPLES - perf_counter())
            memory.append(memory_mib(server.pid))
            descriptors.append(len(os.listdir(f"/proc/{server.pid}/fd")))
            print(
                f"{perf_counter() - begun:5.0f} s: {seen.calls.total()} calls, {memory[-1]:.1f} MiB, "
                f"{descriptors[-1]} descriptors",
                flush=True,
            )
        answered = seen.calls.total()
        seen.stopping = True
        server.stop()
    print(f"{seen.calls.total()} calls: {dict(seen.calls)}")
    print(f"as it was stopped: {seen.calls.total() - answered} answered, {seen.refused} told UNAVAILABLE")
    for each in callers:
        await each.client.close()
    return [
        *(f"{times} x {what}" for what, times in seen.wrong.items()),
        *_grown("memory in MiB", memory[_WARM - 1 :], _MEMORY_MIB),
        *_grown("descriptors", descriptors[_WARM - 1 :], 0),
    ]


def _grown(what: str, samples: Sequence[float], most: float) -> list[str]:
    """What has grown; all of it comes and goes, so that the most of each half is compared."""
    half = len(samples) // 2
    before, after = max(samples[:half]), max(samples[half:])
    return [f"{what} has grown from {before:g} to {after:g}"] if after - before > most else []


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser("python -m tests.soak.serving", description=__doc__)
    parser.add_argument("--clients", type=int, default=64, help="how many call at once (default: 64)")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: 60)")
    options = parser.parse_args(arguments)
    return with_server(_serve, lambda server: asyncio.run(_load(options.clients, options.seconds, server)))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
