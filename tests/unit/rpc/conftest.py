"""What tests of the agent's parts share: loops, sockets, workers reduced to their connections, Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rpc.runtime import loop as loop_module
from rpc.runtime.executor import Executor
from rpc.runtime.interrupts import defer_interrupts, restore_interrupts
from rpc.runtime.loop import LoopThread
from rpc.transport.authentication import TokenAuthenticator
from rpc.transport.base import Transport
from tests.support.answering import Owner
from tests.support.nodes import MakeNode, Node
from tests.support.stranger import Stranger
from tests.support.streams import Sockets, connected_sockets


@pytest.fixture(params=["uvloop", "asyncio"])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopThread]:
    """A running loop of either kind."""
    if request.param == "asyncio":
        monkeypatch.setattr(loop_module, "new_loop", asyncio.new_event_loop)
    thread = LoopThread("test-loop", "not on this thread")
    yield thread
    assert thread.stop()


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    """Makes connected sockets, which are closed after the test."""
    made: list[socket.socket] = []

    def make(family: str = "unix", buffer_bytes: int = 0) -> tuple[socket.socket, socket.socket]:
        pair = connected_sockets(family, buffer_bytes)
        made.extend(pair)
        return pair

    yield make
    for each in made:
        each.close()


@pytest.fixture
def make_node() -> Iterator[MakeNode]:
    """Makes workers, by turns on either of two loops, which leave when the test is over."""
    threads = [LoopThread(f"test-loop{index}", "not on this thread") for index in range(2)]
    made: list[Node] = []

    def make(
        name: str,
        incarnation: int | None = None,
        host: str = "host",
        reach: dict[str, Transport] | None = None,
        authenticator: TokenAuthenticator | None = None,
    ) -> Node:
        index = len(made)
        thread, incarnation = threads[index % 2], incarnation or 100 + index
        made.append(
            Node.on(thread, name, index, incarnation, host=host, reach=reach, authenticator=authenticator)
        )
        return made[-1]

    yield make
    for node in made:
        node.leave()
    assert all(thread.stop() for thread in threads)


@pytest.fixture
def stranger() -> Iterator[Callable[[Node], Stranger]]:
    """Makes strangers, who hang up when the test is over."""
    made: list[Stranger] = []

    def make_one(node: Node) -> Stranger:
        made.append(Stranger(node))
        return made[-1]

    yield make_one
    for each in made:
        each.close()


@pytest.fixture
def owner() -> Iterator[Owner]:
    """What answers calls."""
    executor = Executor(4, "futures")
    yield Owner(executor)
    assert executor.stop()


@pytest.fixture
def other_thread() -> Iterator[ThreadPoolExecutor]:
    """A few threads other than the main one."""
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def deferred() -> Iterator[None]:
    """Ctrl-C is deferred as while an agent runs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    defer_interrupts()
    yield
    restore_interrupts()
    signal.signal(signal.SIGINT, before)
