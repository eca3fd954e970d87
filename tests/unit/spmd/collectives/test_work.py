"""The result of an operation, and code of the user's that runs while it ends."""

from __future__ import annotations

from functools import partial

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
