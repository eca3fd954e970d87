"""What threads leave for the loop is done, in order and with one call of the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rpc.runtime.mailbox import Mailbox
from tests.support.clockwork import Clockwork

Leave = Callable[[Mailbox, Callable[[Any], object], Any], None]

ways = pytest.mark.parametrize("leave", [Mailbox.soon, Mailbox.gathered], ids=lambda way: way.__name__)


def made(clockwork: Clockwork) -> Mailbox:
    return Mailbox(clockwork)  # type: ignore[arg-type]


@ways
def test_the_loop_is_called_once_for_all_that_is_left_to_it(leave: Leave) -> None:
    clockwork, done, told = Clockwork(), list[int](), list[int]()
    mailbox = made(clockwork)
    mailbox.when_emptied(lambda: told.append(len(done)))
    for number in range(100):
        leave(mailbox, done.append, number)
    assert mailbox.pending()
    clockwork.advance(1)
    assert done == list(range(100))
    assert told == [100]
    assert clockwork.woken == 1
    assert not mailbox.pending()


@ways
def test_what_fails_is_logged_and_the_rest_is_done(leave: Leave, caplog: pytest.LogCaptureFixture) -> None:
    clockwork, done = Clockwork(), list[int]()
    mailbox = made(clockwork)
    leave(mailbox, int, "no number")
    leave(mailbox, done.append, 1)
    clockwork.advance(1)
    assert done == [1]
    assert "a deferred action failed" in caplog.text


@ways
def test_nothing_is_taken_once_it_is_closed(leave: Leave) -> None:
    clockwork, done = Clockwork(), list[int]()
    mailbox = made(clockwork)
    mailbox.close()
    leave(mailbox, done.append, 1)
    clockwork.advance(1)
    assert not mailbox.pending()
    assert not done
