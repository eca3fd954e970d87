"""Signal handlers do not run in protected functions, but as soon as these have returned."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import asyncio
import ctypes
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FrameType

import pytest

from rpc.runtime.interrupts import (
    defer_interrupts,
    ensure_deferred,
    interruptible,
    is_interruption,
    protected,
    restore_interrupts,
)

SOON = 30.0
_FLAGS, _SA_RESTART = 136, 0x10000000
"""Offset of ``sa_flags`` in glibc's ``struct sigaction`` on 64-bit machines, and a flag."""


@pytest.fixture(autouse=True)
def deferring() -> Iterator[None]:
    defer_interrupts()
    yield
    restore_interrupts()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert isinstance(_signal.signal, BuiltinFunctionType)


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def wait_to_be_interrupted() -> None:
    threading.Event().wait(SOON)


@protected
def press_and_go_on(done: list[str]) -> None:
    press_ctrl_c()
    done.append("all of it")


def assert_is_deferred(section: Callable[[list[str]], object] = press_and_go_on) -> None:
    """A section that presses Ctrl-C, and then does something, does all of it before that is raised."""
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it may come at either line
        section(done)
        wait_to_be_interrupted()
    assert done == ["all of it"]


def test_a_protected_function_runs_to_its_end_before_it_is_raised() -> None:
    assert_is_deferred()


def test_one_that_was_deferred_is_not_raised_after_a_later_one() -> None:
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        press_and_go_on([])
        press_ctrl_c()
    threading.Event().wait(0.1)  # nothing comes


def test_what_a_protected_function_calls_is_protected_too() -> None:
    @protected
    def outer(done: list[str]) -> None:
        list(map(lambda _: press_ctrl_c(), (1,)))  # noqa: C417
        done.append("all of it")

    assert_is_deferred(outer)


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

    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        try:
            section()
        except KeyboardInterrupt:  # the first one
            undone.append("and the second comes now")
            wait_to_be_interrupted()
    assert undone == ["all of it", "and the second comes now"]


def test_a_protected_finalizer_does_not_lose_it() -> None:
    class Finalized:
        def __init__(self, done: list[str]) -> None:
            self.done = done

        @protected
        def __del__(self) -> None:
            press_ctrl_c()
            self.done.append("all of it")

    assert_is_deferred(Finalized)


@protected
def press_before(then: Callable[[], object]) -> None:
    press_ctrl_c()
    then()


class TooLong(Exception):
    pass


def too_long(number: int, frame: FrameType | None) -> None:
    raise TooLong


@pytest.fixture
def alarm() -> Iterator[None]:
    """SIGUSR1 raises ``TooLong``."""
    before = signal.signal(signal.SIGUSR1, too_long)
    yield
    assert signal.signal(signal.SIGUSR1, before) is too_long


@protected
def ring_and_go_on(done: list[str]) -> None:
    signal.raise_signal(signal.SIGUSR1)
    done.append("all of it")


@pytest.mark.usefixtures("alarm")
def test_the_handler_of_any_signal_runs_at_the_very_end_of_the_protected_function() -> None:
    done: list[str] = []
    with pytest.raises(TooLong):  # noqa: PT012
        ring_and_go_on(done)
        _ = done[0].upper()
        done.append("the statement after it")
    assert done == ["all of it"]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="is as without a debugger")
@pytest.mark.usefixtures("alarm")
def test_a_protected_function_goes_on_under_a_debugger() -> None:
    done: list[str] = []
    sys.settrace(lambda *_: None)
    end = time.monotonic() + SOON
    try:
        with pytest.raises(TooLong):  # noqa: PT012
            ring_and_go_on(done)
            while time.monotonic() < end:
                pass
    finally:
        sys.settrace(None)
    assert done == ["all of it"]


@pytest.mark.usefixtures("alarm")
def test_several_signals_are_deferred_at_once() -> None:
    done: list[str] = []

    @protected
    def section() -> None:
        press_and_go_on(done)
        ring_and_go_on(done)

    with pytest.raises((KeyboardInterrupt, TooLong)) as last:  # noqa: PT012
        try:
            section()
            wait_to_be_interrupted()
        except (KeyboardInterrupt, TooLong):
            wait_to_be_interrupted()
    assert done == ["all of it"] * 2
    assert {last.type, type(last.value.__context__)} == {KeyboardInterrupt, TooLong}


