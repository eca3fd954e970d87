"""Messages that are late until a test sends them, where the time of a delay would be a race."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from rpc.runtime.current import current_agent

__all__ = ["holding_late_messages"]


@contextmanager
def holding_late_messages() -> Iterator[list[Callable[[], object]]]:
    """Holds what ``rpc.testing.faults`` delays here meanwhile; yields what sends each of them, in order."""
    mailbox = current_agent().mailbox
    held: list[Callable[[], object]] = []

    def later(seconds: float, function: Callable[[], object]) -> None:
        held.append(functools.partial(mailbox.call, function))

    with mock.patch.object(mailbox, "later", later):
        yield held
