"""Threads of an executor that wait at a station get their tasks there, and hear when they are called."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from rpc.runtime.executor import Executor, Task
from tests.support.streams import SOON, until


class Place:
    """A station in memory. Of those who want the place one has it, and a call ends the wait of whoever has.

    Attributes:
        before_claim: what happens right before a thread claims the place, the first time.
    """

    def __init__(self) -> None:
        self.before_claim: list[Callable[[], object]] = []
        self._holder: int | None = None
        self._came: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self.waits = threading.Semaphore(0)

    def claim(self) -> bool:
        if self.before_claim:
            self.before_claim.pop()()
        if self._holder is None:
            self._holder = threading.get_ident()
        return self._holder == threading.get_ident()

    def next_task(self, timeout: float | None) -> Task | None:
        if self._holder != threading.get_ident():
            return None
        self.waits.release()
        try:
            return self._came.get(timeout=timeout or 2 * SOON)
        finally:
            self.leave()

    def leave(self) -> None:
        if self._holder == threading.get_ident():
            self._holder = None

    def release(self) -> None:
        self._came.put(None)

    def bring(self, task: Task) -> None:
        """A task comes here."""
        self._came.put(task)

    def hold(self) -> None:
        """Somebody else has the place, and hears the calls from now on."""
        self._holder = -1

    def hand_over(self) -> None:
        """Who has the place has heard the calls so far, and leaves."""
        while not self._came.empty():
            assert self._came.get() is None
        self._holder = None


@pytest.fixture
def executor() -> Iterator[Executor]:
    """With a single thread."""
    made = Executor(1, "executor")
    yield made
    assert made.stop()


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture
def done() -> threading.Event:
    return threading.Event()


def finish(done: threading.Event) -> Task:
    return (lambda _: done.set(), None)


def stand_by(executor: Executor, place: Place, *, at_once: bool) -> None:
    """The executor's thread goes to the place after its task."""
    executor.submit((lambda _: executor.stand_by(place, at_once=at_once), None))


@pytest.mark.parametrize("at_once", [True, False])
def test_a_task_that_comes_to_the_place_is_done(
    executor: Executor, place: Place, done: threading.Event, at_once: bool
) -> None:
    stand_by(executor, place, at_once=at_once)
    place.bring(finish(done))
    assert done.wait(SOON)
    until(lambda: executor.counts()["active_tasks"] == 0)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_thread_that_stands_by_is_called_where_there_is_no_other(
    executor: Executor, place: Place, done: threading.Event, at_once: bool
) -> None:
    stand_by(executor, place, at_once=at_once)
    assert place.waits.acquire(timeout=SOON)
    assert executor.submit(finish(done))
    assert done.wait(SOON)


def test_a_thread_that_goes_to_its_place_misses_no_call_that_another_has_heard(
    executor: Executor, place: Place, done: threading.Event
) -> None:
    def call_while_another_has_the_place() -> None:
        place.hold()
        calling = threading.Thread(target=executor.submit, args=(finish(done),))
        calling.start()
        calling.join(SOON)
        place.hand_over()

    place.before_claim.append(call_while_another_has_the_place)
    stand_by(executor, place, at_once=False)
    assert done.wait(SOON)


def test_a_thread_whose_place_was_lost_again_does_not_wait_there(
    executor: Executor, place: Place, done: threading.Event
) -> None:
    def stand_by_in_vain(_: object) -> None:
        executor.stand_by(place)
        place.hold()

    executor.submit((stand_by_in_vain, None))
    assert executor.submit(finish(done))
    assert done.wait(SOON)
    assert not place.waits.acquire(blocking=False)


def test_a_thread_without_a_place_is_idle(executor: Executor, place: Place, done: threading.Event) -> None:
    place.hold()
    stand_by(executor, place, at_once=False)
    until(lambda: executor.counts()["idle_threads"] == 1)
    assert executor.submit(finish(done))
    assert done.wait(SOON)


@pytest.mark.parametrize("at_once", [True, False])
def test_stop_ends_a_thread_that_stands_by(executor: Executor, place: Place, at_once: bool) -> None:
    stand_by(executor, place, at_once=at_once)
    assert place.waits.acquire(timeout=SOON)
    assert executor.stop(SOON)
