"""The result of an operation, and code of the user's that runs while it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from spmd.collectives.sequencer import Sequencer
from spmd.collectives.work import GroupWork


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
        def run() -> None:
            order.append(name)
            then()

        return GroupWork(name, [], run, sequencer.help)

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
