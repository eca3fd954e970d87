"""Strangers who connect to a worker's process: the log says what they said, and the worker lives on."""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
from typing import Any

import pytest

import rpc
from rpc.runtime.current import current_agent
from rpc.wire.frames import PREAMBLE, Kind
from tests.support.hostile import Hostile, Target, frame, target
from tests.support.serving import first_of, in_group, serve
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker, WorkerProcess


def my_name(*_: Any) -> str:
    return rpc.get_worker_info().name


def log_lines(worker: WorkerProcess) -> list[str]:
    return worker.log.read_text().splitlines()


# ---- before the handshake

STRANGERS: dict[str, tuple[bytes, str]] = {
    "an HTTP request": (
        b"GET / HTTP/1.1\r\nHost: worker1\r\n\r\n",
        r"does not speak farcall's protocol \(it began with b'GET / HT'\)",
    ),
    "half a preamble": (PREAMBLE[:4], "no handshake within 0.3 s"),
    "a call": (
        PREAMBLE + frame(Kind.CALL, {}, [b"cos\nsystem\n(S'touch pwned'\ntR."]),
        "expected hello, .*kind 5",
    ),
    "random bytes": (
        PREAMBLE + random.Random(1).randbytes(5000),
        "a frame of [0-9]+ bytes is over",
    ),
}
"""What is said, and what the log says of it. ``unit/rpc/group/test_greeting.py`` has many more."""


def meet_strangers(_: Worker, scheme: str) -> str:
    at: Target = rpc.rpc_sync("worker1", target)
    rpc.rpc_sync("worker1", be_impatient)
    with Hostile(at, scheme):
        pass  # only wants to know whether somebody listens, which is not worth a line
    for name, (data, _text) in STRANGERS.items():
        with Hostile(at, scheme) as peer:
            peer.say(data)
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
