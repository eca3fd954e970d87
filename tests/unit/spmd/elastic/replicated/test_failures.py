"""What a primary does when a copy is missing, or a backup fails, instead of asking it again for ever."""

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
    State,
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
        if self.count == 13:
            raise TypeError("cannot be pickled")
        return self.count

    def restore(self, state: int) -> None:
        self.count = state

    def forget(self, session: int) -> None:
        """Nothing belongs to callers."""


@pytest.fixture
def primary() -> Copy:
    copy = Copy(1, Counter(), 2)
    copy.found()
    copy.candidate = 2
    return copy


def add_backup(primary: Copy) -> None:
    steps = primary.settle()
    assert isinstance(next(steps)[2], Install)
    assert isinstance(steps.send({2: Done((0, 0))})[2], Apply)
    with pytest.raises(StopIteration):
        steps.send({2: Done((1, 1))})


def add(number: int) -> Call:
    return Call(9, number, number, "add")


def test_candidate_is_added_before_the_next_call(primary: Copy) -> None:
    add_backup(primary)
    primary.gone.add(2)
    with pytest.raises(StopIteration):
        next(primary.settle())
    primary.candidate = 3
    steps = primary.replicate(add(1), lambda what: what)
    message = next(steps)[3]
    assert isinstance(message, Install)
    assert message.state is not None
    assert isinstance(steps.send({3: Done((1, 1))})[3], Apply)


def test_object_that_cannot_be_copied_goes_on_alone_until_it_can(primary: Copy) -> None:
    add_backup(primary)
    primary.gone.add(2)
    for number in range(1, 14):
        with pytest.raises(StopIteration):
            next(primary.replicate(add(number), lambda what: what))
    primary.candidate = 3
    with pytest.raises(StopIteration):
        next(primary.settle())
    assert isinstance(primary.failure, TypeError)
    with pytest.raises(StopIteration):  # once for each time that a candidate is named
        next(primary.replicate(add(14), lambda what: what))
    primary.candidate = 3
    assert isinstance(next(primary.settle())[3], Install)
    assert primary.failure is None


def test_backup_that_fails_at_a_call_gets_the_state(primary: Copy) -> None:
    add_backup(primary)
    steps = primary.replicate(add(1), lambda what: what)
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


def test_worker_that_could_not_keep_a_copy_keeps_one_in_a_later_view() -> None:
    full = [True]

    class Restored(Counter):
        def restore(self, state: Any) -> None:
            if full[0]:
                raise MemoryError

    worker = Copy(2, Restored(), 2)
    state = State((1, 1), {}, {}, frozenset(), 1)
    first = Install(View(2, (1, 2)), state)
    with pytest.raises(MemoryError):
        worker.receive(1, 1, first)
    full[0] = False
    assert worker.receive(1, 2, first) == (Refusal.UNFIT, 0)  # the primary may rely on the promise
    older = Install(View(5, (9, 1, 2)), state)  # of an earlier primary
    assert worker.receive(9, 1, older) == (Refusal.UNFIT, 0)
    assert worker.receive(1, 3, Apply(2, (2, 1), None)) == (Refusal.UNFIT, 0)
    assert worker.receive(1, 4, Install(View(4, (1, 2)), state)) == Done((1, 1))


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
