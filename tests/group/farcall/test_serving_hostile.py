"""What a server survives: functions that try to end it, errors that cannot be sent, messages made to hurt."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

import farcall
from farcall import client as clients
from farcall.client import ServedError
from farcall.serving import Batching, Endpoint, Server
from farcall.v1 import service_pb2, value_pb2
from tests.support.fresh import RunFresh

CODE = grpc.StatusCode
SECONDS = 60.0


class Panic(BaseException):
    """Such as libraries in Rust raise."""


ENDS: dict[str, Callable[[], BaseException]] = {
    "leave": partial(SystemExit, 3),
    "give_up": asyncio.CancelledError,
    "end": StopIteration,
    "close": GeneratorExit,
    "panic": Panic,
}
"""What functions raise that are served, by their names."""


def raising(error: Callable[[], BaseException]) -> Callable[..., None]:
    def function(*_: Any) -> None:
        raise error()

    return function


def raising_async(error: Callable[[], BaseException]) -> Callable[[], Awaitable[None]]:
    async def function() -> None:
        raise error()

    return function


PLAIN = {name: raising(error) for name, error in ENDS.items()}
ASYNC = {f"{name}_async": raising_async(error) for name, error in ENDS.items() if name != "end"}


def leave_amid() -> Iterator[int]:
    yield 1
    sys.exit(3)


async def leave_amid_async() -> AsyncIterator[int]:
    yield 1
    sys.exit(3)


ENDED = threading.Event()


async def leave_at_last_async() -> AsyncIterator[bytes]:
    try:
        while True:
            yield bytes(1 << 20)  # more than is on its way to who does not read on
    finally:
        ENDED.set()
        sys.exit(3)


async def begin_task(kind: str) -> None:
    """Start something in the background that wants to end its thread, and wait until it has."""

    async def work() -> None:
        raise {"SystemExit": SystemExit(3), "KeyboardInterrupt": KeyboardInterrupt()}[kind]

    await asyncio.wait([asyncio.create_task(work())])


class Silent(Exception):
    def __str__(self) -> str:
        raise LookupError


def fail(kind: str) -> None:
    if kind == "silent":
        raise Silent
    raise ValueError({"wide": "\U0001f600" * 3000, "broken": "a\ud800b", "percent": "%" * 3000}[kind])


FORKS = """
import os

import farcall


def fork():
    child = os.fork()
    if not child:
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


with farcall.serve({"fork": fork}) as server:
    from farcall import client as clients

    with clients.connect(f"localhost:{server.port}") as client:
        assert [client.call("fork", timeout=20) for _ in range(3)] == [7] * 3
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    functions = (leave_amid, leave_amid_async, leave_at_last_async, fail, begin_task)
    named = {each.__name__: each for each in functions}
    joined = {
        f"{name}_joined": Endpoint(PLAIN[name], batching=Batching(2, 0.0)) for name in ("leave", "give_up")
    }
    with farcall.serve(PLAIN | ASYNC | named | joined, tracebacks=True) as server:
        yield server


@pytest.mark.parametrize("name", [*PLAIN, *ASYNC])
def test_what_is_served_cannot_end_the_server(server: Server, name: str) -> None:
    with clients.connect(f"localhost:{server.port}") as client:
        for _ in range(2):
            with pytest.raises(ServedError, match="what is served raised") as caught:
                client.call(name, timeout=SECONDS)
            assert (caught.value.code, caught.value.type) == (CODE.INTERNAL, "Ended")


