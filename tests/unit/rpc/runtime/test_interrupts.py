"""Ctrl-C is deferred in protected functions, and raised as soon as they have returned."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from rpc.runtime.interrupts import defer_interrupts, interruptible, protected, restore_interrupts

SOON = 30.0


@pytest.fixture(autouse=True)
def deferring() -> Iterator[None]:
    assert defer_interrupts()
    yield
    restore_interrupts()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def wait_to_be_interrupted() -> None:
    threading.Event().wait(SOON)


@protected
def press_and_go_on(done: list[str]) -> None:
    press_ctrl_c()
    done.append("all of it")


def test_it_is_raised_at_once_where_nothing_is_protected() -> None:
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()


def test_a_protected_function_runs_to_its_end_before_it_is_raised() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it may come at either line
        press_and_go_on(done)
        wait_to_be_interrupted()
    assert done == ["all of it"]


def test_one_that_was_deferred_is_not_raised_after_a_later_one() -> None:
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        press_and_go_on([])
        press_ctrl_c()
    threading.Event().wait(0.1)  # nothing comes


def test_what_a_protected_function_calls_is_protected_too() -> None:
    done: list[str] = []

    @protected
    def outer() -> None:
        list(map(lambda _: press_ctrl_c(), (1,)))  # noqa: C417
        done.append("all of it")

    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        outer()
        wait_to_be_interrupted()
    assert done == ["all of it"]


def test_an_interruptible_function_within_a_protected_one_is_interrupted_at_once() -> None:
    undone: list[str] = []

    @interruptible
    def wait() -> None:
        press_ctrl_c()

    @protected
    def section() -> None:
        try:
            wait()
        finally:
            press_ctrl_c()  # a second one, in the clean-up
            undone.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        section()
    assert undone == ["all of it"]
    with pytest.raises(KeyboardInterrupt):
        wait_to_be_interrupted()


def test_a_protected_finalizer_does_not_lose_it() -> None:
    done: list[str] = []

    class Finalized:
        @protected
        def __del__(self) -> None:
            press_ctrl_c()
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        Finalized()
        wait_to_be_interrupted()
    assert done == ["all of it"]


def test_a_handler_of_the_users_stays() -> None:
    restore_interrupts()
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        assert not defer_interrupts()
        press_ctrl_c()
        restore_interrupts()
        assert pressed == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        assert defer_interrupts()


def test_it_is_not_installed_from_another_thread() -> None:
    restore_interrupts()
    installed: list[bool] = []
    thread = threading.Thread(target=lambda: installed.append(defer_interrupts()))
    thread.start()
    thread.join()
    assert installed == [False]
    assert defer_interrupts()
