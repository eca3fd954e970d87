"""The command ``python -m benchmarks.grpc``: the backend GRPC beside bare ``grpc.aio``, over loopback.

Both have two processes, on the same kind of loop, and have sent what is measured before it is. A bare call is
an echo of a few bytes, by itself or on a stream that stays open; a bare tensor is 64 MB of bytes over such a
stream, in pieces of the size that farcall's have, which the receiver puts together in fresh memory of the
same kind.

What else a machine does changes within seconds. So the two are measured in pairs, one right behind the other,
each time in the other order, and the ratio is the median of the pairs' ratios; half of these lie in the range
that stands beside it.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import asyncio
import multiprocessing
import secrets
import statistics
import tempfile
from collections.abc import Callable, Coroutine, Sequence
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
from rpc.wire.chunking import CHUNK_BYTES
from rpc.wire.reassembly import allocate

__all__ = ["main"]

_CALLS: Final = 100
"""In a turn, of which the median counts."""
_BYTES: Final = 64 << 20
_WARM_TENSORS: Final = 5
_SMALL: Final = b"x" * 50
_OPTIONS: Final = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))

_PAIRS: Final = (
    ("null call, beside a call of its own", "call", 1e6, "µs"),
    ("null call, beside an echo on a stream", "echo", 1e6, "µs"),
    (f"64 MB tensor, beside pieces of {CHUNK_BYTES >> 10} KB", "tensor", 1e3, "ms"),
)
"""Of what is measured: a title, the name by which both sides know it, and its unit."""


@click.command()
@click.option("--rounds", default=41, show_default=True, help="How many pairs of each.")
def main(rounds: int) -> None:
    """Measure and print."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        sides: list[list[Connection]] = []
        processes = []
        for roles in ((_worker0, _worker1), (_client, _server)):
            sides.append([])
            for role in roles:
                ours, theirs = context.Pipe()
                sides[-1].append(ours)
                processes.append(context.Process(target=role, args=(theirs, folder)))
        for process in processes:
            process.start()
        try:
            leads = [each[0] for each in sides]
            for lead in leads:
                lead.recv()  # it is ready
            pairs: dict[str, list[list[float]]] = {}
            for number in range(rounds):
                for _, what, _, _ in _PAIRS:
                    pairs.setdefault(what, []).append(_measure_both(leads, what, number % 2))
        finally:
            for each in sides:
                for pipe in each:
                    pipe.send(None)
            for process in processes:
                process.join()
    _print(pairs)


def _measure_both(leads: Sequence[Connection], what: str, first: int) -> list[float]:
    """Seconds that it takes on each side, measured on one after the other."""
    seconds = [0.0, 0.0]
    for side in (first, 1 - first):
        leads[side].send(what)
        seconds[side] = leads[side].recv()
    return seconds


def _print(pairs: dict[str, list[list[float]]]) -> None:
    table = Table("", "farcall", "bare grpc.aio", "ratio", "half of all", title="over loopback, medians")
    for title, what, scale, unit in _PAIRS:
        ours, bare = (statistics.median(side) * scale for side in zip(*pairs[what], strict=True))
        low, middle, high = statistics.quantiles(each[0] / each[1] for each in pairs[what])
        table.add_row(
            title, f"{ours:.1f} {unit}", f"{bare:.1f} {unit}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}"
        )
    Console().print(table)


def _seconds(count: int, call: Callable[[], object]) -> float:
    """Return the duration of a call in seconds, the median of several."""
    found = []
    for _ in range(count):
        begun = perf_counter()
        call()
        found.append(perf_counter() - begun)
    return statistics.median(found)


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

    _seconds(_CALLS, call)
    _seconds(_WARM_TENSORS, send)
    pipe.send("ready")
    while (what := pipe.recv()) is not None:
        pipe.send(_seconds(1, send) if what == "tensor" else _seconds(_CALLS, call))
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
    tensor = bytearray(_SMALL[:1]) * _BYTES  # not zeros: those the kernel has in one page for all, cached
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

        async def send() -> None:
            view = memoryview(tensor)
            for at in range(0, _BYTES, CHUNK_BYTES):
                await stream.write(bytes(view[at : at + CHUNK_BYTES]))
            await stream.read()

        async def seconds(count: int, measured: Callable[[], Coroutine[Any, Any, None]]) -> float:
            found = []
            for _ in range(count):
                begun = perf_counter()
                await measured()
                found.append(perf_counter() - begun)
            return statistics.median(found)

        known = {"call": (_CALLS, call), "echo": (_CALLS, echo), "tensor": (1, send)}
        await seconds(_CALLS, call)
        await seconds(_CALLS, echo)
        await seconds(_WARM_TENSORS, send)
        pipe.send("ready")
        while (what := await asyncio.to_thread(pipe.recv)) is not None:
            pipe.send(await seconds(*known[what]))
        await stream.done_writing()


if __name__ == "__main__":
    main()
