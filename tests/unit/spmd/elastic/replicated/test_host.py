"""What workers do about their copies by themselves, without calls: in one process, in memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rpc.agent.futures import Future
from spmd.elastic.errors import ElasticError
from spmd.elastic.replicated.host import RAISED, Host
from spmd.elastic.replicated.hosts import Status
from spmd.elastic.replicated.machine import OBJECT, WHOLE, Method, ObjectMachine
from spmd.elastic.replicated.order import Call, Done, Install, OutdatedCallError, State, View

TIME_LIMIT = 30.0


class Kept:
    """An object that cannot be copied while it keeps a lock."""

    made: ClassVar[int] = 0
    copied: ClassVar[Callable[[], object]]

    def __init__(self) -> None:
        Kept.made += 1
        self.value: Any = None

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)
        Kept.copied()

    def keep(self, make: Callable[[], Any]) -> None:
        self.value = make()


class Group:
    """Workers that call each other directly.

    Attributes:
        dead: workers that are gone for certain.
        surveys: released each time a worker has asked who can keep a copy; ``before_survey`` is called first.
        watched: workers whose processes a host watches.
    """

    def __init__(self) -> None:
        self.hosts: dict[int, Host] = {}
        self.dead: set[int] = set()
        self.surveys = threading.Semaphore(0)
        self.before_survey: Callable[[], object] = lambda: None
        self.watched: set[int] = set()
        self.closed = threading.Event()

    def add(self, me: int) -> Host:
        """Add a worker that stands by."""
        gone: set[int] = set()
        agent = SimpleNamespace(info=SimpleNamespace(name=f"worker{me}", id=me), call_async=self._call)
        found: Any = SimpleNamespace(me=me, agent=agent, gone=gone, lost=self.dead, by_name={})
        found.closed, found.changed = self.closed, threading.Condition()
        found.losses = SimpleNamespace(peer=self._peer, watch_processes=self.watched.update)
        found.learn = lambda members: gone.update(self.dead)
        found.is_lost = self.dead.__contains__
        found.survey = self._survey
        found.is_complete = lambda answered: True
        found.check = lambda: None
        self.hosts[me] = Host(found, "kept", "a Kept in 2 copies", Kept, 2)
        return self.hosts[me]

    def kill(self, worker: int) -> None:
        """All others learn of it."""
        self.dead.add(worker)
        for host in self.hosts.values():
            host.woken.set()

    def close(self) -> None:
        self.closed.set()
        for host in self.hosts.values():
            host.woken.set()

    def _peer(self, worker: int) -> Any:
        member = SimpleNamespace(host="here", info=SimpleNamespace(id=worker))
        return SimpleNamespace(name=f"worker{worker}", member=member, lost=worker in self.dead or None)

    def _survey(self, name: str, description: str, *, offer: bool = False) -> dict[int, Status]:
        self.before_survey()
        self.surveys.release()
        return {each: host.status() for each, host in self.hosts.items() if each not in self.dead}

    def _call(self, to: Any, function: Any, args: tuple[Any, ...], *others: Any) -> Future[Any]:
        _, identity, sender, serial, _, message = args
        future: Future[Any] = Future()
        future.set_result(self.hosts[to.id].receive(identity, sender, serial, message))
        return future


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.setattr(Kept, "made", 0)
    monkeypatch.setattr(Kept, "copied", lambda: None, raising=False)
    found = Group()
    yield found
    found.close()


def names(host: Host) -> Any:
    return host.call(Call(9, 1, 1, Method(WHOLE, "workers", (), {})), 0)[1]


def test_dead_backup_of_an_idle_object_is_replaced(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = group.add(1), group.add(2)
    first.enter(monotonic() + TIME_LIMIT)
    copied = threading.Event()
    monkeypatch.setattr(Kept, "copied", copied.set)
    group.add(3)
    group.kill(2)
    assert copied.wait(TIME_LIMIT), "nobody has got a copy"
    assert names(first) == ["worker1", "worker3"]


def test_newcomer_whose_primary_dies_while_it_gets_the_state_takes_over(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = ObjectMachine(Kept)
    machine.make()
    newcomer = group.add(2)
    monkeypatch.setattr(Kept, "copied", lambda: group.dead.add(1))  # it is known before there is a view
    state = State((5, 1), {}, {}, frozenset(), machine.snapshot())
    assert newcomer.receive(77, 1, 1, Install(View(3, (1, 2)), state)) == Done((5, 1))
    assert group.surveys.acquire(timeout=TIME_LIMIT), "it has not taken over, and looks for no second copy"
    assert names(newcomer) == ["worker2"]


def test_newcomer_watches_the_others_while_it_loads_the_state(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = ObjectMachine(Kept)
    machine.make()
    newcomer = group.add(2)
    seen: list[set[int]] = []
    monkeypatch.setattr(Kept, "copied", lambda: seen.append(set(group.watched)))
    state = State((5, 1), {}, {}, frozenset(), machine.snapshot())
    newcomer.receive(77, 1, 1, Install(View(3, (1, 2)), state))
    assert seen == [{1, 2}]


def test_worker_that_could_not_load_a_copy_still_finds_the_object(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = group.add(1), group.add(2)
    identity = first.enter(monotonic() + TIME_LIMIT)
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise ValueError("cannot be loaded")

    monkeypatch.setattr(Kept, "copied", fail)
    standby = group.add(3)
    group.kill(2)
    assert failed.wait(TIME_LIMIT), "it was not asked"
    assert names(first) == ["worker1"]  # after the attempt to load the copy
    assert standby.enter(monotonic() + TIME_LIMIT) == identity


def test_founder_that_has_found_no_others_in_time_leaves_the_name_to_others(group: Group) -> None:
    first = group.add(1)
    with pytest.raises(ElasticError, match="only 1 of the 1 workers"):
        first.enter(monotonic() + 0.2)
    assert first.hosts.by_name == {}
    assert first.status().role == ""


def test_object_that_cannot_be_copied_is_warned_of_once(
    group: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = group.add(1), group.add(2)
    first.enter(monotonic() + TIME_LIMIT)
    first.call(Call(9, 1, 1, Method(OBJECT, "keep", (threading.Lock,), {})), 0)
    copied = threading.Event()
    monkeypatch.setattr(Kept, "copied", copied.set)
    group.add(3)
    while group.surveys.acquire(blocking=False):
        pass
    with caplog.at_level(logging.WARNING, "spmd.elastic.replicated.host"):
        group.kill(2)
        for _ in range(4):  # the warning comes after a survey, and before the next one
            assert group.surveys.acquire(timeout=TIME_LIMIT)
            first.woken.set()
    assert sum("cannot be copied" in each.message for each in caplog.records) == 1
    assert not copied.is_set()
    first.call(Call(9, 2, 2, Method(OBJECT, "keep", (list,), {})), 0)
    first.woken.set()
    assert copied.wait(TIME_LIMIT), "nobody has got a copy"


def test_worker_that_has_not_found_the_object_in_time_does_not_stand_by(group: Group) -> None:
    first = group.add(1)
    first.hosts.is_complete = lambda answered: False  # type: ignore[method-assign]
    with pytest.raises(ElasticError, match="only 1 of the 1 workers"):
        first.enter(monotonic())
    assert first.hosts.by_name == {}


def test_worker_that_gives_up_does_not_wait_for_its_other_thread(group: Group) -> None:
    first = group.add(1)
    first.hosts.is_complete = lambda answered: False  # type: ignore[method-assign]
    errors: list[Exception] = []

    def enter() -> None:
        try:
            first.enter(monotonic())
        except ElasticError as error:
            errors.append(error)

    entering = threading.Thread(target=enter)
    with first.lock:  # as while it brings its backups up to date
        entering.start()
        entering.join(60)
        assert not entering.is_alive()
    assert len(errors) == 1
    assert first.hosts.by_name == {"kept": first}


def test_acknowledgement_that_comes_before_a_call_that_is_not_run_is_not_lost(group: Group) -> None:
    def keep(session: int, number: int) -> Call:
        return Call(session, number, number, Method(OBJECT, "keep", (list,), {}))

    first, second = group.add(1), group.add(2)
    first.enter(monotonic() + TIME_LIMIT)
    for made in (keep(9, 1), keep(8, 2)):
        first.call(made, 0)
    first.acknowledge(9, 2)
    assert first.call(keep(8, 1), 0)[0] == RAISED, "its caller has given it up"
    for host in (first, second):
        assert host.copy.known(keep(9, 1)) is not None
    first.call(keep(8, 3), 0)
    for host in (first, second):
        with pytest.raises(OutdatedCallError):
            host.copy.known(keep(9, 1))


def test_threads_of_a_worker_found_an_object_once(group: Group) -> None:
    first, _ = group.add(1), group.add(2)
    both = threading.Barrier(2)
    local = threading.local()

    def meet_once() -> None:
        if threading.current_thread().name == "founds" and not hasattr(local, "met"):
            local.met = both.wait(TIME_LIMIT)

    group.before_survey = meet_once
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(first.enter(monotonic() + TIME_LIMIT)), name="founds")
        for _ in range(2)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(TIME_LIMIT)
    assert (Kept.made, len(found), len(set(found))) == (1, 2, 1)
