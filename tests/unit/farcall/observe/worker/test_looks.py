"""What a look at this process finds, and what it leaves behind."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from farcall.observe.worker.frames import copies_kept
from farcall.observe.worker.looks import LEAST_WAIT_SECONDS, Looker


class Value:
    """What a thread holds, and deletes. Its destructor lets that thread leave the frame, and another one read
    frames.
    """

    def __init__(self, leave: threading.Event, read: list[bool]) -> None:
        self.leave, self.read = leave, read

    def __del__(self) -> None:
        self.leave.set()
        reader = threading.Thread(target=Looker().moved, args=(0.0,), daemon=True)
        reader.start()
        reader.join(10)
        self.read.append(not reader.is_alive())


class Waiter:
    """A thread that has a value while it waits for ``first``, and has deleted it once ``deleted`` is set."""

    def __init__(self) -> None:
        self.first, self.second, self.deleted = threading.Event(), threading.Event(), threading.Event()
        self.ready = threading.Event()
        self.could_read: list[bool] = []
        self.value: weakref.ref[Value]
        self.thread = threading.Thread(target=self._run, name="waiter")

    def _run(self) -> None:
        first, value = self.first, Value(self.second, self.could_read)
        self.value = weakref.ref(value)
        self.ready.set()
        first.wait()
        del value
        self.deleted.set()
        self.second.wait()


@pytest.fixture
def waiter() -> Iterator[Waiter]:
    made = Waiter()
    made.thread.start()
    assert made.ready.wait(20)
    with copies_kept():
        yield made
    made.first.set()
    made.second.set()
    made.thread.join()


def look(looker: Looker, now: float) -> dict[str, Any]:
    looker.moved(now)
    [found] = [each for each in looker.look((), now)["threads"] if each["name"] == "waiter"]
    return dict(found)


def until_waiting(looker: Looker, now: float) -> None:
    """Looks until the thread has the same position twice: it waits."""
    while look(looker, now).get("doing") != "waits for an Event" or looker.moved(now):
        pass


def test_what_a_thread_waits_for_is_named_once_it_has_waited_for_a_while(waiter: Waiter) -> None:
    looker = Looker()
    until_waiting(looker, 5.0)
    assert "on" not in look(looker, 5.0 + LEAST_WAIT_SECONDS / 2)
    assert look(looker, 5.0 + LEAST_WAIT_SECONDS)["on"] == "first"


def test_a_look_at_a_short_wait_holds_nothing_that_the_thread_deletes(waiter: Waiter) -> None:
    until_waiting(Looker(), 5.0)
    waiter.first.set()
    assert waiter.deleted.wait(20)
    assert waiter.value() is None


def test_what_a_thread_deletes_is_held_until_the_next_look_at_most(waiter: Waiter) -> None:
    looker = Looker()
    until_waiting(looker, 5.0)
    assert look(looker, 5.0 + LEAST_WAIT_SECONDS)["on"] == "first"
    waiter.first.set()
    assert waiter.deleted.wait(20)
    looker.moved(7.0)
    assert waiter.value() is None
    assert waiter.could_read == [True]
