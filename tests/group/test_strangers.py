"""Strangers who connect: another protocol, another version, nonsense, or the wrong one. Each is refused by
name, the log says why, and the worker lives on.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import struct
from typing import Any

import pytest

import rpc
from rpc.runtime.current import current_agent
from rpc.wire.frames import PREAMBLE, PROTOCOL_VERSION, Kind
from tests.support.hostile import Hostile, Target, frame, target
from tests.support.serving import first_of, in_group, serve
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker, WorkerProcess

PREFIX = struct.Struct("<QQIIB3x")
"""Of a frame: body length, call id, header length, segment count, kind."""


def my_name(*_: Any) -> str:
    return rpc.get_worker_info().name


def log_lines(worker: WorkerProcess) -> list[str]:
    return worker.log.read_text().splitlines()


# ---- before the handshake

STRANGERS: dict[str, tuple[list[bytes], str]] = {
    "an HTTP request": (
        [b"GET / HTTP/1.1\r\nHost: worker1\r\n\r\n"],
        r"does not speak farcall's protocol \(it began with b'GET / HT'\)",
    ),
    "a TLS hello": ([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"], r"does not speak farcall's protocol"),
    "zeros": ([bytes(100_000)], r"does not speak farcall's protocol \(it began with b'\\x00"),
    "a later version": (
        [PREAMBLE[:-1], bytes([PROTOCOL_VERSION + 1])],
        f"speaks version {PROTOCOL_VERSION + 1} of farcall's protocol, this worker version 1",
    ),
    "half a preamble": ([PREAMBLE[:4]], "no handshake within 0.3 s"),
    "a preamble": ([PREAMBLE], "no handshake within 0.3 s"),
    "half a hello": ([PREAMBLE, PREFIX.pack(50, 0, 50, 0, Kind.HELLO), b"\x83"], "no handshake within 0.3 s"),
    "a huge frame": (
        [PREAMBLE, PREFIX.pack(1 << 62, 0, 10, 0, Kind.HELLO)],
        f"a frame of {1 << 62} bytes is over",
    ),
    "a frame too long for a hello": (
        [PREAMBLE, PREFIX.pack(1 << 20, 0, 1 << 20, 0, Kind.HELLO)],
        f"a frame of {1 << 20} bytes is over the limit of 65536",
    ),
    "a huge header": (
        [PREAMBLE, PREFIX.pack(100, 0, 1 << 31, 0, Kind.HELLO)],
        f"a header of {1 << 31} bytes is over the limits",
    ),
    "a header beyond its frame": (
        [PREAMBLE, PREFIX.pack(10, 0, 11, 0, Kind.HELLO)],
        "a frame of 10 bytes cannot hold 0 segments and a header of 11 bytes",
    ),
    "many segments": (
        [PREAMBLE, PREFIX.pack(100, 0, 10, 1 << 31, Kind.HELLO)],
        f"a frame of {1 << 31} segments .* is over the limits",
    ),
    "deep nesting": (
        [PREAMBLE, PREFIX.pack(60_000, 0, 60_000, 0, Kind.HELLO), b"\x91" * 60_000],
        "a frame's header is not msgpack: StackError",
    ),
    "a list for a header": (
        [PREAMBLE, PREFIX.pack(1, 0, 1, 0, Kind.HELLO), b"\x90"],
        "a frame's header is a list, not a map",
    ),
    "an empty hello": ([PREAMBLE, frame(Kind.HELLO, {})], "a malformed hello: KeyError"),
    "a nested hello": (
        [PREAMBLE, frame(Kind.HELLO, {"member": [[[]]] * 7, "wanted": 1, "group": ""})],
        "a malformed hello: TypeError",
    ),
    "a name that cannot be": (
        [
            PREAMBLE,
            frame(
                Kind.HELLO, {"member": ["\x1b[31m\n", 1, 1, "", [], "", 1 << 30], "wanted": 1, "group": ""}
            ),
        ],
        r"a malformed hello: InvalidNameError.*\\x1b\[31m\\n",
    ),
    "a call": (
        [PREAMBLE, frame(Kind.CALL, {}, [b"cos\nsystem\n(S'touch pwned'\ntR."])],
        "expected hello, .*kind 5",
    ),
    "a welcome": ([PREAMBLE, frame(Kind.WELCOME, {})], "expected hello, got a frame of kind 2"),
    "random bytes": (
        [PREAMBLE, random.Random(1).randbytes(5000)],
        "a frame of [0-9]+ bytes is over the limit",
    ),
}


def meet_strangers(_: Worker, scheme: str) -> str:
    at: Target = rpc.rpc_sync("worker1", target)
    rpc.rpc_sync("worker1", be_impatient)
    with Hostile(at, scheme):
        pass  # only wants to know whether somebody listens, which is not worth a line
    for name, (data, _text) in STRANGERS.items():
        with Hostile(at, scheme) as peer:
            peer.say(*data)
            assert peer.is_hung_up(), name
    assert not os.path.exists("pwned")
    rpc.rpc_sync("worker1", wait_until_all_are_gone)
    return str(rpc.rpc_sync("worker1", my_name))


def wait_until_all_are_gone() -> None:
    until(lambda: not current_agent().connections.handshaking)


def be_impatient() -> None:
    current_agent().connections.connect_seconds = 0.3


@pytest.mark.parametrize("scheme", ["unix", "tcp"])
def test_strangers_are_refused_one_by_one_and_the_log_says_why(run_workers: RunWorkers, scheme: str) -> None:
    meet = in_group(lambda worker: meet_strangers(worker, scheme))
    workers = run_workers.start([meet, serve])
    assert workers.results() == ["worker1", None]
    lines = log_lines(workers[1])
    who = rf"process {workers[0].pid} on this host" if scheme == "unix" else r"127\.0\.0\.1:[0-9]+"
    assert len(lines) == len(STRANGERS)
    for line, (name, (_, text)) in zip(lines, STRANGERS.items(), strict=True):
        assert re.match(f"refused {who}: .*{text}", line), f"{name}: {line}"
        assert len(line) < 500


# ---- many of them


def memory() -> int:
    """The most that this process has ever had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def come_in_crowds(_: Worker) -> int:
    at: Target = rpc.rpc_sync("worker1", target)
    before = rpc.rpc_sync("worker1", memory)
    for _crowd in range(20):
        with contextlib.ExitStack() as crowd:
            peers = [crowd.enter_context(Hostile(at)) for _ in range(20)]
            for peer in peers:
                peer.say(PREAMBLE, bytes(20_000))  # an empty frame of kind 0, many times
            assert all(peer.is_hung_up() for peer in peers)
    return int(rpc.rpc_sync("worker1", memory)) - int(before)


def test_strangers_take_no_memory(run_workers: RunWorkers) -> None:
    assert first_of(run_workers, come_in_crowds) < 30


def limit_descriptors() -> None:
    """Leaves this process no more than a few descriptors to open."""
    in_use = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 5, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def take_all_descriptors(_: Worker) -> str:
    at: Target = rpc.rpc_sync("worker1", target)
    rpc.rpc_sync("worker1", limit_descriptors)
    with contextlib.ExitStack() as crowd:
        for _number in range(40):
            crowd.enter_context(Hostile(at))
        rpc.rpc_sync("worker1", my_name)  # whom one knows one goes on talking to
    with Hostile(at) as peer:
        peer.say(b"hello?")
        assert peer.is_hung_up()
    return str(rpc.rpc_sync("worker1", my_name))


def test_a_worker_out_of_descriptors_says_so_once_and_recovers(run_workers: RunWorkers) -> None:
    workers = run_workers.start([in_group(take_all_descriptors), serve])
    assert workers.results() == ["worker1", None]
    warnings = [line for line in log_lines(workers[1]) if "cannot accept connections on unix:@" in line]
    assert len(warnings) == 1
    assert "Too many open files" in warnings[0]
