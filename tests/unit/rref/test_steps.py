"""Steps of the reference protocol: one at a time, in order, and nobody waits for a turn."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rpc.errors import RRefError
from rref.protocol.machine import Protocol
from rref.protocol.messages import Action, Free, Send, State
from rref.steps import LEFT, Steps

ME, OWNER, SENDER = 1, 2, 3
DESCRIPTOR = [OWNER, [OWNER, 1], [SENDER, 1]]
FORK = (SENDER, 1)


class Shell:
    """Steps, what they ask for, and a loop that runs what is gathered when the test says so."""

    def __init__(self) -> None:
        self.protocol = Protocol(ME)
        self.acted: list[Action] = []
        self.failed: list[str] = []
        self.gathered: list[Callable[[None], object]] = []
        mailbox: Any = SimpleNamespace(gathered=lambda function, _: self.gathered.append(function))
        self.steps = Steps(
            self.protocol,
            mailbox,
            self.acted.extend,
            lambda args, error: self.failed.append(f"{args[-1]}: {error}"),
        )

    def in_a_step(self, function: Callable[[], object]) -> None:
        """Call a function in the middle of a step, as signal handlers and destructors are."""
        self.steps.do(function)

    def loop(self) -> None:
        gathered, self.gathered = self.gathered, []
        for function in gathered:
            function(None)


def test_a_step_in_the_middle_of_another_is_taken_after_it() -> None:
    shell = Shell()
    order: list[str] = []

    def interrupted() -> None:
        order.append("begins")
        assert shell.steps.do(order.append, "in the middle") is LEFT
        assert shell.steps.do(order.append, "once more") is LEFT
        order.append("ends")

    shell.in_a_step(interrupted)
    assert order == ["begins", "ends", "in the middle", "once more"]


def test_a_destructor_may_use_references_though_it_is_called_in_a_step() -> None:
    shell = Shell()
    kept = shell.steps.do(shell.protocol.own)

    class Meddler:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            fork, rref = shell.protocol.new_id(), shell.protocol.new_id()
            shell.steps.do(shell.protocol.fork, kept, OWNER, fork)
            shell.steps.do(shell.protocol.own, rref)
            states.append(shell.steps.state(rref))
            shell.steps.later(shell.protocol.release, rref)

    states: list[State] = []
    Meddler()
    shell.in_a_step(gc.collect)
    assert states == [State.PENDING]  # its first step was left
    shell.loop()
    assert len(shell.acted) == 1
    assert shell.steps.ask(shell.protocol.leaks) == {kept: (1, 1)}


def test_who_finds_another_thread_in_a_step_does_not_wait_for_it() -> None:
    shell = Shell()
    stepping, go_on = threading.Event(), threading.Event()

    def stay() -> None:
        stepping.set()
        go_on.wait()

    thread = threading.Thread(target=shell.in_a_step, args=(stay,))
    thread.start()
    stepping.wait()
    rref = shell.protocol.new_id()
    assert shell.steps.do(shell.protocol.own, rref) is LEFT
    assert shell.steps.state(rref) is State.PENDING
    go_on.set()
    thread.join()
    assert shell.steps.state(rref) is State.CONFIRMED


def test_what_is_for_later_is_taken_by_the_loop_all_at_once() -> None:
    shell = Shell()
    rrefs = [shell.steps.do(shell.protocol.own) for _ in range(3)]
    for rref in rrefs:
        shell.steps.later(shell.protocol.release, rref)
    assert len(shell.gathered) == 1
    assert not shell.acted
    shell.loop()
    assert shell.acted == [Free(rref) for rref in rrefs]


def test_what_is_put_off_is_taken_after_what_was_left_before() -> None:
    """Another thread makes an object and drops it, while the loop is at what was for later."""
    shell = Shell()
    rref = shell.protocol.new_id()

    def other_thread() -> None:
        assert shell.steps.do(shell.protocol.own, rref) is LEFT
        shell.steps.later(shell.protocol.release, rref)

    shell.steps.later(other_thread)
    shell.loop()
    assert shell.acted == [Free(rref)]


def test_who_waits_for_a_reference_is_called_when_it_is_settled() -> None:
    shell = Shell()
    called: list[str] = []
    ref = shell.steps.do(shell.protocol.adopt, DESCRIPTOR, SENDER)

    def late() -> None:
        called.append("late")

    assert not shell.steps.when_settled(ref, lambda: called.append("first"))
    assert not shell.steps.when_settled(ref, late)
    shell.steps.await_no_more(ref, late)
    assert shell.steps.is_awaited(ref)
    shell.steps.do(shell.protocol.receive, OWNER, ["confirmed", [SENDER, 1]])
    assert called == ["first"]
    sent = [action for action in shell.acted if isinstance(action, Send)]
    assert sent == [Send(OWNER, ["confirm", (OWNER, 1), FORK]), Send(SENDER, ["accepted", FORK])]
    assert shell.steps.when_settled(ref, late)
    assert not shell.steps.is_awaited(ref)


def test_who_waits_for_a_reference_whose_steps_were_left_is_called() -> None:
    shell = Shell()
    called: list[str] = []

    def interrupted() -> None:
        shell.steps.do(shell.protocol.adopt, DESCRIPTOR, SENDER)
        assert not shell.steps.when_settled(FORK, lambda: called.append("settled"))
        shell.steps.do(shell.protocol.receive, OWNER, ["confirmed", [SENDER, 1]])

    shell.in_a_step(interrupted)
    assert called == ["settled"]


def test_whoever_interrupts_a_step_is_told_that_it_cannot_wait() -> None:
    shell = Shell()

    def interrupted() -> None:
        with pytest.raises(RRefError, match="on another thread"):
            shell.steps.ask(shell.protocol.counts)

    shell.in_a_step(interrupted)
    shell.steps.check_may_wait()


def test_a_malformed_message_in_a_step_that_was_left_is_reported() -> None:
    shell = Shell()

    def interrupted() -> None:
        shell.steps.do(shell.protocol.adopt, [4, [4, 1], [4, 1]], SENDER)
        shell.steps.do(shell.protocol.fork, (9, 9), OWNER)  # of no use meanwhile, which is nobody's fault

    shell.in_a_step(interrupted)
    assert shell.failed == [f"{SENDER}: worker {SENDER} sent a fork in another's name: (4, 1)"]


def test_a_step_that_was_left_and_fails_for_want_of_memory_is_reported_and_ends_no_other() -> None:
    shell = Shell()
    later: list[int] = []

    def scarce(_: int) -> None:
        raise MemoryError("none left")

    def interrupted() -> None:
        shell.steps.do(scarce, SENDER)
        shell.steps.do(later.append, 1)

    shell.in_a_step(interrupted)
    assert shell.failed == [f"{SENDER}: none left"]
    assert later == [1]
