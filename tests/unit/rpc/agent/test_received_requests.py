"""Requests that wait for objects: they are under way until they run, and no longer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rpc.agent.received_requests import ReceivedRequests, Request
from rpc.runtime.events import Events
from rpc.runtime.tasks import Task
from rpc.serialization.serializer import Serializer
from tests.support.noted_activity import NotedActivity


def test_who_waits_to_leave_is_told_when_a_request_is_postponed_no_more() -> None:
    """The request may have ended before: what is told then comes too early."""
    confirmations: list[Callable[[], object]] = []
    activity, serializer = NotedActivity(), Serializer()

    def ready(_: object, when_ready: Callable[[], object]) -> bool:
        confirmations.append(when_ready)
        return False

    def run(task: Task) -> None:
        function, argument = task
        function(argument)
        activity.ended()

    serializer.ready = ready  # type: ignore[assignment]
    ran: list[Request] = []
    request = Request(SimpleNamespace(reader=None, lost=None), None, {"rref": []})  # type: ignore[arg-type]
    executor: Any = SimpleNamespace(submit=run, lend=lambda *_, **__: 0)
    callee = ReceivedRequests(serializer, Events(), executor, activity)
    assert callee.accept(request, ran.append) is None
    assert (ran, activity.postponed.value) == ([], 1)
    [confirm] = confirmations
    confirm()
    assert ran == [request]
    assert activity.told[-1] == 0


@pytest.mark.parametrize("before", [False, True])
def test_a_cancelled_request_does_not_wait_for_objects_and_is_counted_no_more(before: bool) -> None:
    confirmations: list[Callable[[], object]] = []
    activity, serializer = NotedActivity(), Serializer()

    def ready(_: object, when_ready: Callable[[], object]) -> bool:
        confirmations.append(when_ready)
        return False

    serializer.ready = ready  # type: ignore[assignment]
    submitted: list[Task] = []
    lost: Any = SimpleNamespace(reader=None, lost=None)
    request = Request(lost, None, {"rref": []})  # type: ignore[arg-type]
    executor: Any = SimpleNamespace(submit=submitted.append)
    callee = ReceivedRequests(serializer, Events(), executor, activity)
    if before:
        request.cancel()
    assert callee.accept(request, print) is None
    if not before:
        callee.peer_gone(lost, "it has died")
    assert (len(submitted), activity.postponed.value, request.cancelled) == (1, 0, True)
    confirmations[0]()
    assert (len(submitted), activity.postponed.value) == (1, 0)
