"""Ctrl-C is deferred in protected functions, and raised as soon as they have returned."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from rpc.runtime.interrupts import (
    defer_interrupts,
    ensure_deferred,
    interruptible,
    protected,
    restore_interrupts,
)

SOON = 30.0


@pytest.fixture(autouse=True)
def deferring() -> Iterator[None]:
    defer_interrupts()
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


@protected
def press_before(then: Callable[[], object]) -> None:
    press_ctrl_c()
    then()


def replace_and_use(handler: Callable[[int, FrameType | None], object] | int | None) -> None:
    """What a program does that installs a handler of its own, and then calls farcall."""
    signal.signal(signal.SIGINT, handler)
    ensure_deferred()


def test_protection_is_there_again_after_pythons_handler_was_installed() -> None:
    """As ipykernel does before each cell."""
    done: list[str] = []
    replace_and_use(signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        press_and_go_on(done)
        wait_to_be_interrupted()
    assert done == ["all of it"]


@pytest.mark.parametrize("installed", ["before", "after"])
def test_a_handler_of_the_programs_runs_outside_protected_sections(installed: str) -> None:
    order: list[str] = []
    came = threading.Event()

    def own(number: int, frame: FrameType | None) -> None:
        order.append("handler")
        came.set()

    if installed == "before":
        restore_interrupts()
        signal.signal(signal.SIGINT, own)
        defer_interrupts()
    else:
        replace_and_use(own)
    press_before(lambda: order.append("section"))
    assert came.wait(SOON)
    assert order == ["section", "handler"]
    restore_interrupts()
    assert signal.getsignal(signal.SIGINT) is own
    signal.signal(signal.SIGINT, signal.default_int_handler)
    defer_interrupts()


def test_an_ignored_signal_stays_ignored() -> None:
    replace_and_use(signal.SIG_IGN)
    press_ctrl_c()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    replace_and_use(signal.default_int_handler)


def test_a_callback_of_an_event_loop_is_called_once() -> None:
    async def press() -> int:
        loop, pressed = asyncio.get_running_loop(), asyncio.Queue[None]()
        loop.add_signal_handler(signal.SIGINT, pressed.put_nowait, None)
        ensure_deferred()
        press_before(int)
        await pressed.get()
        await asyncio.sleep(0.05)  # no other comes
        loop.remove_signal_handler(signal.SIGINT)
        return pressed.qsize()

    assert asyncio.run(press()) == 0
    ensure_deferred()


def test_protection_lasts_until_the_last_agent_has_ended() -> None:
    defer_interrupts()
    restore_interrupts()
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler


def test_an_agent_that_another_thread_starts_is_protected_once_the_main_thread_uses_it() -> None:
    restore_interrupts()
    thread = threading.Thread(target=defer_interrupts)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ensure_deferred()
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        press_and_go_on(done)
        wait_to_be_interrupted()
    assert done == ["all of it"]


def test_the_handler_of_an_asyncio_run_that_has_ended_is_not_put_back() -> None:
    async def use() -> None:
        ensure_deferred()
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler

    signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio.run(use())
    restore_interrupts()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    defer_interrupts()
