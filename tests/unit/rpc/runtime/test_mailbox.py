"""What threads leave for the loop is done, in order and with one call of the loop, even if Ctrl-C comes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from rpc.runtime import mailbox as module
from rpc.runtime.mailbox import Mailbox
from tests.support import clockwork as clockwork_module
from tests.support.clockwork import Clockwork
from tests.support.ctrl_c import interrupted_at

Leave = Callable[[Mailbox, Callable[[Any], object], Any], None]

ways = pytest.mark.parametrize("leave", [Mailbox.soon, Mailbox.gathered], ids=lambda way: way.__name__)


@ways
def test_the_loop_is_called_once_for_all_that_is_left_to_it(leave: Leave) -> None:
    clockwork, done, told = Clockwork(), list[int](), list[int]()
    deferred = Mailbox(clockwork, lambda: told.append(len(done)))  # type: ignore[arg-type]
    for number in range(100):
        leave(deferred, done.append, number)
    assert deferred.pending()
    clockwork.advance(1)
    assert done == list(range(100))
    assert told == [100]
    assert clockwork.woken == 1
    assert not deferred.pending()


@ways
def test_ctrl_c_at_any_line_leaves_nothing_undone_and_later_things_are_done(leave: Leave) -> None:
    files = (module.__file__, clockwork_module.__file__)
    for line in itertools.count(1):
        clockwork, done = Clockwork(), list[int]()
        deferred = Mailbox(clockwork, lambda: None)  # type: ignore[arg-type]
        interrupted = interrupted_at(
            line, functools.partial(leave, deferred, done.append, 1), files.__contains__
        )
        clockwork.advance(1)
        assert not deferred.pending(), line
        leave(deferred, done.append, 2)
        clockwork.advance(1)
        assert done in ([2], [1, 2]), line
        if not interrupted:
            break
    assert line > 5