def test_a_deferred_handler_runs_before_it_is_replaced() -> None:
    """Otherwise the default action of a signal that came before would end the process."""
    before = signal.signal(signal.SIGUSR1, too_long)
    with pytest.raises(TooLong):  # noqa: PT012
        ring_and_go_on([])
        signal.signal(signal.SIGUSR1, before)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


@pytest.mark.usefixtures("alarm")
def test_what_a_handler_has_raised_is_known_as_such() -> None:
    def of(call: Callable[[], object]) -> bool:
        try:
            call()
        except BaseException as error:
            return is_interruption(error)
        raise AssertionError

    assert of(lambda: signal.raise_signal(signal.SIGUSR1))
    assert of(press_ctrl_c)
    assert not of(lambda: too_long(0, None))


def replace_and_use(handler: Callable[[int, FrameType | None], object] | int | None) -> None:
    """What a program does that installs a handler of its own, and then calls farcall."""
    signal.signal(signal.SIGINT, handler)
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_handler_that_is_installed_later_is_deferred_too() -> None:
    """As ipykernel does before each cell."""
    replace_and_use(signal.default_int_handler)
    assert_is_deferred()


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


def test_what_c_code_has_installed_over_a_handler_stays_installed() -> None:
    """As faulthandler, or an extension module: Python's own table still has the handler."""
    restore_interrupts()
    own: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: own.append(number))
    with tempfile.TemporaryFile() as dumps:
        sizes: list[int] = []
        faulthandler.register(signal.SIGUSR1, dumps)
        for change in (defer_interrupts, restore_interrupts, defer_interrupts):
            change()
            signal.raise_signal(signal.SIGUSR1)
            sizes.append(os.fstat(dumps.fileno()).st_size)
        faulthandler.unregister(signal.SIGUSR1)
    assert 0 < sizes[0] < sizes[1] < sizes[2]
    assert not own
    signal.raise_signal(signal.SIGUSR1)
    assert own == [signal.SIGUSR1]
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_handler_that_lets_system_calls_go_on_still_does() -> None:
    restore_interrupts()
    libc, action = ctypes.CDLL(None), ctypes.create_string_buffer(256)

    def restarts() -> bool:
        """Whether ``signal.siginterrupt(SIGUSR1, False)`` is in effect."""
        libc.sigaction(signal.SIGUSR1, None, action)
        return bool(int.from_bytes(action.raw[_FLAGS : _FLAGS + 4], sys.byteorder) & _SA_RESTART)

    signal.signal(signal.SIGUSR1, too_long)
    before = restarts()
    signal.siginterrupt(signal.SIGUSR1, False)
    for change in (defer_interrupts, restore_interrupts, defer_interrupts):
        change()
        assert restarts()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert not before


def test_an_ignored_signal_stays_ignored() -> None:
    replace_and_use(signal.SIG_IGN)
    press_ctrl_c()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    replace_and_use(signal.default_int_handler)


def test_a_callback_of_an_event_loop_is_called_once() -> None:
    async def press() -> int:
        loop, pressed = asyncio.get_running_loop(), asyncio.Queue[None]()
        loop.add_signal_handler(signal.SIGINT, pressed.put_nowait, None)
        press_before(int)
        await pressed.get()
        await asyncio.sleep(0.05)  # no other comes
        loop.remove_signal_handler(signal.SIGINT)
        return pressed.qsize()

    assert asyncio.run(press()) == 0


class Loop(asyncio.SelectorEventLoop):
    """A loop that notes signals in a method, like uvloop's."""

    def __init__(self) -> None:
        super().__init__()
        self.noted = 0

    def note(self, number: int, frame: FrameType | None) -> None:
        self.noted += 1


def test_a_loop_that_notes_signals_notes_each_once() -> None:
    loop = Loop()
    before = signal.signal(signal.SIGUSR1, loop.note)
    ring_and_go_on([])
    signal.signal(signal.SIGUSR1, before)
    loop.close()
    assert loop.noted == 1


def test_protection_lasts_until_the_last_agent_has_ended() -> None:
    defer_interrupts()
    restore_interrupts()
    assert_is_deferred()


def test_an_agent_that_another_thread_starts_is_protected_once_the_main_thread_uses_it() -> None:
    restore_interrupts()
    thread = threading.Thread(target=defer_interrupts)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ensure_deferred()
    assert_is_deferred()


def test_asyncio_installs_its_own_handler_of_ctrl_c_and_restores_pythons() -> None:
    async def use() -> None:
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler

    signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio.run(use())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