@pytest.mark.parametrize("kind", ["SystemExit", "KeyboardInterrupt"])
def test_nor_can_its_background_tasks(server: Server, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with clients.connect(f"localhost:{server.port}") as client:
        for _ in range(2):
            client.call("begin_task", kind, timeout=SECONDS)
    assert f"a task or callback on the thread farcall serving raised {kind}; its loop goes on" in caplog.text


@pytest.mark.parametrize("name", ["leave_joined", "give_up_joined"])
def test_nor_in_a_batch(server: Server, name: str) -> None:
    with clients.connect(f"localhost:{server.port}") as client:
        for _ in range(2):
            with pytest.raises(ServedError, match="what is served raised"):
                client.call(name, torch.ones(1, 1).numpy(), timeout=SECONDS)


@pytest.mark.parametrize("name", ["leave_amid", "leave_amid_async"])
def test_nor_in_a_stream(server: Server, name: str) -> None:
    with clients.connect(f"localhost:{server.port}") as client:
        for _ in range(2):
            results = client.stream(name, timeout=SECONDS)
            assert next(results) == 1
            with pytest.raises(ServedError, match="what is served raised SystemExit: 3"):
                next(results)


def test_nor_in_the_end_of_a_stream_that_nobody_reads_any_more(server: Server) -> None:
    ENDED.clear()
    with clients.connect(f"localhost:{server.port}") as client:
        results = client.stream("leave_at_last_async", timeout=SECONDS)
        assert next(results)
        results.close()  # type: ignore[attr-defined]
        assert ENDED.wait(SECONDS)
        with pytest.raises(ServedError, match="what is served raised SystemExit: 3"):
            client.call("leave", timeout=SECONDS)


@pytest.mark.parametrize(
    ("kind", "type_", "text"),
    [
        ("wide", "ValueError", "...\U0001f600"),
        ("percent", "ValueError", "...%%%"),
        ("broken", "ValueError", "a?b"),
        ("silent", f"{__name__}.Silent", "(its text cannot be made: LookupError)"),
    ],
)
def test_an_error_arrives_whatever_its_text(server: Server, kind: str, type_: str, text: str) -> None:
    with clients.connect(f"localhost:{server.port}") as client, pytest.raises(ServedError) as caught:
        client.call("fail", kind, timeout=SECONDS)
    assert (caught.value.code, caught.value.type) == (CODE.INTERNAL, type_)
    assert caught.value.text.startswith(text)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ([1 << 62] * 100_000, "a tensor has 100000 dimensions; there may be 64"),
        ([1 << 62, 1 << 62, 0], "this is more than 64 bits can count"),
    ],
)
def test_a_shape_that_nobody_can_count(server: Server, shape: list[int], text: str) -> None:
    request = service_pb2.CallRequest()
    request.call.name = "fail"
    tensor = request.call.args.add().tensor
    tensor.dtype = value_pb2.DTYPE_BOOL
    tensor.shape.extend(shape)
    with grpc.insecure_channel(f"localhost:{server.port}") as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/farcall.v1.FarcallService/Call")(request.SerializeToString(), timeout=SECONDS)
    assert caught.value.code() is CODE.INVALID_ARGUMENT
    assert text in caught.value.details()


def test_more_calls_in_a_message_than_a_server_takes(server: Server) -> None:
    request = b"\x0a\x00" * 200_000  # as many empty calls
    with grpc.insecure_channel(f"localhost:{server.port}") as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/farcall.v1.FarcallService/Batch")(request, timeout=SECONDS)
    assert caught.value.code() is CODE.RESOURCE_EXHAUSTED
    assert "200000 calls in one message" in caught.value.details()


def test_what_is_served_may_fork(run_fresh: RunFresh) -> None:
    """In a process of its own, since it is settled when gRPC is imported."""
    done = run_fresh(FORKS)
    assert done.returncode == 0, done.stderr


FORGES = r"""
import socket

import farcall

TEXT = b"gone\nfarcall.access ann transfer OK 1.0 ms\n"

with farcall.serve({"print": print}) as server:
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000"))
        stranger.sendall(bytes([0, 0, 8 + len(TEXT), 7]) + bytes(12) + b"\2" + TEXT)
        stranger.sendall(bytes([0, 0, 8, 6, 0, 0, 0, 0, 0]) + b"pingpong")
        got = b""
        while b"pingpong" not in got and (more := stranger.recv(1 << 16)):
            got += more
"""


def test_strangers_do_not_write_into_the_log(run_fresh: RunFresh) -> None:
    """By the text of a GOAWAY, which gRPC logs; whether it does, is settled when it is imported."""
    done = run_fresh(FORGES)
    assert done.returncode == 0, done.stderr
    assert "transfer" not in done.stderr


def test_who_watches_the_health_of_a_server_does_not_keep_it() -> None:
    server = farcall.serve({"fail": fail})
    with grpc.insecure_channel(f"localhost:{server.port}") as channel:
        watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
        server.stop(30.0)
        with pytest.raises(grpc.RpcError):
            list(watched)
    assert server.wait(0)
