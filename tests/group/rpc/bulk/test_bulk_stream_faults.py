"""What becomes of each kind of large message if a fault comes in the middle: arguments, answers, and messages
into posted buffers. Worker 0 is always the one that waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import rpc
from benchmarks.striping import limit_connections
from rpc.errors import RpcError, WorkerLostError
from rpc.runtime.current import current_agent
from tests.support import backend
from tests.support.orders import ask, dismiss, start_followers
from tests.support.streams import SOON, until
from tests.support.transfers import ACROSS, MIB, total
from tests.support.workers import RunWorkers, WorkerProcess

pytestmark = backend.over_sockets

COUNT = 4 * MIB
"""Elements of 4 bytes: 16 MiB."""
SLOW_BYTES = MIB // 2
"""What a connection is let through in a second: a message takes many."""
FAST_BYTES = 1000 * MIB
TAG = 5

awaited: list[Any] = []


def agent() -> Any:
    return current_agent()


def peer(name: str) -> Any:
    return agent().group.peers.find(name)


def has_streams(name: str) -> bool:
    connection = peer(name).connection
    return connection is not None and connection.has_streams


def open_streams() -> None:
    def opened() -> bool:
        rpc.rpc_sync("worker1", total, args=(torch.ones(MIB),))
        return has_streams("worker1") and bool(rpc.rpc_sync("worker1", has_streams, args=("worker0",)))

    until(opened)


def limit(bytes_per_second: int) -> None:
    assert limit_connections(bytes_per_second)


def answer() -> torch.Tensor:
    return torch.arange(float(COUNT))


def send_to_post() -> None:
    agent().messages.bulk.send(peer("worker0"), TAG, answer().numpy())


class Argument:
    """The argument of a call. ``outcome`` is whether what arrived is right, or the error."""

    receiver, sender = 1, 0

    future: Any

    def __init__(self) -> None:
        self.future = rpc.rpc_async("worker1", total, args=(torch.ones(COUNT),), timeout=0)

    def outcome(self) -> bool:
        return bool(self.future.wait() == COUNT)

    def cancel(self) -> bool:
        return bool(self.future.cancel())


class Answer(Argument):
    """The answer of a call."""

    receiver, sender = 0, 1

    def __init__(self) -> None:
        self.future = rpc.rpc_async("worker1", answer, timeout=0)

    def outcome(self) -> bool:
        return torch.equal(self.future.wait(), answer())


class Posted:
    """A message into a buffer that was posted for it."""

    receiver, sender = 0, 1

    def __init__(self) -> None:
        self.into = torch.zeros(COUNT)
        self.transfer = agent().messages.bulk.post(peer("worker1"), TAG, self.into.numpy())
        rpc.rpc_sync("worker1", send_to_post)

    def outcome(self) -> bool:
        self.transfer.wait(SOON)
        return torch.equal(self.into, answer())

    def cancel(self) -> bool:
        assert self.transfer.cancel()
        self.into.fill_(-1)
        rpc.rpc_sync("worker1", limit, args=(FAST_BYTES,))
        following = torch.zeros(COUNT)
        agent().messages.bulk.post(peer("worker1"), TAG, following.numpy()).wait(SOON)
        assert torch.equal(following, answer())
        return bool((self.into == -1).all())


class Merged(Posted):
    """A message that is merged into a buffer while it arrives."""

    def __init__(self) -> None:
        self.into = torch.ones(COUNT)
        memory = self.into.view(torch.uint8).numpy().data
        self.transfer = agent().messages.bulk.post(peer("worker1"), TAG, memory, merge=self.add)
        rpc.rpc_sync("worker1", send_to_post)

    def add(self, begin: int, data: memoryview) -> None:
        part = torch.frombuffer(data, dtype=torch.float32)
        self.into[begin // 4 : begin // 4 + len(part)] += part

    def outcome(self) -> bool:
        self.transfer.wait(SOON)
        return torch.equal(self.into, answer() + 1)


def begin(kind: Callable[[], Any]) -> None:
    awaited.append(kind())


def wait_until_it_comes(sender: str) -> None:
    until(lambda: peer(sender).connection is not None and peer(sender).connection.arriving.open_messages)


def outcome() -> Any:
    try:
        return awaited[-1].outcome()
    except RpcError as error:
        return type(error)


def cancel() -> bool:
    return bool(awaited[-1].cancel())


def nothing_is_open(name: str) -> bool:
    until(lambda: not peer(name).connection.arriving.open_messages)
    return True


Message = type[Argument] | type[Posted]
in_each_kind = pytest.mark.parametrize(
    "kind",
    [Argument, Answer, Posted, Merged],
    ids=["an argument", "an answer", "a posted message", "a merged message"],
)


def in_the_middle(run_workers: RunWorkers, kind: Message) -> Any:
    """Two workers, and a message of that kind that has begun to arrive."""
    workers = start_followers(run_workers, 2, **ACROSS, tcp_stripes=2)
    ask(workers[0], open_streams)
    for worker in workers:
        ask(worker, limit, SLOW_BYTES)
    ask(workers[0], begin, kind)
    ask(workers[kind.receiver], wait_until_it_comes, f"worker{kind.sender}")
    return workers


def goes_on(workers: Any, kind: Message) -> None:
    """The next message arrives, and nothing is left of the last."""
    for worker in workers:
        ask(worker, limit, FAST_BYTES)
    ask(workers[0], begin, kind)
    assert ask(workers[0], outcome) is True
    for worker, other in ((workers[0], "worker1"), (workers[1], "worker0")):
        assert ask(worker, nothing_is_open, other)
    dismiss(workers)


@in_each_kind
def test_a_worker_that_is_killed_in_the_middle_is_named(run_workers: RunWorkers, kind: Message) -> None:
    workers = in_the_middle(run_workers, kind)
    workers[1].kill()
    assert ask(workers[0], outcome) is WorkerLostError
    dismiss(workers)


@in_each_kind
def test_what_is_cancelled_in_the_middle_leaves_nothing(run_workers: RunWorkers, kind: Message) -> None:
    workers: list[WorkerProcess] = in_the_middle(run_workers, kind)
    if issubclass(kind, Posted):
        ask(workers[1], send_to_post)  # for the next post, or the one after it
    assert ask(workers[0], cancel)
    goes_on(workers, kind)
