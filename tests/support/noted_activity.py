"""The activity of a part of an agent that a test runs alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rpc.agent.activity import Activity

__all__ = ["NotedActivity"]


class NotedActivity(Activity):
    """Notes how many requests are postponed each time that something has ended."""

    def __init__(self) -> None:
        mailbox: Any = SimpleNamespace(when_emptied=lambda callback: None)
        executor: Any = None
        super().__init__(mailbox, executor)
        self.told: list[int] = []

    def ended(self) -> None:
        self.told.append(self.postponed.value)
