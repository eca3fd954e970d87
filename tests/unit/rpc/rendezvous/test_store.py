from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import FileStore, HashStore  # type: ignore[attr-defined]

from rpc.errors import RendezvousTimeoutError
from rpc.group.workers import Member, WorkerInfo
from rpc.rendezvous.arrivals import Arrival, ArrivalKind, Verdict
from rpc.rendezvous.init_method import open_store
from rpc.rendezvous.log import Log
from rpc.rendezvous.store import (
    Abandoned,
    SharedStore,
    StoreLost,
    StoreWait,
    run_with_deadline,
)
from tests.support.interrupting import interrupted_at_check
from tests.support.streams import until
from tests.unit.rpc.rendezvous.conftest import Connect

# Waiting


def test_work_that_is_stuck_is_left_behind() -> None:
    stuck = threading.Event()
    with pytest.raises(RendezvousTimeoutError, match=r"the store .* has not answered for 0\.1 s"):
        run_with_deadline(lambda _: stuck.wait(10), 0.1, "the store", grace=0.05)
    stuck.set()


def test_work_left_behind_ends_at_its_next_pause() -> None:
    ended, started = threading.Event(), threading.Event()

    def work(waiting: StoreWait) -> None:
        started.set()
        try:
            waiting.pause(30)
        except Abandoned:
            ended.set()

    def interrupt() -> None:
        started.wait(10)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run_with_deadline(work, 60, "x")
    assert ended.wait(10)


@pytest.mark.usefixtures("deferred")
def test_work_left_behind_ends_wherever_its_caller_is_interrupted() -> None:
    def work(waiting: StoreWait) -> None:
        while waiting.pause(0.001):
            pass

    before, number = set(threading.enumerate()), 0
    while interrupted_at_check(number := number + 1, lambda: run_with_deadline(work, 0.01, "the store")):
        pass
    assert number > 10
    until(lambda: before.issuperset(threading.enumerate()))


class Recorder(StoreWait):
    """Notes the pauses instead of making them."""

    def __init__(self) -> None:
        super().__init__(60)
        self.pauses: list[float] = []

    def pause(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        return True


# The store


def test_counters_and_values(connect: Connect) -> None:
    store = connect()
    assert store.counter("n") == 0
    assert store.add("n", 2) == 2
    assert store.counter("n") == 2
    assert store.get("key") is None
    assert store.swap("key", b"", b"\xff1") == b"\xff1"
    assert store.swap("key", b"", b"2") == b"\xff1"
    assert store.swap("key", b"\xff1", b"2") == b"2"
    assert store.get("key") == b"2"
    assert store.has("n", "key")
    assert not store.has("n", "other")


def empty(path: Path) -> None:
    os.truncate(path, 0)


def overwrite(path: Path) -> None:
    path.write_bytes(b"")
    FileStore(str(path), -1).set("another", "group's" * 1000)


@pytest.mark.parametrize("lose", [os.unlink, empty, overwrite])
def test_file_that_is_replaced_is_noticed_and_opened_again(
    tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    url = f"file://{tmp_path}/meet"
    store = open_store(url, 0, 1, timeout=5)
    store.set("key", b"value" * 1000)
    assert store.get("key") == b"value" * 1000
    lose(tmp_path / "meet")
    with pytest.raises(StoreLost):
        store.get("key")
    open_store(url, 0, 1, timeout=5).set("other", b"1")
    with pytest.raises(StoreLost):
        store.get("key")
    assert store.outlast(StoreWait(5), lambda _: store.get("other")) == b"1"


def test_store_that_is_lost_again_and_again_is_opened_after_longer_and_longer_pauses() -> None:
    recorder = Recorder()
    opened: list[HashStore] = []

    def work(_: StoreWait) -> str:
        if len(opened) < 20:
            raise StoreLost("no answer")
        return "done"

    def reopen(_: StoreWait) -> HashStore:
        opened.append(HashStore())
        return opened[-1]

    assert SharedStore(reopen, HashStore(), "the store", None).outlast(recorder, work) == "done"
    assert len(recorder.pauses) == 20
    assert recorder.pauses == sorted(recorder.pauses)
    assert recorder.pauses[-1] > 100 * recorder.pauses[0] > 0


def test_store_is_not_opened_again_when_nobody_waits_any_longer() -> None:
    nobody = StoreWait(60)
    nobody.abandon()

    def work(_: StoreWait) -> None:
        raise StoreLost("no answer")

    with pytest.raises(Abandoned):
        SharedStore(lambda _: HashStore(), HashStore(), "the store", None).outlast(nobody, work)


# The log

GONE = Verdict(ArrivalKind.GONE)


def arrival(name: str) -> Arrival:
    return Arrival(0, Member(WorkerInfo(name, -1), 7, "host", ()), 0, "process 1")


def names(log: Log) -> list[str]:
    return [entry.arrival.member.name for entry in log.read() if entry.arrival is not None]


def test_log_has_what_is_not_settled_in_order(connect: Connect) -> None:
    log = Log(connect())
    places = [log.append(arrival(name)) for name in "abcd"]
    log.decide(places[0], Verdict(ArrivalKind.MISMATCH, "why"))
    assert log.decide(places[1], Verdict(ArrivalKind.MEMBER, "5")) == Verdict(ArrivalKind.MEMBER, "5")
    other = Log(connect())
    assert names(other) == ["b", "c", "d"]
    member = other.entry(places[1]).member()
    assert member is not None
    assert (member.name, member.id) == ("b", 5)
    other.remove(places[1])
    other.decide(places[2], GONE)
    assert names(other) == ["d"]


def test_first_verdict_counts(memory: SharedStore) -> None:
    log = Log(memory)
    place = log.append(arrival("a"))
    assert log.verdict(place) is None
    assert log.decide(place, GONE) == log.decide(place, Verdict(ArrivalKind.COMPLETE, "1")) == GONE
    assert log.verdict(place) == GONE


def test_arrival_that_is_written_late_is_read_then(memory: SharedStore) -> None:
    place = memory.add("arrivals", 1)
    log = Log(memory)
    log.append(arrival("b"))
    assert [entry.arrival is None for entry in log.read()] == [True, False]
    memory.set(f"arrival/{place}", arrival("a").pack())
    assert names(log) == ["a", "b"]


def test_record_of_another_version_is_passed_over(memory: SharedStore) -> None:
    memory.set(f"arrival/{memory.add('arrivals', 1)}", b"\xc1 what is this?")
    log = Log(memory)
    log.append(arrival("b"))
    assert names(log) == ["b"]


def test_settled_beginning_is_not_read_again() -> None:
    asked: list[str] = []

    class Watched(HashStore):
        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            asked.append(key)
            return bytes(super().compare_set(key, expected, desired))

    store = open_store(Watched(), 0, None, timeout=5)
    log = Log(store)
    for name in "abc":
        log.decide(log.append(arrival(name)), GONE)
    place = log.append(arrival("d"))
    assert names(log) == ["d"]
    log.trim()
    asked.clear()
    assert names(Log(store)) == ["d"]
    assert {key for key in asked if key.startswith("arrival/")} == {
        f"arrival/{place}",
        f"arrival/{place}/verdict",
    }
