"""Who is told that a wait is in vain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rpc.agent.standstill import InVain, Standstill
from rpc.errors import RpcError

FOUND = InVain("why", "to others", ["gone", "leaving", "waiting"])


class Answer:
    def __init__(self, name: str, arrived: list[str]) -> None:
        self._name = name
        self._arrived = arrived

    def wait(self) -> None:
        self._arrived.append(self._name)
        if self._name == "leaving":
            raise RpcError("it left before it answered")


class Others:
    """In place of the caller: of the workers, one is gone and one leaves."""

    def __init__(self) -> None:
        self.arrived: list[str] = []

    def call_async(self, name: str, *_: object) -> Answer:
        if name == "gone":
            raise RpcError("it is gone")
        return Answer(name, self.arrived)


class Unread:
    """In place of what is not asked here."""

    def allow_function(self, function: Callable[..., object]) -> None:
        pass


def test_all_that_wait_in_shutdown_know_before_who_found_out_goes_on_and_may_leave() -> None:
    others: Any = Others()
    unread: Any = Unread()
    Standstill(others, unread, unread, unread, unread, unread).end_shutdowns(FOUND)
    assert others.arrived == ["leaving", "waiting"]
