"""TLS below connections: everything arrives whole, and nobody comes in without a certificate of the job's."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from rpc.errors import InvalidOptionError
from rpc.options import TlsOptions
from rpc.runtime.loop import LoopThread
from rpc.transport import tls
from rpc.transport.base import Connection, TransportContext
from rpc.transport.tcp import TcpTransport
from rpc.transport.tls import TlsContexts, TlsStream
from rpc.wire.frames import PREAMBLE, Kind, encode
from tests.support.certificates import Authority
from tests.support.streams import SOON, Recorder, Sockets, send, until

LIMIT = 1 << 30

NO_LOOP: Any = None
"""Nothing waits for these streams."""


class Side:
    """A transport with TLS, and what came to it."""

    def __init__(self, loop: LoopThread, options: TlsOptions | None) -> None:
        self.loop = loop
        contexts = None if options is None else TlsContexts.of(options)
        self.transport = TcpTransport(TransportContext(loop.loop, 64 << 20, tls=contexts))
        self.connections: list[Connection] = []
        self.owner = Recorder()
        self.listener = loop.call(self.transport.listen, "127.0.0.1", 0, self._accepted)
        host, port = self.listener.address.removeprefix("tcp:").split(":")
        self.where = host, int(port)

    def _accepted(self, connection: Connection) -> None:
        connection.start(self.owner)
        connection.set_frame_limits(LIMIT, LIMIT)
        self.connections.append(connection)

    def connect(self, to: Side) -> Connection:
        async def run() -> Connection:
            connection = await self.transport.connect(to.listener.address)
            connection.start(self.owner)
            connection.set_frame_limits(LIMIT, LIMIT)
            self.connections.append(connection)
            return connection

        return self.loop.wait_for(run(), SOON)

    def close(self) -> None:
        self.loop.call(self.listener.close)
        for connection in self.connections:
            self.loop.call(connection.close, "end of the test")


MakeSide = Callable[[TlsOptions | None], Side]


@pytest.fixture
def make_side(loop: LoopThread) -> Iterator[MakeSide]:
    """Makes sides, which are closed after the test."""
    made: list[Side] = []

    def make(options: TlsOptions | None) -> Side:
        made.append(Side(loop, options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_frames_of_any_size_go_both_ways(make_side: MakeSide, authority: Authority) -> None:
    here, there = make_side(authority.issue()), make_side(authority.issue())
    connection = here.connect(there)
    chance = random.Random(1)
    bodies = [chance.randbytes(size) for size in (0, 1, 100, 16 << 10, 70_000, 300_000, 5 << 20, 40 << 20)]
    send(connection, {"first": 1})
    assert there.owner.wait_for(1)[0].header == {"first": 1}
    back = there.connections[0]
    for sender in (connection, back):
        for body in bodies:
            buffers, size = encode(Kind.EXTENSION, 1, {"size": len(body)}, (b"small", body))
            sender.send(buffers, size)
    for owner, before in ((there.owner, 1), (here.owner, 0)):
        arrived = owner.wait_for(before + len(bodies))[before:]
        found = {frame.header["size"]: bytes(frame.buffers[1]) for frame in arrived}
        assert [found[len(body)] for body in bodies] == bodies


def test_who_has_a_certificate_of_another_authority_is_turned_away(
    make_side: MakeSide, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there = make_side(authority.issue())
    stranger = make_side(Authority(tmp_path, "theirs").issue(ca=authority.certificate))
    connection = stranger.connect(there)  # on its side the handshake is over before the other has looked
    assert "certificate" in stranger.owner.reason() or "unknown ca" in stranger.owner.reason()
    assert not there.connections
    until(lambda: "no TLS with it: CERTIFICATE_VERIFY_FAILED" in caplog.text)
    assert connection in stranger.connections


def test_who_listens_with_a_certificate_of_another_authority_is_told_nothing(
    make_side: MakeSide, authority: Authority, tmp_path: Path
) -> None:
    stranger = make_side(Authority(tmp_path, "theirs").issue(ca=authority.certificate))
    with pytest.raises(ssl.SSLCertVerificationError):
        make_side(authority.issue()).connect(stranger)
    assert not stranger.connections


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", PREAMBLE, b"\x16\x03\x01\x00\xff"])
def test_who_speaks_no_tls_is_turned_away(
    make_side: MakeSide,
    authority: Authority,
    said: bytes,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tls, "_HANDSHAKE_SECONDS", 0.2)
    there = make_side(authority.issue())
    with socket.create_connection(there.where, SOON) as visitor:
        visitor.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            while visitor.recv(1000):
                pass
    until(lambda: "no TLS with it" in caplog.text)
    assert not there.connections


def test_of_too_many_that_say_nothing_the_first_is_cut_off(
    make_side: MakeSide,
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(tls, "_MAX_HANDSHAKES", 2)
    monkeypatch.setattr(tls, "_SLOW_SECONDS", -1.0)
    there = make_side(authority.issue())
    with contextlib.ExitStack() as stack:
        first, *_ = (stack.enter_context(socket.create_connection(there.where, SOON)) for _ in range(3))
        assert first.recv(1) == b""
        here = make_side(authority.issue())
        send(here.connect(there), {"a": "friend"})
        assert there.owner.wait_for(1)[0].header == {"a": "friend"}


def test_a_worker_without_tls_and_one_with_it_do_not_meet(make_side: MakeSide, authority: Authority) -> None:
    plain, there = make_side(None), make_side(authority.issue())
    plain.connect(there)
    assert plain.owner.reason()
    with pytest.raises((ssl.SSLError, ConnectionError)):
        there.connect(plain)


@pytest.mark.parametrize("missing", ["cert", "key", "ca"])
def test_files_that_are_not_there_are_named(authority: Authority, missing: str) -> None:
    options = authority.issue()
    wrong = TlsOptions(**(vars(options) | {missing: "/no/such.pem"}))
    with pytest.raises(InvalidOptionError, match=r"/no/such\.pem.*No such file"):
        TlsContexts.of(wrong)


@pytest.mark.parametrize("option", ["cert", "key", "ca"])
@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("fifo", "not a regular file, but a pipe"),
        ("/dev/zero", "not a regular file, but a device"),
        (".", "not a regular file, but a folder"),
        ("large", "more than 4194304 bytes"),
    ],
)
def test_files_of_other_kinds_are_refused_at_once(
    authority: Authority, tmp_path: Path, option: str, place: str, text: str
) -> None:
    os.mkfifo(tmp_path / "fifo")
    with (tmp_path / "large").open("wb") as large:
        large.truncate(1 << 40)
    wrong = TlsOptions(**(vars(authority.issue()) | {option: str(tmp_path / place)}))
    with pytest.raises(InvalidOptionError, match=f"{option} .* cannot be read: it .*{text}"):
        TlsContexts.of(wrong)


def test_no_password_is_asked_for_where_a_key_is_encrypted(authority: Authority, tmp_path: Path) -> None:
    options = authority.issue()
    key = load_pem_private_key(Path(options.key).read_bytes(), None)
    encrypted = tmp_path / "encrypted.pem"
    encrypted.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    )
    with pytest.raises(InvalidOptionError, match="the key is encrypted"):
        TlsContexts.of(TlsOptions(options.cert, str(encrypted), options.ca))


def connected(authority: Authority, sockets: Sockets, buffer: int) -> tuple[TlsStream, ssl.SSLSocket]:
    """A stream, and the socket at its other end, which blocks."""
    contexts = TlsContexts.of(authority.issue())
    near, far = sockets("tcp", buffer)
    for each in (near, far):
        each.settimeout(SOON)
    done: list[ssl.SSLSocket] = []
    server = threading.Thread(target=lambda: done.append(contexts.server.wrap_socket(far, server_side=True)))
    server.start()
    client = contexts.client.wrap_socket(near)
    server.join(SOON)
    return TlsStream(NO_LOOP, client), done[0]


def test_a_write_that_is_not_taken_goes_on_with_the_same_bytes(
    authority: Authority, sockets: Sockets
) -> None:
    stream, other = connected(authority, sockets, 4096)
    data = random.Random(2).randbytes(1 << 20)
    received = bytearray()

    def receive() -> None:
        while part := other.recv(1 << 16):
            received.extend(part)

    reader = threading.Thread(target=receive)
    left = memoryview(data)
    taken = 1
    while taken:
        taken = stream.write([left[:1000], left[1000:]])
        left = left[taken:]
    reader.start()
    while left:
        left = left[stream.write([left[:7], left[7:]]) :]
    stream.socket.shutdown(socket.SHUT_WR)
    reader.join(SOON)
    stream.close()
    other.close()
    assert bytes(received) == data


def test_memory_of_the_caller_may_change_while_its_bytes_wait(authority: Authority, sockets: Sockets) -> None:
    stream, other = connected(authority, sockets, 4096)
    theirs = bytearray(b"\1" * (4 << 20))
    taken = 1
    sent = 0
    while taken:
        taken = stream.write([memoryview(theirs)[sent:]])
        sent += taken
    kept = bytes(theirs[sent : sent + (256 << 10)])  # as a queue does
    theirs[:] = b"\2" * len(theirs)
    received = bytearray()
    total = sent + len(kept)

    def receive() -> None:
        while len(received) < total and (part := other.recv(1 << 16)):
            received.extend(part)

    reader = threading.Thread(target=receive)
    reader.start()
    left = memoryview(kept)
    while left:
        left = left[stream.write([left]) :]
    reader.join(SOON)
    stream.close()
    other.close()
    assert received.count(1) == len(received) == total


def test_what_came_before_the_connection_broke_is_not_lost(authority: Authority, sockets: Sockets) -> None:
    stream, other = connected(authority, sockets, 1 << 16)
    other.sendall(b"the end of a message")
    forged = b"\x17\x03\x03\x00\x20" + bytes(32)  # what no key of this connection has sealed
    socket.socket.sendall(other, forged)
    message, behind = bytearray(20), bytearray(100)
    buffers = [memoryview(message), memoryview(behind)]
    select.select([stream.socket], [], [], SOON)
    assert stream.read_into(buffers) == 20
    assert message == b"the end of a message"
    with pytest.raises(ssl.SSLError):
        until(lambda: stream.read_into(buffers))
    stream.close()
    other.close()
