"""An object at its owner: being made, made or failed."""

from __future__ import annotations

import pytest

from rpc.errors import RemoteError
from rref.value import Value
from tests.support.members import peer


def test_who_comes_before_the_object_is_told_once_it_is_made() -> None:
    value, called = Value(), []
    fetch = (peer(), 1)
    assert value.park(fetch)
    assert not value.when_ready(lambda: called.append(value.get()))
    assert value.set(5) == [fetch]
    assert called == [5]


def test_what_fails_stays_failed() -> None:
    value = Value()
    assert value.park((peer(), 1))
    assert len(value.fail(LookupError("not today"))) == 1
    assert value.set(5) == []
    for _ in range(2):
        with pytest.raises(LookupError, match="not today"):
            value.get()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_what_ended_the_thread_that_made_it_does_not_end_one_that_waits(error: BaseException) -> None:
    value = Value()
    value.fail(error)
    with pytest.raises(RemoteError, match=f"making the object raised {type(error).__name__}"):
        value.wait(0, "the object")
