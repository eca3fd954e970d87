"""Messages that are late until a test sends them, where the time of a delay would be a race."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from rpc.testing.faults import _AgentSender

__all__ = ["holding_late_messages"]


@contextmanager
def holding_late_messages() -> Iterator[list[Callable[[], object]]]:
    """Holds what ``rpc.testing.faults`` delays here meanwhile; yields what sends each of them, in order."""
    held: list[Callable[[], object]] = []

    def later(sender: _AgentSender, seconds: float, function: Callable[[], object]) -> None:
        held.append(functools.partial(sender._agent.mailbox.call, function))

    with mock.patch.object(_AgentSender, "later", later):
        yield held
