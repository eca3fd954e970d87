"""Strangers who connect: another protocol, another version, nonsense, or the wrong one. Each is refused by
name, the log says why, and the worker lives on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import resource
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest

import rpc
from rpc.errors import WorkerLostError
from rpc.runtime.current import current_agent
from rpc.wire.frames import PREAMBLE, PROTOCOL_VERSION, Kind
from tests.support.hostile import Hostile, Target, frame, target
from tests.support.refusals import refused
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


# ---- a handshake of the wrong one


def ask_to_be_let_in(_: Worker) -> dict[str, str]:
    at: Target = rpc.rpc_sync("worker1", target)
    me = target().member
    stranger = dataclasses.replace(me, info=rpc.WorkerInfo("stranger", 7), incarnation=7)
    asked: dict[str, Callable[[Hostile], bytes]] = {
        "stranger": lambda peer: peer.hello(stranger),
        "another group": lambda peer: peer.hello(me, group="other\n\x1b[31m" + "x" * 10_000),
        "another incarnation": lambda peer: peer.hello(me, wanted=99),
        "itself": lambda peer: peer.hello(at.member),
        "a changed description": lambda peer: peer.hello(dataclasses.replace(me, host="elsewhere")),
        "a second time": lambda peer: peer.hello(me),
    }
    answers = {}
    for name, hello in asked.items():
        with Hostile(at) as peer:
            peer.say(hello(peer), frame(Kind.CALL, {}, [b"not even looked at"]))
            answer, *others = peer.hear_all()
            assert (answer.kind, others) == (Kind.REFUSED, [])
            answers[name] = answer.header["reason"]
    assert rpc.rpc_sync("worker1", my_name) == "worker1"
    return answers


def test_a_handshake_that_is_not_in_order_is_refused_with_a_reason_that_names_both(
    run_workers: RunWorkers,
) -> None:
    workers = run_workers.start([in_group(ask_to_be_let_in), serve])
    answers = workers.results()[0]
    both = r"worker '{}' asked worker 'worker1' \(id 1\)"
    worker0 = both.format("worker0")
    for name, pattern in {
        "stranger": both.format("stranger") + ", but is not among the workers that formed the group",
        "another group": worker0 + r" in the name of another group \('other\\n\\x1b",
        "another incarnation": worker0 + ", but wanted incarnation 63, which is no longer at this address",
        "itself": both.format("worker1") + ", but claims to be that very worker",
        "a changed description": worker0 + ", but describes itself otherwise than it did to the group",
        "a second time": worker0 + ", but they are connected already",
    }.items():
        assert re.match(pattern, answers[name]), answers[name]
        assert len(answers[name]) < 500
    logged = [line.partition(": ")[2] for line in log_lines(workers[1])]
    told = [text for name, text in answers.items() if name != "a second time"]
    assert all(line.startswith(text) for line, text in zip(logged, told, strict=True))
    assert "this worker's is 'default/1-" in logged[1]
    assert "this is " in logged[2]


# ---- who answers where a worker is said to listen

ANSWERS: dict[str, tuple[list[bytes] | None, str]] = {
    "a web server": (
        [b"HTTP/1.1 400 Bad Request\r\n\r\n"],
        r"does not speak farcall's protocol \(it began with b'HTTP/1.1",
    ),
    "an earlier version": (
        [PREAMBLE[:-1], bytes([0])],
        "speaks version 0 of farcall's protocol, this worker version 1",
    ),
    "nobody": (None, r"it cannot be reached at tcp:127.0.0.1:[0-9]+: Connection refused"),
    "one who says nothing": ([], "no handshake within 0.3 s"),
    "one who hangs up": ([b""], "the connection was closed by the other side"),
    "one who refuses": (
        [PREAMBLE, frame(Kind.REFUSED, {"code": "stranger", "reason": "go\x1b[1m\naway"})],
        r"it refused the connection: 'go\\x1b\[1m\\naway'",
    ),
    "one who begins with a call": (
        [PREAMBLE, frame(Kind.CALL, {})],
        "expected challenge or welcome or refused, got .* kind 5",
    ),
}


def answer(listener: socket.socket, data: list[bytes]) -> None:
    """Serves one connection: says ``data`` (an empty piece: hangs up) and waits for the other to hang up."""
    connection, _ = listener.accept()
    with connection:
        connection.recv(1)
        for piece in data:
            if not piece:
                return
            connection.sendall(piece)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(1 << 16):
                pass


def call_impostors(worker: Worker) -> None:
    with worker.group(dynamic=True):
        agent = current_agent()
        agent.connections.connect_seconds = 0.3
        for number, (kind, (data, text)) in enumerate(ANSWERS.items(), 1):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                name, address = f"impostor{number}", f"tcp:127.0.0.1:{listener.getsockname()[1]}"
                member = dataclasses.replace(
                    agent.view.me, info=rpc.WorkerInfo(name, number), incarnation=number, addresses=(address,)
                )
                agent.on_loop(agent.view.join, member)
                agent.on_loop(agent.peer_for, member)
                if data is None:
                    listener.close()
                    said = refused(WorkerLostError, "", rpc.rpc_sync, name, my_name)
                else:
                    thread = threading.Thread(target=answer, args=(listener, data))
                    thread.start()
                    said = refused(WorkerLostError, "", rpc.rpc_sync, name, my_name)
                    thread.join()
            assert re.match(rf"worker '{name}' \(id {number}\) is gone: .*{text}", said), f"{kind}: {said}"
            refused(WorkerLostError, re.escape(said), rpc.rpc_sync, name, my_name)
        assert rpc.rpc_sync(0, my_name) == "worker0"


def test_who_answers_in_a_workers_place_is_found_out_and_named(run_workers: RunWorkers) -> None:
    run_workers(call_impostors, 1)
