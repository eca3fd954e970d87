"""What launchers tell each other through their store: several links of one process, without workers."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from farcall.launch.failures import Failure
from farcall.launch.job import Job
from farcall.launch.link import Link, Lost, Plan
from farcall.launch.records import Records, Unreadable
from farcall.launch.rounds import Kind, Order, Report, State
from rpc.rendezvous.store import SharedStore
from tests.support.ports import reserved_port

__all__ = ["reserved_port"]

KILLED = Failure(0, 10, -9, 2.0, host="a")
SECONDS = 30.0


class Launcher:
    """A link, and the news that it has brought."""

    def __init__(self, job: Job) -> None:
        self.news: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.link = Link(job, self.news)

    def next(self) -> Any:
        return self.news.get(timeout=SECONDS)

    def order(self) -> Order:
        news = self.next()
        assert isinstance(news, Order), news
        return news

    def leave(self) -> None:
        self.link.report(Report(State.LEFT, leaves="was ended", status=1))


Start = Callable[..., Launcher]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts launchers of a job of two machines, which end with the test."""
    monkeypatch.setenv("FARCALL_TOKEN", "the token of this test")
    started: list[Launcher] = []

    def begin(port: int, node_rank: int, **changed: Any) -> Launcher:
        job: dict[str, Any] = {
            "nodes": 2,
            "node_rank": node_rank,
            "rdzv": f"127.0.0.1:{port}",
            "timeout": 20.0,
        } | changed
        started.append(Launcher(Job(2, **job)))
        return started[-1]

    yield begin
    for launcher in started:
        launcher.leave()
    for launcher in started:
        assert launcher.link.close(SECONDS)


def test_a_failure_of_one_stops_all_and_starts_them_again(start: Start, reserved_port: int) -> None:
    both = [start(reserved_port, rank, restarts=1) for rank in (0, 1)]
    plans = [launcher.next() for launcher in both]
    assert all(isinstance(plan, Plan) for plan in plans)
    assert [(plan.me.node_rank, plan.me.first_rank, plan.world_size) for plan in plans] == [
        (0, 0, 4),
        (1, 2, 4),
    ]
    assert [launcher.order() for launcher in both] == [Order(Kind.RUN)] * 2
    both[0].link.report(Report(State.DONE))
    both[1].link.report(Report(State.FAILED, 0, (KILLED,)))
    assert [launcher.order() for launcher in both] == [Order(Kind.STOP, 0, KILLED)] * 2
    both[0].link.report(Report(State.STOPPED))
    both[1].link.report(Report(State.STOPPED, 0, (KILLED,)))
    assert [launcher.order() for launcher in both] == [Order(Kind.RUN, 1, KILLED)] * 2
    for launcher in both:
        launcher.link.report(Report(State.DONE, 1))
    assert [launcher.order() for launcher in both] == [Order(Kind.END)] * 2


