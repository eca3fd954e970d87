"""Workers that only listen, and stores of every kind for them to meet in."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from rpc.group.workers import Member, WorkerInfo
from rpc.rendezvous.address import host_identity
from rpc.rendezvous.arrivals import Group
from rpc.rendezvous.init_method import open_store
from rpc.rendezvous.store import SharedStore

__all__ = [
    "Acquaintances",
    "Connect",
    "Listening",
    "StartWorker",
    "Workers",
    "errors",
    "in_thread",
    "results",
]


class Listening:
    """A worker as far as a rendezvous is concerned: it listens until it dies."""

    def __init__(self, name: str, rank: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address = f"farcall-test-{secrets.token_hex(8)}"
        self._socket.bind(b"\0" + address.encode())
        self._socket.listen(64)
        self.member = Member(
            WorkerInfo(name, rank), secrets.randbits(63), host_identity(), (f"unix:@{address}",), "main"
        )

    def die(self) -> None:
        self._socket.close()


class Acquaintances:
    """``Neighbours`` of which a test says who is met, and who is lost."""

    def __init__(self, group: Group) -> None:
        self.present = {member.incarnation: member for member in group.members}
        self.met = {group.me.incarnation}
        self.gone: dict[int, str] = {}
        self.out: list[str] = []

    def roster(self) -> list[Member]:
        return [self.present[each] for each in sorted(self.present)]

    def has_met(self, incarnation: int) -> bool:
        return incarnation in self.met

    def gone_reason(self, incarnation: int) -> str | None:
        return self.gone.get(incarnation)

    def meet(self, members: Sequence[Member]) -> None:
        self.met |= {member.incarnation for member in members}
        self.present |= {member.incarnation: member for member in members}

    def put_out(self, reason: str) -> None:
        self.out.append(reason)

    def lose(self, incarnation: int, reason: str = "no answer") -> None:
        self.present.pop(incarnation, None)
        self.gone[incarnation] = reason


StartWorker = Callable[[str, int], Listening]
Workers = Callable[[int], list[Listening]]
Connect = Callable[[], SharedStore]


@pytest.fixture
def start_worker() -> Iterator[StartWorker]:
    """Makes workers that listen; all are gone after the test."""
    with contextlib.ExitStack() as stack:

        def start(name: str, rank: int) -> Listening:
            worker = Listening(name, rank)
            stack.callback(worker.die)
            return worker

        yield start


@pytest.fixture
def workers(start_worker: StartWorker) -> Workers:
    """Makes a group's workers: ``worker0`` to ``workerN``."""
    return lambda count: [start_worker(f"worker{rank}", rank) for rank in range(count)]


@pytest.fixture(params=["hash", "file"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    """Connects to one store, as each worker of a group does, in turn for each kind of store.

    Not for TCP stores: each of their connections asks the name server for its own name, and some name
    servers take seconds to answer. ``test_init_method`` has those.
    """
    if request.param == "hash":
        shared = HashStore()
        return lambda: open_store(shared, 0, None, timeout=10)
    return lambda: open_store(f"file://{tmp_path}/store", 0, None, timeout=10)


@pytest.fixture
def memory() -> SharedStore:
    """A store in memory."""
    return open_store(HashStore(), 0, None, timeout=10)


@pytest.fixture
def full() -> SharedStore:
    """A store that can be opened, and fails whenever it is asked."""

    class Full(HashStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("No space left on device\nat frame 1")

        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("No space left on device\nat frame 1")

    return SharedStore(lambda _: Full(), Full(), "the full store", None)


def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Start a call in a thread of its own."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="test").start()
    return future


def results(futures: Sequence[Future[Any]]) -> list[Any]:
    return [future.result(20) for future in futures]


def errors(futures: Sequence[Future[Any]]) -> list[BaseException | None]:
    return [future.exception(20) for future in futures]
