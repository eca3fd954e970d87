"""The command ``python -m benchmarks.grpc``: the backend GRPC beside bare ``grpc.aio``, over loopback.

Both have two processes, and take turns in rounds, so that what else the machine does meets both. A bare call
is an echo of a few bytes, by itself or on a stream that stays open; a bare tensor is 64 MB of bytes in pieces
over such a stream, which the receiver puts together in fresh memory, as it does a tensor: the best of three
sizes of pieces counts. The ratios are those of the medians.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import asyncio
import multiprocessing
import secrets
import statistics
import tempfile
from collections.abc import Callable, Coroutine
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import click
import grpc
import torch
from rich.console import Console
from rich.table import Table

import rpc
from rpc.wire.chunking import allocate

__all__ = ["main"]

_CALLS: Final = 200
_TENSORS: Final = 3
_BYTES: Final = 64 << 20
_PIECES: Final = (1 << 19, 1 << 20, 1 << 22)
_SMALL: Final = b"x" * 50
_OPTIONS: Final = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))

Seconds = dict[str, list[float]]


@click.command()
@click.option("--rounds", default=9, show_default=True, help="How often each side has its turn.")
def main(rounds: int) -> None:
    """Measure and print."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        sides: dict[str, list[Connection]] = {}
        processes = []
        for name, roles in (("farcall", (_worker0, _worker1)), ("bare", (_client, _server))):
            sides[name] = []
            for role in roles:
                ours, theirs = context.Pipe()
                sides[name].append(ours)
                processes.append(context.Process(target=role, args=(theirs, folder)))
        for process in processes:
            process.start()
        try:
            for each in sides.values():
                each[0].recv()  # it is ready
            seconds: Seconds = {}
            for _ in range(rounds):
                for each in sides.values():
                    each[0].send("go")
                    for what, measured in each[0].recv().items():
                        seconds.setdefault(what, []).append(statistics.median(measured))
        finally:
            for each in sides.values():
                for pipe in each:
                    pipe.send(None)
            for process in processes:
                process.join()
    medians = {what: statistics.median(each) for what, each in seconds.items()}
    best = min(_PIECES, key=lambda piece: medians[str(piece)])
    _print(medians | {"stream": medians[str(best)]}, best)


def _print(medians: dict[str, float], best: int) -> None:
    table = Table("", "farcall", "bare grpc.aio", "ratio", title="over loopback, median")
    for what, ours, bare, scale, unit in (
        ("null call, beside a call of its own", "null", "call", 1e6, "µs"),
        ("null call, beside an echo on a stream", "null", "echo", 1e6, "µs"),
        (f"64 MB tensor, beside pieces of {best >> 10} KB", "tensor", "stream", 1e3, "ms"),
    ):
        table.add_row(
            what,
            f"{medians[ours] * scale:.1f} {unit}",
            f"{medians[bare] * scale:.1f} {unit}",
            f"{medians[ours] / medians[bare]:.2f}",
        )
    Console().print(table)


def _times(count: int, call: Callable[[], object]) -> list[float]:
    found = []
    for _ in range(count):
        begun = perf_counter()
        call()
        found.append(perf_counter() - begun)
    return found


# ---- farcall


def _join(name: str, rank: int, folder: str) -> None:
    options = rpc.GrpcRpcBackendOptions(
        init_method=f"file://{folder}/store", shared_memory_bytes=0, token=b"a token for measuring"
    )
    rpc.init_rpc(name, rpc.BackendType.GRPC, rank, 2, options)


def _size(tensor: torch.Tensor) -> int:
    return tensor.nbytes


def _worker1(pipe: Connection, folder: str) -> None:
    _join("worker1", 1, folder)
    rpc.shutdown()


def _worker0(pipe: Connection, folder: str) -> None:
    _join("worker0", 0, folder)
    tensor = torch.ones(_BYTES // 4)

    def call() -> None:
        rpc.rpc_sync("worker1", int)

    def send() -> None:
        assert rpc.rpc_sync("worker1", _size, args=(tensor,)) == _BYTES

    _times(_CALLS, call)
    _times(1, send)
    pipe.send("ready")
    while pipe.recv() is not None:
        pipe.send({"null": _times(_CALLS, call), "tensor": _times(_TENSORS, send)})
    rpc.shutdown()


# ---- bare


def _run(coroutine: Coroutine[Any, Any, None]) -> None:
    """On the loop that agents have, too."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(coroutine)


def _server(pipe: Connection, folder: str) -> None:
    _run(_serve(pipe, Path(folder)))


async def _serve(pipe: Connection, folder: Path) -> None:
    async def echo(message: bytes, _: Any) -> bytes:
        return message

    async def stream(_: Any, call: Any) -> None:
        into, at = allocate(_BYTES), 0
        while (message := await call.read()) is not grpc.aio.EOF:
            if len(message) == len(_SMALL):
                await call.write(message)
                continue
            into[at : at + len(message)] = message
            at += len(message)
            if at == _BYTES:
                into, at = allocate(_BYTES), 0
                await call.write(_SMALL)

    server = grpc.aio.server(options=_OPTIONS)
    methods = {
        "echo": grpc.unary_unary_rpc_method_handler(echo),
        "stream": grpc.stream_stream_rpc_method_handler(stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    made = folder / secrets.token_hex(4)
    made.write_text(str(port))
    made.rename(folder / "port")
    await asyncio.to_thread(pipe.recv)
    await server.stop(1)


def _client(pipe: Connection, folder: str) -> None:
    _run(_measure(pipe, Path(folder)))


async def _measure(pipe: Connection, folder: Path) -> None:
    while not (folder / "port").exists():  # noqa: ASYNC110  # a file tells nobody
        await asyncio.sleep(0.05)
    tensor = bytearray(_BYTES)
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{(folder / 'port').read_text()}", options=_OPTIONS
    ) as channel:
        unary = channel.unary_unary("/bare/echo")
        stream = channel.stream_stream("/bare/stream")()

        async def call() -> None:
            await unary(_SMALL)

        async def echo() -> None:
            await stream.write(_SMALL)
            await stream.read()

        async def send(piece: int) -> None:
            view = memoryview(tensor)
            for at in range(0, _BYTES, piece):
                await stream.write(bytes(view[at : at + piece]))
            await stream.read()

        async def times(count: int, measured: Callable[[], Coroutine[Any, Any, None]]) -> list[float]:
            found = []
            for _ in range(count):
                begun = perf_counter()
                await measured()
                found.append(perf_counter() - begun)
            return found

        for each, count in ((call, _CALLS), (echo, _CALLS), (partial(send, _PIECES[0]), 1)):
            await times(count, each)
        pipe.send("ready")
        while await asyncio.to_thread(pipe.recv) is not None:
            pipe.send(
                {
                    "call": await times(_CALLS, call),
                    "echo": await times(_CALLS, echo),
                }
                | {str(piece): await times(_TENSORS, partial(send, piece)) for piece in _PIECES}
            )
        await stream.done_writing()


if __name__ == "__main__":
    main()