def test_a_launcher_that_leaves_ends_the_job(start: Start, reserved_port: int) -> None:
    both = [start(reserved_port, rank) for rank in (0, 1)]
    for launcher in both:
        launcher.next()
        assert launcher.order() == Order(Kind.RUN)
    both[1].leave()
    order = both[0].order()
    assert (order.kind, order.status) == (Kind.END, 1)
    assert "(node 1, process" in order.reason


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"name": "other"}, "of the job 'other'"),
        ({"nodes": 3}, "was started with --nnodes 2"),
    ],
)
def test_a_launcher_of_another_job_is_refused_and_the_job_is_told(
    start: Start, reserved_port: int, changed: dict[str, Any], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    first, other = start(reserved_port, 0), start(reserved_port, 1, **changed)
    refused = other.next()
    assert isinstance(refused, Lost)
    assert said in str(refused)
    second = start(reserved_port, 1)
    for launcher in (first, second):
        assert isinstance(launcher.next(), Plan)
        assert launcher.order() == Order(Kind.RUN)
    assert said in capfd.readouterr().err


def test_another_token_is_refused(start: Start, reserved_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    start(reserved_port, 0)
    monkeypatch.setenv("FARCALL_TOKEN", "a token of another job")
    other = start(reserved_port, 1)
    assert "has another token than the launcher on" in str(other.next())


def test_one_launcher_too_many_is_refused_and_the_job_that_runs_is_told(
    start: Start, reserved_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr("farcall.launch.link.say", said.put)
    for launcher in [start(reserved_port, rank) for rank in (0, 1)]:
        launcher.next()
        launcher.order()
    assert "is one too many" in str(start(reserved_port, 1).next())
    while "was refused: the job has its 2 launchers" not in said.get(timeout=SECONDS):
        pass  # it has waited for the job before


def test_machines_that_do_not_come_are_not_waited_for_longer_than_asked(
    start: Start, reserved_port: int
) -> None:
    order = start(reserved_port, 0, timeout=2.0).order()
    assert order.kind is Kind.END
    assert f"not all 2 launchers have come to 127.0.0.1:{reserved_port} within 2 s" in order.reason


def test_a_coordinator_that_does_not_come_is_not_waited_for_longer_than_asked(
    start: Start, reserved_port: int
) -> None:
    place = f"127.0.0.1:{reserved_port}"
    lost = start(reserved_port, 1, timeout=0.5).next()
    assert isinstance(lost, Lost)
    assert f"the rendezvous at {place} has not been reachable for 0.5 s: " in str(lost)


class Stranger:
    """A process that reaches the store of a job, and has no token."""

    def __init__(self, port: int) -> None:
        self._store = TCPStore(
            "127.0.0.1", port, None, False, timeout=timedelta(seconds=SECONDS), wait_for_workers=False
        )

    def records(self) -> dict[str, bytes]:
        return {key: self._store.get(key) for key in self._store.list_keys() if "launch/" in key}

    def write(self, records: dict[str, bytes]) -> None:
        for key, value in records.items():
            self._store.set(key, value)  # type: ignore[arg-type]

    def delete(self, records: dict[str, bytes]) -> None:
        for key in records:
            self._store.delete_key(key)


def _junk(junk: bytes) -> Callable[[Stranger, dict[str, bytes]], None]:
    return lambda stranger, records: stranger.write(dict.fromkeys(records, junk))


def _truncate(stranger: Stranger, records: dict[str, bytes]) -> None:
    stranger.write({key: value[:-1] for key, value in records.items()})


def _exchange(stranger: Stranger, records: dict[str, bytes]) -> None:
    stranger.write(dict(zip(records, reversed(records.values()), strict=True)))


ATTACKS = {
    "junk": _junk(b"x"),
    "nothing": _junk(b""),
    "a number": _junk(b"9223372036854775807"),
    "unsealed": _junk(b'{"beat": 99, "said": {"kind": "end", "status": 3}}'),
    "nested": _junk(b"[" * 100_000),
    "large": _junk(b"x" * (1 << 20)),
    "truncated": _truncate,
    "under other keys": _exchange,
    "deleted": Stranger.delete,
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_a_stranger_in_the_store_ends_no_job(
    start: Start, reserved_port: int, attack: Callable[[Stranger, dict[str, bytes]], None]
) -> None:
    first = start(reserved_port, 0)
    stranger = _stranger(reserved_port)
    attack(stranger, stranger.records())  # while launchers are waited for
    both = [first, start(reserved_port, 1)]
    assert [type(each.next()) for each in both] == [Plan] * 2
    assert [each.order() for each in both] == [Order(Kind.RUN)] * 2
    attack(stranger, stranger.records())
    for each in both:
        each.link.report(Report(State.DONE))
    assert [each.order() for each in both] == [Order(Kind.END)] * 2


def test_records_written_again_by_a_stranger_are_not_obeyed(
    start: Start, reserved_port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    both = [start(reserved_port, rank, restarts=1) for rank in (0, 1)]
    for each in both:
        each.next()
        assert each.order() == Order(Kind.RUN)
    stranger = _stranger(reserved_port)
    old = stranger.records()
    both[0].link.report(Report(State.STOPPED))
    both[1].link.report(Report(State.FAILED, 0, (KILLED,)))
    assert [each.order() for each in both] == [Order(Kind.STOP, 0, KILLED)] * 2
    stranger.write(old)
    both[1].link.report(Report(State.STOPPED, 0, (KILLED,)))
    assert [each.order() for each in both] == [Order(Kind.RUN, 1, KILLED)] * 2
    stranger.write(old)
    for each in both:
        each.link.report(Report(State.DONE, 1))
    assert [each.order() for each in both] == [Order(Kind.END)] * 2
    assert capfd.readouterr().err.count("another process writes to the store") <= 2  # once for each launcher


def test_launchers_that_meet_on_loopback_need_no_token(
    start: Start, reserved_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FARCALL_TOKEN")
    both = [start(reserved_port, rank) for rank in (0, 1)]
    for each in both:
        each.next()
        assert each.order() == Order(Kind.RUN)
    stranger = _stranger(reserved_port)
    order = next(key for key in stranger.records() if key.endswith("/order"))
    end = json.dumps({"beat": 99, "said": Order(Kind.END, reason="a stranger's", status=3).to_json()})
    stranger.write({order: end.encode()})
    for each in both:
        each.link.report(Report(State.DONE))
    assert [each.order() for each in both] == [Order(Kind.END)] * 2


def test_records_of_an_earlier_run_of_the_job_are_not_obeyed(start: Start, reserved_port: int) -> None:
    both = [start(reserved_port, rank) for rank in (0, 1)]
    for each in both:
        each.next()
        assert each.order() == Order(Kind.RUN)
    old = _stranger(reserved_port).records()
    for each in both:
        each.leave()
    for each in both:
        assert each.link.close(SECONDS)
    first = start(reserved_port, 0)
    _stranger(reserved_port).write(old)
    for each in (first, start(reserved_port, 1)):  # the coordinator overwrites them
        assert isinstance(each.next(), Plan)
        assert each.order() == Order(Kind.RUN)


def test_records_that_no_launcher_writes_are_unreadable() -> None:
    for packed in (
        b"[" * 100_000,
        b'{"beat": Infinity, "said": {}}',
        b'{"beat": "1", "said": 3}',
        b"\xff",
        b"3",
    ):
        store = SharedStore(None, HashStore(), "a store", None)
        store.set("order", packed)
        with pytest.raises(Unreadable):
            Records(store, "order", Order.from_json, lambda *_: None).look()


def _stranger(port: int) -> Stranger:
    """A stranger, once the store is served and a launcher has written to it."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(RuntimeError, OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            stranger = Stranger(port)
            if stranger.records():
                return stranger
        time.sleep(0.01)
    raise AssertionError("no launcher serves the store")
