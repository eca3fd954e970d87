"""The result of an operation, and code of the user's that runs while it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from spmd.collectives.sequencer import Sequencer
from spmd.collectives.work import GroupWork
from tests.support.finalizers import Memory, is_free


def test_what_an_operation_keeps_is_released_without_the_lock_of_its_work() -> None:
    found: list[object] = []
    memory = Memory()
    memory.release = lambda: found.append((is_free(work.get_future), work.wait()))
    work = GroupWork("a sum", [], partial(len, memory))
    del memory
    work.run()
    assert found == [(True, True)]


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.usefixtures("no_threads")
def test_operations_run_on_the_calling_thread_in_order_if_the_system_gives_no_other() -> None:
    sequencer = Sequencer("group")
    order: list[str] = []

    def operation(name: str, then: Callable[[], object] = int) -> GroupWork:
        def perform() -> None:
            order.append(name)
            then()

        return GroupWork(name, [], perform, sequencer)

    last = operation("last")
    first = operation("first", lambda: sequencer.submit(last))  # as another thread may
    sequencer.run(first)
    assert order == ["first", "last"], "nobody else would run the last"
    sequencer.submit(operation("asynchronous"))
    assert order == ["first", "last", "asynchronous"]


@pytest.mark.usefixtures("no_threads")
def test_callbacks_run_on_the_agents_threads_if_the_system_gives_no_other() -> None:
    tasks: list[Any] = []
    work = GroupWork("a send", [], run_soon=tasks.extend)
    future = work.get_future()
    work.finish()
    assert not future.done()
    for function, argument in tasks:
        function(argument)
    assert future.done()
