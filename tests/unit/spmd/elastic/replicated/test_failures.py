"""What a primary does when a backup fails, instead of asking it again for ever."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest

from rpc.errors import RemoteError
from spmd.elastic.replicated.machine import OBJECT, Method, ObjectMachine
from spmd.elastic.replicated.order import (
    Answer,
    Apply,
    Call,
    Copy,
    Done,
    Failed,
    Install,
    Outcome,
    Refusal,
    Release,
    Unsendable,
    View,
)


class Counter:
    """An object that counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def run(self, what: Any) -> Outcome:
        self.count += 1
        return Outcome(self.count)

    def snapshot(self) -> int:
        return self.count

    def restore(self, state: int) -> None:
        self.count = state


@pytest.fixture
def primary() -> Copy:
    copy = Copy(1, Counter(), 2)
    copy.found()
    copy.add(2)
    return copy


def test_backup_that_fails_at_a_call_gets_the_state(primary: Copy) -> None:
    steps = primary.settle()
    assert isinstance(next(steps)[2], Install)
    with pytest.raises(StopIteration):
        steps.send({2: Done((0, 0))})
    steps = primary.replicate(Call(9, 1, 1, "add"), lambda what: what)
    assert isinstance(next(steps)[2], Apply)
    message = steps.send({2: Failed(RuntimeError())})[2]
    assert isinstance(message, Install)
    assert message.state is not None


@pytest.mark.parametrize("answer", [Failed(RuntimeError()), Unsendable(TypeError())])
def test_backup_that_cannot_get_the_state_is_released_once_it_has_promised(
    primary: Copy, answer: Answer
) -> None:
    steps = primary.settle()
    assert isinstance(next(steps)[2], Install)
    assert isinstance(steps.send({2: answer})[2], Release)
    assert isinstance(steps.send({2: None})[2], Release)
    with pytest.raises(StopIteration):
        steps.send({2: (Refusal.UNFIT, 0)})
    assert isinstance(primary.view, View)
    assert primary.view.members == (1,)


class Ending:
    """An object with a method that ends the process, were it not called remotely."""

    def end(self) -> None:
        raise SystemExit(3)


def test_exit_in_a_method_is_an_outcome() -> None:
    machine = ObjectMachine(Ending)
    machine.make()
    outcome = machine.run(Method(OBJECT, "end", (), {}))
    assert isinstance(outcome.error, RuntimeError)
    assert "SystemExit" in str(outcome.error)
    assert outcome.error.__traceback__ is None


def test_remembered_exception_that_cannot_be_pickled_is_sent_with_the_state_by_its_text() -> None:
    error = ValueError("no room", threading.Lock())
    sent = pickle.loads(pickle.dumps(Outcome(None, error)))
    assert isinstance(sent.error, RemoteError)
    assert "ValueError: ('no room'" in str(sent.error)
    kept = pickle.loads(pickle.dumps(Outcome(None, KeyError("key")))).error
    assert isinstance(kept, KeyError)
