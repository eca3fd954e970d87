"""The command ``python -m benchmarks.gateway``: ``farcall.serve`` beside bare ``grpc.aio``.

Each server is a process of its own, since all loops of a process wake for each event of gRPC's; both are on
the same kind of loop. Clients take turns, in rounds, so that what else the machine does meets both. The ratio
is that of the medians.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import asyncio
import multiprocessing
import statistics
from collections.abc import Awaitable, Callable
from functools import partial
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any, Final

import grpc
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import farcall
from farcall.client import AsyncClient, connect_async
from farcall.serving import Batching, Endpoint, Limits
from rpc.runtime.loop import new_loop

__all__ = ["main"]

_ROUNDS: Final = 9
_CALLS: Final = 100
_CLIENTS: Final = 32
_TURNS: Final = 4
_WIDTH: Final = 4096
"""Of the model: 17 million parameters, so that one image costs some milliseconds."""
_DELAYS: Final = (5, 10)
"""Of batches, in ms. All clients are one process here, which takes some 10 ms to send a call of each."""

_ECHO: Final = "/bare/echo"


def main() -> None:
    """Measure and print."""
    context = multiprocessing.get_context("spawn")
    pipes, servers = [], []
    for role in (_serve, _serve_bare):
        ours, theirs = context.Pipe()
        pipes.append(ours)
        servers.append(context.Process(target=role, args=(theirs,)))
        servers[-1].start()
    try:
        _print(asyncio.run(_measure(*(pipe.recv() for pipe in pipes))))
    finally:
        for pipe, server in zip(pipes, servers, strict=True):
            pipe.send(None)
            server.join()


def _echo(x: torch.Tensor) -> torch.Tensor:
    return x


async def _echo_async(x: torch.Tensor) -> torch.Tensor:
    return x


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH)).eval()
    endpoints = {
        "echo": Endpoint(_echo),
        "async echo": Endpoint(_echo_async),
        "alone": Endpoint(model),
        **{
            f"batched {delay}": Endpoint(model, batching=Batching(_CLIENTS, delay / 1e3)) for delay in _DELAYS
        },
    }
    with farcall.serve(endpoints, limits=Limits(in_flight=1)) as server:
        connection.send(server.port)
        connection.recv()


def _serve_bare(connection: Connection) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_send_back(connection))


async def _send_back(connection: Connection) -> None:
    """A server of ``grpc.aio`` that sends back the bytes that come."""

    async def echo(request: bytes, _: Any) -> bytes:
        return request

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bare", {"echo": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    connection.send(port)
    await asyncio.to_thread(connection.recv)
    await server.stop(0)


async def _measure(port: int, bare_port: int) -> list[tuple[str, float, float, float, bool]]:
    """Lines of the table: what, ours, beside it, the bar, and whether more is better."""
    tensor = np.zeros(256, np.float32)
    image = np.zeros((1, 64), np.float32)
    async with (
        connect_async(f"localhost:{port}") as client,
        grpc.aio.insecure_channel(f"localhost:{bare_port}") as channel,
    ):
        bare = channel.unary_unary(_ECHO)
        data = tensor.tobytes()
        echo = await _in_turns(
            lambda: client.call("echo", tensor), lambda: client.call("async echo", tensor), lambda: bare(data)
        )
        crowd = [connect_async(f"localhost:{port}") for _ in range(_CLIENTS)]
        lines = [
            ("1 KB tensor there and back, µs", echo[0] * 1e6, echo[2] * 1e6, 1.5, False),
            ("the same by an async def, on no thread, µs", echo[1] * 1e6, echo[2] * 1e6, 1.5, False),
        ]
        names = ["alone", *(f"batched {delay}" for delay in _DELAYS)]
        for how, calls in (("each when it has its answer", _each), ("all at once", _at_once)):
            alone, *batched = await _in_turns(
                *(partial(calls, crowd, name, image) for name in names), calls=1
            )
            for delay, seconds in zip(_DELAYS, batched, strict=True):
                what = f"{_CLIENTS} clients, {how}, {delay} ms for a batch: calls a second"
                count = _CLIENTS * _TURNS
                lines.append((what, count / seconds, count / alone, 3.0, True))
        for member in crowd:
            await member.close()
    return lines


async def _each(crowd: list[AsyncClient], name: str, image: Any) -> None:
    async def call(client: AsyncClient) -> None:
        for _ in range(_TURNS):
            await client.call(name, image)

    await asyncio.gather(*map(call, crowd))


async def _at_once(crowd: list[AsyncClient], name: str, image: Any) -> None:
    for _ in range(_TURNS):
        await asyncio.gather(*(client.call(name, image) for client in crowd))


async def _in_turns(*sides: Callable[[], Awaitable[Any]], calls: int = _CALLS) -> tuple[float, ...]:
    """Seconds of a call on each side."""
    seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(_ROUNDS):
        for side, taken in zip(sides, seconds, strict=True):
            await side()
            begun = perf_counter()
            for _ in range(calls):
                await side()
            taken.append((perf_counter() - begun) / calls)
    return tuple(statistics.median(each) for each in seconds)


def _print(lines: list[tuple[str, float, float, float, bool]]) -> None:
    table = Table("", "farcall.serve", "beside", "ratio", "bar")
    for name, ours, beside, bar, more in lines:
        ratio = ours / beside
        missed = "" if (ratio >= bar if more else ratio <= bar) else " missed"
        table.add_row(name, f"{ours:,.0f}", f"{beside:,.0f}", f"{ratio:.2f} x", f"{bar} x{missed}")
    Console().print(table)


if __name__ == "__main__":
    main()
