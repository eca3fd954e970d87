"""A stream over a gRPC call: what is written arrives, whatever the messages are; its ends and errors."""

from __future__ import annotations

import asyncio
import errno
import sys
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall.grpc.stream import GrpcStream, as_os_error
from farcall.v1 import worker_pb2
from rpc.transport import registry

MIB = 1 << 20


class Call:
    """One end of a call, where the test says what comes and when there is room.

    Attributes:
        sent: the messages that gRPC has taken.
    """

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.room = asyncio.Event()
        self.room.set()
        self._coming: asyncio.Queue[Any] = asyncio.Queue()

    async def write(self, message: bytes) -> None:
        await self.room.wait()
        self.sent.append(message)

    async def read(self) -> Any:
        come = await self._coming.get()
        if isinstance(come, Exception):
            raise come
        return come

    def come(self, message: Any) -> None:
        self._coming.put_nowait(message)

    def bytes_sent(self) -> bytes:
        """All of it, as protobuf reads it."""
        return b"".join(
            data for each in self.sent for data in worker_pb2.ConnectRequest.FromString(each).data
        )


class Failed(grpc.RpcError):  # type: ignore[misc]  # grpc has no types
    def __init__(self, code: Any, details: str) -> None:
        self.code, self.details = lambda: code, lambda: details


def message(*data: bytes) -> bytes:
    return worker_pb2.ConnectResponse(data=data).SerializeToString()


async def until(condition: Callable[[], object]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it does not happen")


@pytest.fixture
async def call() -> Call:
    return Call()


@pytest.fixture
async def stream(call: Call) -> Any:
    made = GrpcStream(asyncio.get_running_loop(), call)
    running = asyncio.create_task(made.run())
    yield made
    made.close()
    call.room.set()
    await running


def read(stream: GrpcStream, *sizes: int) -> bytes | None:
    buffers = [bytearray(size) for size in sizes]
    count = stream.read_into([memoryview(each) for each in buffers])
    return None if count is None else b"".join(buffers)[:count]


async def test_what_is_written_is_what_protobuf_reads(call: Call, stream: GrpcStream) -> None:
    written = b""
    for size in (1, 127, 128, 1000, 200_000, MIB):
        pieces: list[bytes | memoryview] = [b"a" * (size // 2), memoryview(b"b" * (size - size // 2))]
        await until(lambda: stream.is_flushed)
        assert stream.write(pieces) == size
        written += b"".join(pieces)
    await until(lambda: stream.is_flushed)
    assert call.bytes_sent() == written


async def test_small_writes_that_wait_go_out_as_one_message(call: Call, stream: GrpcStream) -> None:
    call.room.clear()
    for number in range(10):
        assert stream.write([bytes([number])]) == 1
    call.room.set()
    await until(lambda: stream.is_flushed)
    assert call.bytes_sent() == bytes(range(10))
    assert len(call.sent) <= 2


async def test_no_more_is_taken_than_there_is_room_for_and_who_waits_is_told(
    call: Call, stream: GrpcStream
) -> None:
    call.room.clear()
    assert stream.write([bytes(3 * MIB)]) == MIB
    assert stream.write([b"x"]) == 0
    assert not stream.is_flushed
    told: list[bool] = []
    stream.on_writable(lambda: told.append(stream.is_flushed))
    await until(lambda: told)
    assert told == [False]
    call.room.set()
    await until(lambda: told[-1])
    stream.on_writable(None)
    assert stream.write([b"x"]) == 1


async def test_messages_come_as_bytes_whatever_their_borders_are(call: Call, stream: GrpcStream) -> None:
    readable: list[bytes | None] = []
    stream.on_readable(lambda: readable.append(read(stream, 3, 2)))
    for each in (message(b"ab", b"", b"cdefgh"), message(), message(b"i")):
        call.come(each)
    await until(lambda: readable)
    while sum(len(each or b"") for each in readable) < 9:
        readable.append(read(stream, 3, 2))
        await asyncio.sleep(0)
    assert b"".join(each or b"" for each in readable) == b"abcdefghi"
    assert read(stream, 5) is None


async def test_of_what_is_not_read_no_more_comes(call: Call, stream: GrpcStream) -> None:
    for each in (b"1", b"2", b"3"):
        call.come(message(each))
    for _ in range(20):
        await asyncio.sleep(0)
    assert call._coming.qsize() == 2
    assert read(stream, 10) == b"1"


async def test_the_end_comes_behind_what_came_before_it(call: Call, stream: GrpcStream) -> None:
    call.come(message(b"last"))
    call.come(grpc.aio.EOF)
    ends: list[bytes | None] = []
    stream.on_readable(lambda: ends.append(read(stream, 10)))
    await until(lambda: b"" in ends)
    assert ends[0] == b"last"
    assert set(ends[1:]) == {b""}


@pytest.mark.parametrize(
    "details", ["Socket closed", "recvmsg:Connection reset by peer", "GOAWAY received; error code 0"]
)
async def test_a_process_that_has_gone_is_the_end(call: Call, stream: GrpcStream, details: str) -> None:
    call.come(Failed(grpc.StatusCode.UNAVAILABLE, details))
    ends: list[bytes | None] = []
    stream.on_readable(lambda: ends.append(read(stream, 10)))
    await until(lambda: ends)
    assert set(ends) == {b""}


async def test_what_comes_behind_the_close_is_dropped_and_what_was_written_goes_out(
    call: Call, stream: GrpcStream
) -> None:
    stream.write([b"goodbye"])
    stream.close()
    call.come(message(b"too late"))
    await until(lambda: call.sent)
    assert call.bytes_sent() == b"goodbye"


@given(st.binary(max_size=60))
def test_anything_that_comes_is_bytes_or_an_error(data: bytes) -> None:
    async def take_in() -> None:
        call = Call()
        stream = GrpcStream(asyncio.get_running_loop(), call)
        running = asyncio.create_task(stream.run())
        outcome: list[Any] = []

        def take() -> None:
            try:
                outcome.append(read(stream, 100))
            except OSError as error:
                outcome.append(error.errno)

        stream.on_readable(take)
        call.come(data)
        call.come(grpc.aio.EOF)
        await until(lambda: b"" in outcome or errno.EPROTO in outcome)
        assert {errno.EPROTO} >= {each for each in outcome if isinstance(each, int)}
        stream.close()
        await running

    asyncio.run(take_in())


@pytest.mark.parametrize(
    ("code", "details", "number"),
    [
        ("UNAVAILABLE", "failed to connect: ipv4:127.0.0.1:1: Connection refused", errno.ECONNREFUSED),
        ("UNAVAILABLE", "last error: No route to host", errno.EHOSTUNREACH),
        ("UNAVAILABLE", "upstream connect error", errno.ECONNRESET),
        ("UNAVAILABLE", "Ssl handshake failed: CERTIFICATE_VERIFY_FAILED", None),
        ("UNIMPLEMENTED", "no such method", None),
    ],
)
def test_what_grpc_says_has_the_systems_number_where_it_names_one(
    code: str, details: str, number: int | None
) -> None:
    error = as_os_error(Failed(grpc.StatusCode[code], details))
    assert error.errno == number
    assert details in str(error)


def test_where_something_is_not_installed_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("farcall.grpc.transport", "farcall.grpc.server"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    for missing in ("grpc_health", "grpc_health.v1"):
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"extra 'grpc': .* -m pip install .*grpcio-health-checking"):
        registry.load(["tcp", "grpc"])
